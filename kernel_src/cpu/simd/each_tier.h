// Compiles an op once per tier. The op's .cpp names its source and includes this file:
//
//   #define PACKFREE_SOURCE "cpu/<op>/kernels-inl.h"
//   #include "cpu/simd/each_tier.h"
//
// The source stands between begin_<tier>.h and end_tier.h, tier after tier, and ends with
//
//   template <class Elem, class Acc>
//   constexpr <Op>Kernels TierKernels();
//
// whose instance for a tier and dtype is what PickKernels returns. PACKFREE_HIGHEST_TIER says what an op gains by:
// PACKFREE_UP_TO_VECTORS, nothing beyond vectors of floats; PACKFREE_UP_TO_BF16, the instructions that multiply bf16
// numbers (if it is not defined); PACKFREE_UP_TO_MATRIX, the matrix unit as well.
#define PACKFREE_UP_TO_VECTORS 2
#define PACKFREE_UP_TO_BF16 3
#define PACKFREE_UP_TO_MATRIX 4

#include "cpu/simd/tier.h"

#ifndef PACKFREE_HIGHEST_TIER
#define PACKFREE_HIGHEST_TIER PACKFREE_UP_TO_BF16
#endif

#include "cpu/simd/begin_scalar.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"

#if PACKFREE_HIGHEST_TIER >= PACKFREE_UP_TO_BF16
#include "cpu/simd/begin_avx512_bf16.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"
#endif

#if PACKFREE_HIGHEST_TIER >= PACKFREE_UP_TO_MATRIX
#include "cpu/simd/begin_amx.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"
#endif
#endif

#if PACKFREE_ARM
#include "cpu/simd/begin_neon.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"

#if PACKFREE_HIGHEST_TIER >= PACKFREE_UP_TO_BF16
#include "cpu/simd/begin_neon_bf16.h"
#include PACKFREE_SOURCE
#include "cpu/simd/end_tier.h"
#endif
#endif

namespace packfree {
namespace {

// The kernels of a tier, or of the best one below it that has any for this dtype.
template <class Elem>
auto PickTier([[maybe_unused]] Tier tier) {
#if PACKFREE_X86
#if PACKFREE_HIGHEST_TIER >= PACKFREE_UP_TO_BF16
  if constexpr (std::is_same_v<Elem, bf16>) {
#if PACKFREE_HIGHEST_TIER >= PACKFREE_UP_TO_MATRIX
    if (tier >= Tier::kAmx) return amx::TierKernels<bf16, float>();
#endif
    if (tier >= Tier::kAvx512Bf16) return avx512_bf16::TierKernels<bf16, float>();
  }
#endif
  if (tier >= Tier::kAvx512) return avx512::TierKernels<Elem, float>();
  if (tier == Tier::kAvx2) return avx2::TierKernels<Elem, float>();
#endif
#if PACKFREE_ARM
#if PACKFREE_HIGHEST_TIER >= PACKFREE_UP_TO_BF16
  if constexpr (std::is_same_v<Elem, bf16>) {
    if (tier >= Tier::kNeonBf16) return neon_bf16::TierKernels<bf16, float>();
  }
#endif
  if (tier >= Tier::kNeon) return neon::TierKernels<Elem, float>();
#endif
  return scalar::TierKernels<Elem, float>();
}

// double, for checks of gradients, runs in the scalar tier only.
auto PickKernels(Tier tier, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return PickTier<float>(tier);
    case Dtype::kBFloat16:
      return PickTier<bf16>(tier);
    case Dtype::kFloat16:
      return PickTier<fp16>(tier);
    case Dtype::kFloat64:
      break;
  }
  return scalar::TierKernels<double, double>();
}

}  // namespace
}  // namespace packfree

#undef PACKFREE_SOURCE
#undef PACKFREE_HIGHEST_TIER
#undef PACKFREE_UP_TO_VECTORS
#undef PACKFREE_UP_TO_BF16
#undef PACKFREE_UP_TO_MATRIX
