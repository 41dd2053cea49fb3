// The error of a wrong PACKFREE_CPU_TIER, for the ops and for cpu_tier.
#pragma once

#include <cstdlib>
#include <string>

#include "cpu/simd/tier.h"

namespace packfree {

// What PACKFREE_CPU_TIER must be and what it is, after SelectTier has returned false.
inline std::string TierRefusal() {
  std::string text = "PACKFREE_CPU_TIER must be one of ";
  for (int i = 0; i <= static_cast<int>(kBestTier); ++i) {
    if (i > 0) text += ", ";
    text += TierName(static_cast<Tier>(i));
  }
  return text + " and at most " + TierName(BestTier()) + " on this CPU, got " + std::getenv("PACKFREE_CPU_TIER");
}

}  // namespace packfree
