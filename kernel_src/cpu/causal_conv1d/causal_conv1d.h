// Causal depthwise convolution over packed sequences, CPU.
#pragma once

#include <cstdint>

#include "common/causal_conv1d.h"
#include "cpu/simd/tier.h"

namespace packfree {

// The most channels of one work item. Channel-last these lie side by side for each token, so that memory is read in
// pieces long enough for the prefetchers whatever lies between two tokens.
constexpr int64_t kConvItemChannels = 256;
// Tokens a work item takes before the next one starts. Also the stretch over which one partial sum of the parameter
// gradients runs, so it must not depend on the number of threads.
constexpr int64_t kConvGroupTokens = 512;

// Tokens first, ..., last - 1 of the pack, kConvGroupTokens at most and all of one row, whatever sequences they are of.
struct ConvBlock {
  int64_t first;
  int64_t last;
  int64_t row_place;  // of the first, in its row
  // How many tokens back each of them may look, W - 1 at most: its place in its sequence. Those of W - 1 tokens and a
  // register behind the block may be read too; a token of another row or behind the last sequence begins anew.
  const int32_t* reach;
};

// Tokens after the last boundary get 0.
void CausalConv1dForwardCpu(Tier tier, const ConvForwardArgs& args);
// `partials` is not read: its memory is the call's own.
void CausalConv1dBackwardCpu(Tier tier, const ConvBackwardArgs& args);
void CausalConv1dUpdateCpu(Tier tier, const ConvUpdateArgs& args);

}  // namespace packfree
