// Mamba-2's scan (state space duality) on a CPU: arguments and entry points. The formulas are in the README of the
// Python package's mamba2_scan folder.
#pragma once

#include "common/dtypes.h"
#include "common/packing.h"
#include "common/mamba2_scan.h"
#include "cpu/simd/tier.h"

namespace packfree {

// Elem is the dtype of x, B, C, z; Acc is float, or double where Elem is double. The last axis of every tensor is
// dense. Head h reads group h / (H / G).
struct Mamba2ScanInputs {
  Dtype dtype;          // of Elem
  PackingView packing;  // T tokens, N sequences
  int64_t heads;        // H
  int64_t groups;       // G, a divisor of H
  int64_t head_dim;     // P, at least 1
  int64_t state_dim;    // S, at least 1
  const void* x;        // Elem [T, H, P], strides below in elements
  const void* b;        // Elem [T, G, S]
  const void* c;        // Elem [T, G, S]
  const void* z;        // Elem [T, H, P], or null for no gate
  int64_t x_token, x_head;
  int64_t b_token, b_group;
  int64_t c_token, c_group;
  int64_t z_token, z_head;
  const void* dt;             // Acc [T, H], contiguous
  const void* a;              // Acc [H], contiguous
  const void* d;              // Acc [H, P], contiguous, or null
  const void* dt_bias;        // Acc [H], contiguous, or null
  const void* initial_state;  // Acc [N, H, P, S], contiguous, or null for zeros
  bool softplus;              // whether step sizes are softplus(dt + dt_bias)
  double dt_min, dt_max;      // and what they are clamped to then
};

// All outputs are contiguous. Tokens after the last boundary get 0.
struct Mamba2ScanForward {
  Mamba2ScanInputs in;
  void* y;            // Elem [T, H, P]
  void* final_state;  // Acc [N, H, P, S] or null
};

struct Mamba2ScanBackward {
  Mamba2ScanInputs in;
  const void* dy;            // Elem [T, H, P], contiguous
  const void* dfinal_state;  // Acc [N, H, P, S], contiguous, or null for zeros
  void* dx;                  // Elem [T, H, P]
  void* ddt;                 // Acc [T, H]
  void* da;                  // Acc [H]
  void* db;                  // Elem [T, G, S]
  void* dc;                  // Elem [T, G, S]
  void* dd;                  // Acc [H, P] or null
  void* dz;                  // Elem [T, H, P] or null
  void* ddt_bias;            // Acc [H] or null
  void* dinitial_state;      // Acc [N, H, P, S] or null
};

void Mamba2ScanForwardCpu(Tier tier, const Mamba2ScanForward& args);
void Mamba2ScanBackwardCpu(Tier tier, const Mamba2ScanBackward& args);

void SelectiveStateUpdateCpu(Tier tier, const SelectiveStateUpdate& args);

}  // namespace packfree
