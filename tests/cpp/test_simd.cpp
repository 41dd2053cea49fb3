// Checks the verbs of the SIMD layer in every tier this CPU has, against plain double arithmetic. Exits with the number
// of failures. Compiled and run by tests/cpp/test_simd.py.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "cpu/simd/tier.h"

namespace {
int failures = 0;

void Check(bool good, const char* tier, const char* what, double value) {
  if (good) return;
  ++failures;
  std::printf("%s: %s is wrong: %.9g\n", tier, what, value);
}
}  // namespace

#include "cpu/simd/begin_scalar.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "simd_checks-inl.h"
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "simd_checks-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "simd_checks-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "simd_checks-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_amx.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/simd/matrix-inl.h"
#include "matrix_checks-inl.h"
#include "cpu/simd/end_tier.h"
#endif

#if PACKFREE_ARM
#include "cpu/simd/begin_neon.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "simd_checks-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_neon_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "simd_checks-inl.h"
#include "cpu/simd/end_tier.h"
#endif

int main() {
  using packfree::Tier;
  const Tier best = packfree::BestTier();
  packfree::scalar::CheckAll<float>("scalar float");
  packfree::scalar::CheckAll<double>("scalar double");
#if PACKFREE_X86
  if (best >= Tier::kAvx2) packfree::avx2::CheckAll<float>("avx2");
  if (best >= Tier::kAvx512) packfree::avx512::CheckAll<float>("avx512");
  if (best >= Tier::kAvx512Bf16) packfree::avx512_bf16::CheckAll<float>("avx512_bf16");
  if (best >= Tier::kAmx) packfree::amx::CheckMatrixUnit("amx");
#endif
#if PACKFREE_ARM
  if (best >= Tier::kNeon) packfree::neon::CheckAll<float>("neon");
  if (best >= Tier::kNeon) packfree::neon::CheckAll<double>("neon double");
  if (best >= Tier::kNeonBf16) packfree::neon_bf16::CheckAll<float>("neon_bf16");
#endif
  std::printf("best tier %s, %d failures\n", packfree::TierName(best), failures);
  return failures == 0 ? 0 : 1;
}
