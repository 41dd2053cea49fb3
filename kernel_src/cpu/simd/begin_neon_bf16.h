// Opens the tier NEON with the bf16 instructions (ARMv8.2 with FEAT_BF16). Only bf16 kernels are built for it.
#define PACKFREE_TIER 2
#define PACKFREE_VECTOR_BYTES 16
#define PACKFREE_NEON 1
#define PACKFREE_BF16 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16")
#endif
namespace packfree {
namespace neon_bf16 {
