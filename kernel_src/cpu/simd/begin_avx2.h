// Opens the tier AVX2 + FMA + F16C (x86-64-v3).
#define PACKFREE_TIER 1
#define PACKFREE_AVX2 1
#define PACKFREE_VECTOR_BYTES 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace packfree {
namespace avx2 {
