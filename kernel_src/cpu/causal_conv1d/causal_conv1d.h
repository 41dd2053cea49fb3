// Causal depthwise convolution over packed sequences, CPU.
#pragma once

#include <cstdint>

#include "common/causal_conv1d.h"
#include "cpu/simd/tier.h"

namespace packfree {

// Channels of one work item: four registers of the widest tier.
constexpr int64_t kConvChannels = 64;
// Tokens a work item takes before the next one starts. Also the stretch over which one partial sum of the parameter
// gradients runs, so it must not depend on the number of threads.
constexpr int64_t kConvGroupTokens = 512;
// Tokens of one block. Channel-last, a tile of 64 x kConvChannels floats stays in the first-level cache; else a block
// is a stretch of one channel, and longer ones mean fewer sums across lanes.
constexpr int64_t ConvBlockTokens(bool channels_last) { return channels_last ? 64 : 512; }

// Tokens after the last boundary get 0.
void CausalConv1dForwardCpu(Tier tier, const ConvForwardArgs& args);
// `partials` is not read: its memory is the call's own.
void CausalConv1dBackwardCpu(Tier tier, const ConvBackwardArgs& args);
void CausalConv1dUpdateCpu(Tier tier, const ConvUpdateArgs& args);

}  // namespace packfree
