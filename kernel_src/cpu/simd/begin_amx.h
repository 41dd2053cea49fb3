// Opens the tier AVX-512 with bf16 and the matrix unit (AMX tiles of bf16). Only kernels that multiply bf16 matrices
// are built for it; everything else runs in the tier below.
#define PACKFREE_TIER 4
#define PACKFREE_AVX512 1
#define PACKFREE_BF16 1
#define PACKFREE_MATRIX_UNIT 1
#define PACKFREE_VECTOR_BYTES 64
#if defined(__clang__)
#pragma clang attribute push(                                                                                 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")
#pragma GCC target("prefer-vector-width=512")
#endif
namespace packfree {
namespace amx {
