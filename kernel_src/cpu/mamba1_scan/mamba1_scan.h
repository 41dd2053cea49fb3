// Mamba-1's selective scan over packed sequences, CPU.
#pragma once

#include <cstdint>

#include "common/mamba1_scan.h"
#include "cpu/simd/tier.h"

namespace packfree {

// Tokens of a block: what one pass of the inner loops runs over, and the distance of the states that the backward
// recomputes from. Blocks are counted from the first token of a sequence, or of neighbours that are one span.
constexpr int64_t kScanTokens = 32;
// Channels of one work item, whatever the number of threads: eight registers of the widest tier.
constexpr int64_t kScanChannels = 128;
// Neighbouring sequences make one work item until they have this many tokens: the stretch over which one partial sum of
// the parameter gradients runs at least, so it must not depend on the number of threads.
constexpr int64_t kScanGroupTokens = 512;

// Number of work items that the channels are cut into; none spans two groups of B and C.
int64_t ScanChannelBlocks(const ScanArgs& args);

// Tokens after the last boundary get 0.
void Mamba1ScanForwardCpu(Tier tier, const ScanForwardArgs& args);
// Partial sums are not read: their memory is the call's own.
void Mamba1ScanBackwardCpu(Tier tier, const ScanBackwardArgs& args);

}  // namespace packfree
