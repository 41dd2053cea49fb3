// Opens the tier AVX-512 with the bf16 instructions. Only bf16 kernels are built for it.
#define PACKFREE_TIER 3
#define PACKFREE_AVX512 1
#define PACKFREE_BF16 1
#define PACKFREE_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prefer-vector-width=512")
#endif
namespace packfree {
namespace avx512_bf16 {
