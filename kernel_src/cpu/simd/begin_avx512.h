// Opens the tier AVX-512 F, BW, VL, DQ (x86-64-v4).
#define PACKFREE_TIER 2
#define PACKFREE_VECTOR_BYTES 64
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace packfree {
namespace avx512 {
