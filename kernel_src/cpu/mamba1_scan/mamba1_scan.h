// Mamba-1's selective scan over packed sequences, CPU.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "common/packing.h"
#include "cpu/simd/tier.h"

namespace packfree {

// Tokens of a block: what one pass of the inner loops runs over, and the distance of the states that the backward
// recomputes from. Blocks are counted from the sequence's first token.
constexpr int64_t kScanTokens = 32;
// Channels of one work item, whatever the number of threads: eight registers of the widest tier.
constexpr int64_t kScanChannels = 128;
// Neighbouring sequences make one work item until they have this many tokens: the stretch over which one partial sum of
// the parameter gradients runs at least, so it must not depend on the number of threads.
constexpr int64_t kScanGroupTokens = 512;

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
  PackingView packing;        // over the B * T tokens of all rows; no sequence crosses a row
  int64_t row_tokens;         // T
  int64_t channels;           // D
  int64_t states;             // N
  int64_t groups;             // G: channels [g D / G, (g + 1) D / G) read group g of B and C
  bool softplus;              // delta = softplus(delta + delta_bias), else the sum itself
  ScanInput u;                // [B, D, T]
  ScanInput delta;            // [B, D, T]
  ScanInput z;                // [B, D, T], or absent: no gate
  const void* A;              // Acc [D, N]
  ScanCoefficients B;
  ScanCoefficients C;
  const void* D;              // Acc [D], or null: zeros
  const void* delta_bias;     // Acc [D], or null: zeros
  const void* initial_state;  // Acc [sequences, D, N], or null: zeros
  bool is_double;
  Tier tier;
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

// Number of stretches of sequences that one partial sum of the parameter gradients covers.
int64_t ScanGroups(const PackingView& packing);
// Rows of a partial sum: dA, then dB and dC where fixed, N each; then dD and ddelta_bias.
int64_t ScanParameterRows(const ScanArgs& args);
// Number of work items that the channels are cut into; none spans two groups of B and C.
int64_t ScanChannelBlocks(const ScanArgs& args);

// Tokens after the last boundary are not written.
void mamba1_scan_fwd_cpu(const ScanForwardArgs& args);
void mamba1_scan_bwd_cpu(const ScanBackwardArgs& args);

}  // namespace packfree
