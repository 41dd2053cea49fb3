// Arguments of Mamba-1's selective scan over packed sequences, alike on every device.
#pragma once

#include <cstdint>

#include "common/device.h"
#include "common/dtypes.h"
#include "common/packing.h"

namespace packfree {

// Where a tensor [B, D, T], in whatever order its axes lie, keeps element (row, channel, token). Channels or tokens lie
// side by side.
struct ScanStrides {
  int64_t row;
  int64_t channel;
  int64_t token;
};
struct ScanInput {
  const void* data;  // or null: absent
  Dtype dtype;
  ScanStrides strides;
};
struct ScanOutput {
  void* data;  // or null: not wanted
  Dtype dtype;
  ScanStrides strides;
};
// B or C: fixed, Acc [D, N]; or per token, [B, G, N, T] in any order in which states or tokens lie side by side.
struct ScanCoefficients {
  const void* data;
  bool fixed;
  Dtype dtype;
  int64_t row, group, state, token;  // strides where per token
};

// Acc is float, or double where u is double; then every tensor is.
struct ScanArgs {
  PackingView packing;  // over the B * T tokens of all rows; no sequence crosses a row
  int64_t row_tokens;   // T
  int64_t channels;     // D
  int64_t states;       // N
  int64_t groups;       // G: channels [g D / G, (g + 1) D / G) read group g of B and C
  bool softplus;        // delta = softplus(delta + delta_bias), else the sum itself
  ScanInput u;          // [B, D, T]
  ScanInput delta;      // [B, D, T]
  ScanInput z;          // [B, D, T], or absent: no gate
  const void* A;        // Acc [D, N]
  ScanCoefficients B;
  ScanCoefficients C;
  const void* D;              // Acc [D], or null: zeros
  const void* delta_bias;     // Acc [D], or null: zeros
  const void* initial_state;  // Acc [sequences, D, N], or null: zeros
  bool is_double;
};

struct ScanForwardArgs : ScanArgs {
  ScanOutput y;       // [B, D, T]
  void* final_state;  // Acc [sequences, D, N], or null
};

struct ScanBackwardArgs : ScanArgs {
  ScanInput dy;              // [B, D, T]
  const void* dfinal_state;  // Acc [sequences, D, N], or null
  ScanOutput du;             // [B, D, T]
  ScanOutput ddelta;         // [B, D, T]
  ScanOutput dz;             // [B, D, T], absent where z is
  void* dinitial_state;      // Acc [sequences, D, N], or null
  void* dA;                  // Acc [D, N]
  void* dB;                  // fixed: Acc [D, N]; else [B T, G, N] in B's dtype
  void* dC;                  // alike
  void* dD;                  // Acc [D], or null
  void* ddelta_bias;         // Acc [D], or null
  void* parameter_partials;  // Acc [ScanGroups, ScanParameterRows, D]
  void* dB_partials;         // Acc [ScanChannelBlocks, B T, N], null where B is fixed
  void* dC_partials;         // alike
};

// Rows of a partial sum: dA, then dB and dC where fixed, N each; then dD and ddelta_bias.
PACKFREE_HOST_DEVICE int64_t ScanParameterRows(const ScanArgs& args) {
  return args.states * (1 + (args.B.fixed ? 1 : 0) + (args.C.fixed ? 1 : 0)) + 2;
}

}  // namespace packfree
