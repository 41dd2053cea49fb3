// Compiles an op once per tier. The op's .cpp names its texts and includes this file:
//
//   #define PACKFREE_TEXTS "cpu/<op>/tier-inl.h"
//   #include "cpu/simd/each_tier.h"
//
// The texts stand between begin_<tier>.h and end_tier.h, tier after tier, and end with
//
//   template <class Elem, class Acc>
//   constexpr <Op>Kernels TierKernels();
//
// whose instance for a tier and dtype is what PickKernels returns. An op without texts of its own for the bf16
// instructions defines PACKFREE_HIGHEST_TIER as 2 (the number of AVX-512; then neither AVX-512's nor NEON's are
// compiled), one with texts for the matrix unit as 4.
#include "cpu/simd/tier.h"

#ifndef PACKFREE_HIGHEST_TIER
#define PACKFREE_HIGHEST_TIER 3
#endif

#include "cpu/simd/begin_scalar.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"

#if PACKFREE_HIGHEST_TIER >= 3
#include "cpu/simd/begin_avx512_bf16.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"
#endif

#if PACKFREE_HIGHEST_TIER >= 4
#include "cpu/simd/begin_amx.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"
#endif
#endif

#if PACKFREE_ARM
#include "cpu/simd/begin_neon.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"

#if PACKFREE_HIGHEST_TIER >= 3
#include "cpu/simd/begin_neon_bf16.h"
#include PACKFREE_TEXTS
#include "cpu/simd/end_tier.h"
#endif
#endif

namespace packfree {
namespace {

// The kernels of a tier, or of the best one below it that has any for this dtype.
template <class Elem>
auto PickTier([[maybe_unused]] Tier tier) {
#if PACKFREE_X86
#if PACKFREE_HIGHEST_TIER >= 3
  if constexpr (std::is_same_v<Elem, bf16>) {
#if PACKFREE_HIGHEST_TIER >= 4
    if (tier >= Tier::kAmx) return amx::TierKernels<bf16, float>();
#endif
    if (tier >= Tier::kAvx512Bf16) return avx512_bf16::TierKernels<bf16, float>();
  }
#endif
  if (tier >= Tier::kAvx512) return avx512::TierKernels<Elem, float>();
  if (tier == Tier::kAvx2) return avx2::TierKernels<Elem, float>();
#endif
#if PACKFREE_ARM
#if PACKFREE_HIGHEST_TIER >= 3
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

#undef PACKFREE_TEXTS
#undef PACKFREE_HIGHEST_TIER
