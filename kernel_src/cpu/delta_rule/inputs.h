// Arguments that the delta rules share, whatever their decay: the gated delta rule has one a head, Kimi delta attention
// one a key channel.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/packing.h"

namespace packfree {

// Elem is the dtype of q, k, v; Acc is float, or double where Elem is double. The last axis of every tensor is dense.
// Value head h reads key head h / (HV / H).
struct DeltaInputs {
  Dtype dtype;          // of Elem
  PackingView packing;  // T tokens, N sequences
  int64_t key_heads;    // H
  int64_t value_heads;  // HV, a multiple of H
  int64_t key_dim;      // K, at least 1
  int64_t value_dim;    // V, at least 1
  const void* q;        // Elem [T, H, K], strides below in elements
  const void* k;        // Elem [T, H, K]
  const void* v;        // Elem [T, HV, V]
  int64_t q_token, q_head;
  int64_t k_token, k_head;
  int64_t v_token, v_head;
  const void* g;              // Acc, contiguous: the decays, as the op has them
  const void* beta;           // Acc [T, HV], contiguous
  const void* initial_state;  // Acc [N, HV, K, V], contiguous, or null for zeros
  double scale;               // of q
  bool l2norm;                // whether rows of q and k are normalised first
};

// All outputs are contiguous. Tokens after the last boundary get 0. `Inputs` are those of the op.
template <class Inputs>
struct DeltaForward {
  Inputs in;
  void* out;          // Elem [T, HV, V]
  void* final_state;  // Acc [N, HV, K, V] or null
};

template <class Inputs>
struct DeltaBackward {
  Inputs in;
  const void* dout;          // Elem [T, HV, V], contiguous
  const void* dfinal_state;  // Acc [N, HV, K, V], contiguous, or null for zeros
  void* dq;                  // Elem [T, H, K]
  void* dk;                  // Elem [T, H, K]
  void* dv;                  // Elem [T, HV, V]
  void* dg;                  // Acc, the shape of g
  void* dbeta;               // Acc [T, HV]
  void* dinitial_state;      // Acc [N, HV, K, V] or null
};

}  // namespace packfree
