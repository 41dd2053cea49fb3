#include "cpu/simd/tier.h"

#include <cstdlib>
#include <cstring>

#if PACKFREE_X86
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if PACKFREE_ARM && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace packfree {

namespace {
#if PACKFREE_ARM
constexpr const char* kNames[] = {"scalar", "neon", "neon_bf16"};
#else
constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};
#endif
static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<int>(kBestTier) + 1);

#if PACKFREE_X86
// Tile registers are large, so Linux hands them to a process only on request (once, for all its threads).
bool RequestMatrixUnit() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

#if PACKFREE_X86
// Features that clang's __builtin_cpu_supports has no name for. Whether the system saves their registers is what the
// checks beside them say: AVX2's for F16C, RequestMatrixUnit for the tiles.
struct UnnamedFeatures {
  bool f16c = false;
  bool amx = false;
};

UnnamedFeatures ReadUnnamedFeatures() {
  UnnamedFeatures found;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) found.f16c = (c >> 29 & 1) != 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) found.amx = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  return found;
}
#endif

Tier DetectBestTier() {
#if PACKFREE_X86
  __builtin_cpu_init();
  const UnnamedFeatures unnamed = ReadUnnamedFeatures();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && unnamed.f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (avx512_bf16 && unnamed.amx && RequestMatrixUnit()) return Tier::kAmx;
  if (avx512_bf16) return Tier::kAvx512Bf16;
  if (avx512) return Tier::kAvx512;
  if (avx2) return Tier::kAvx2;
#endif
#if PACKFREE_ARM
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
  if ((getauxval(AT_HWCAP2) & kBf16) != 0) return Tier::kNeonBf16;
#endif
  return Tier::kNeon;
#else
  return Tier::kScalar;
#endif
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
