// Arguments of the one-token update of Mamba's state, alike on every device.
#pragma once

#include <cstdint>

#include "common/dtypes.h"

namespace packfree {

// One token for each of B sequences. Elem is the dtype of x, z and of the result. Strides in elements.
struct SelectiveStateUpdate {
  Dtype dtype;  // of Elem
  int64_t batch, heads, groups, head_dim, state_dim;
  void* state;  // Acc or Elem [R, H, P, S], the last axis dense; updated in place
  int64_t state_batch, state_head, state_row;
  int64_t num_states;       // first extent of the state
  const int64_t* state_of;  // [B], the state of each sequence, or null: its own number. A negative one
                            // is a padding slot: y is 0 there and no state is touched
  bool wide_state;          // whether the state is Acc
  const void* x;            // Elem [B, H, P], contiguous
  const void* b;            // Acc or Elem [B, G, S], contiguous
  const void* c;            // Acc or Elem [B, G, S], contiguous
  bool wide_coefficients;   // whether B and C are Acc
  const void* z;            // Elem [B, H, P], contiguous, or null
  const void* dt;           // Acc [B, H, P], any strides
  int64_t dt_batch, dt_head, dt_row;
  const void* a;  // Acc [H, P, S], stride 0 or 1 along the last axis
  int64_t a_head, a_row, a_column;
  const void* d;        // Acc [H, P], contiguous, or null
  const void* dt_bias;  // Acc [H, P], contiguous, or null
  bool softplus;
  void* y;  // Elem [B, H, P], contiguous
};

}  // namespace packfree
