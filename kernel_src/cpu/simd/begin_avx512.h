// Opens the tier AVX-512 F, BW, VL, DQ (x86-64-v4).
#define PACKFREE_TIER 2
#define PACKFREE_AVX512 1
#define PACKFREE_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
namespace packfree {
namespace avx512 {
