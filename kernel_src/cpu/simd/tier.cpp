#include "cpu/simd/tier.h"

#include <cstdlib>
#include <cstring>

namespace packfree {

namespace {
constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_bf16"};

Tier DetectBestTier() {
#if PACKFREE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return Tier::kAvx512Bf16;
  if (avx512) return Tier::kAvx512;
  if (avx2) return Tier::kAvx2;
#endif
  return Tier::kScalar;
}
}  // namespace

const char* TierName(Tier tier) { return kNames[static_cast<int>(tier)]; }

Tier BestTier() {
  static const Tier best = DetectBestTier();
  return best;
}

bool SelectTier(Tier* tier) {
  const char* wanted = std::getenv("PACKFREE_CPU_TIER");
  if (wanted == nullptr || *wanted == '\0') {
    *tier = BestTier();
    return true;
  }
  for (int i = 0; i <= static_cast<int>(BestTier()); ++i) {
    if (std::strcmp(wanted, kNames[i]) == 0) {
      *tier = static_cast<Tier>(i);
      return true;
    }
  }
  return false;
}

}  // namespace packfree
