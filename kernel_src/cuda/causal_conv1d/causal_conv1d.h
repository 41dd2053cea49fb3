// Causal depthwise convolution over packed sequences, on a GPU. Every pointer is to memory of the current device, Acc
// is float, and nothing waits for the stream. The functions return null, or the text of the launch's error.
#pragma once

#include "common/causal_conv1d.h"

namespace packfree {

// Number of stretches of tokens with a partial sum of the parameter gradients: the first extent of
// ConvBackwardArgs::partials.
int64_t ConvTiles(int64_t rows, int64_t row_tokens, bool channels_last);

// owners [B * T] is scratch in all of them. Tokens that no sequence owns get 0.
const char* CausalConv1dForwardCuda(const ConvForwardArgs& args, int32_t* owners, void* stream);
// Also sums the partials into args.dweight and args.dbias.
const char* CausalConv1dBackwardCuda(const ConvBackwardArgs& args, int32_t* owners, void* stream);
// A row that args.state_rows names outside [0, rows) is not touched; its outputs are NaN.
const char* CausalConv1dUpdateCuda(const ConvUpdateArgs& args, int64_t rows, void* stream);

}  // namespace packfree
