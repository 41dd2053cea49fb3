// Instruction-set tiers of the CPU kernels, picked at run time.
//
// A kernel's text is written once, in `*-inl.h` files, and compiled once per tier: its .cpp includes begin_<tier>.h,
// the source, and end_tier.h, tier after tier. begin_ opens `namespace packfree::<tier>` under a target pragma; nothing
// with a target attribute is ever visible outside such a pair, so no standard-library code can be compiled for a CPU
// that the user does not have.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#define PACKFREE_X86 1
#else
#define PACKFREE_X86 0
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#define PACKFREE_ARM 1
#else
#define PACKFREE_ARM 0
#endif

#include "common/dtypes.h"

#define PACKFREE_INLINE inline __attribute__((always_inline))

namespace packfree {

// From the slowest to the best of an architecture. kVectorTier is the best tier without a matrix unit: only kernels
// that multiply bf16 matrices have a kernel for that; the others are asked for the tier below.
#if PACKFREE_ARM
enum class Tier { kScalar = 0, kNeon = 1, kNeonBf16 = 2 };
constexpr Tier kVectorTier = Tier::kNeonBf16, kBestTier = Tier::kNeonBf16;
#else
enum class Tier { kScalar = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };
constexpr Tier kVectorTier = Tier::kAvx512Bf16, kBestTier = Tier::kAmx;
#endif

// Name of a tier as PACKFREE_CPU_TIER spells it: scalar, avx2, avx512, avx512_bf16, amx; or scalar, neon, neon_bf16.
const char* TierName(Tier tier);

// The best tier this CPU has.
Tier BestTier();

// The tier to run now: PACKFREE_CPU_TIER if set, else the best. Returns false and leaves `tier` alone if the variable
// names no tier or one that this CPU lacks. Read at each call, so that a test can switch tiers within a process.
bool SelectTier(Tier* tier);

}  // namespace packfree
