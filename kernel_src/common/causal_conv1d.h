// Arguments of the causal depthwise convolution over packed sequences, alike on every device.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/packing.h"

namespace packfree {

constexpr int kConvMinWidth = 2;
constexpr int kConvMaxWidth = 8;

// Where x [B, T, D] (in whatever order its axes lie) keeps element (row, token, channel).
struct ConvStrides {
  int64_t row;
  int64_t token;
  int64_t channel;
};

// Elem is the dtype of x; Acc is float, or double where x is double. All pointers below are to one or the other.
struct ConvArgs {
  PackingView packing;  // over the B * T tokens of all rows; no sequence crosses a row
  int64_t row_tokens;   // T
  int64_t channels;     // D
  int width;            // W
  bool silu;            // y = silu(z), else y = z
  bool channels_last;   // channels lie side by side in x (stride 1), else tokens do
  const void* x;        // Elem
  ConvStrides x_strides;
  const void* weight;         // Acc [W, D]
  const void* bias;           // Acc [D], or null
  const void* initial_state;  // Acc [N, D, W - 1], or null: zeros
  Dtype dtype;                // of Elem
};

struct ConvForwardArgs : ConvArgs {
  void* y;  // Elem, x's axis order, contiguous
  ConvStrides y_strides;
  void* final_state;  // Elem [N, D, W - 1], or null
};

struct ConvBackwardArgs : ConvArgs {
  const void* dy;  // Elem
  ConvStrides dy_strides;
  const void* dfinal_state;  // Acc [N, D, W - 1], or null
  void* dx;                  // Elem, x's axis order, contiguous
  ConvStrides dx_strides;
  void* dinitial_state;  // Acc [N, D, W - 1], or null
  void* dweight;         // Acc [D, W]
  void* dbias;           // Acc [D], or null
  void* partials;        // Acc [groups, W + 1, D]: sums of dweight's W rows and of dbias over each group
};

struct ConvUpdateArgs {
  int64_t batch, channels, tokens;
  int width;
  int64_t state_length;  // >= W - 1
  bool silu;
  const void* x;  // Elem [B, D, T]
  ConvStrides x_strides;
  void* state;                   // Elem, shifted in place; row of batch entry b is state_rows[b]
  ConvStrides state_strides;     // its "token" axis has state_length entries
  const int64_t* state_rows;     // [B], or null: row b. Negative: a padding slot, y is 0 and no state is touched
  const int64_t* cache_seqlens;  // [B], or null. Tokens seen so far, where the state is a circular buffer
  const void* weight;            // Acc [W, D]
  const void* bias;              // Acc [D], or null
  void* y;                       // Elem [B, D, T], contiguous
  Dtype dtype;
};

}  // namespace packfree
