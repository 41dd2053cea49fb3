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

// Number of groups that `packing` is cut into: the first extent of ConvBackwardArgs::partials.
int64_t ConvGroups(const PackingView& packing, bool channels_last);

void causal_conv1d_fwd_cpu(const ConvForwardArgs& args, Tier tier);
// Fills dx, dinitial_state and partials. Tokens after the last boundary are not written.
void causal_conv1d_bwd_cpu(const ConvBackwardArgs& args, Tier tier);
// Sums the groups of args.partials in order into dweight [D, W] and, unless null, dbias [D]; both Acc.
void causal_conv1d_reduce_cpu(const ConvBackwardArgs& args, int64_t groups, void* dweight, void* dbias);
void causal_conv1d_update_cpu(const ConvUpdateArgs& args, Tier tier);

}  // namespace packfree
