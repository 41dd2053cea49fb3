// Kimi delta attention on a CPU: arguments and entry points. The formulas are in the README of the Python package's kda
// folder.
#pragma once

#include "common/dtypes.h"
#include "common/packing.h"
#include "cpu/simd/tier.h"

namespace packfree {

// Elem is the dtype of q, k, v; Acc is float, or double where Elem is double. The last axis of every tensor is dense.
// Value head h reads key head h / (HV / H).
struct KdaInputs {
  PackingView packing;       // T tokens, N sequences
  int64_t key_heads;         // H
  int64_t value_heads;       // HV, a multiple of H
  int64_t key_dim;           // K, at least 1
  int64_t value_dim;         // V, at least 1
  const void* q;             // Elem [T, H, K], strides below in elements
  const void* k;             // Elem [T, H, K]
  const void* v;             // Elem [T, HV, V]
  int64_t q_token, q_head;
  int64_t k_token, k_head;
  int64_t v_token, v_head;
  const void* g;             // Acc [T, HV, K], contiguous: log-decay, or with a_log what the gate makes it from
  const void* beta;          // Acc [T, HV], contiguous
  const void* a_log;         // Acc [HV] or null for no gate
  const void* dt_bias;       // Acc [HV, K] or null for 0
  bool bounded;              // which gate
  double lower_bound;        // of the bounded gate
  const void* initial_state; // Acc [N, HV, K, V], contiguous, or null for zeros
  double scale;              // of q
  bool l2norm;               // whether rows of q and k are normalised first
};

// All outputs are contiguous. Tokens after the last boundary get 0.
struct KdaForward {
  KdaInputs in;
  void* o;            // Elem [T, HV, V]
  void* final_state;  // Acc [N, HV, K, V] or null
};

struct KdaBackward {
  KdaInputs in;
  const void* d_o;             // Elem [T, HV, V], contiguous
  const void* d_final_state;   // Acc [N, HV, K, V], contiguous, or null for zeros
  void* dq;                    // Elem [T, H, K]
  void* dk;                    // Elem [T, H, K]
  void* dv;                    // Elem [T, HV, V]
  void* dg;                    // Acc [T, HV, K]
  void* dbeta;                 // Acc [T, HV]
  void* d_a_log;               // Acc [HV], null without a_log
  void* d_dt_bias;             // Acc [HV, K], null without dt_bias
  void* d_initial_state;       // Acc [N, HV, K, V] or null
  void* d_rates;               // Acc [T, HV]: what each token gives to d_a_log; set by the entry point, null before
};

// Sequences run chunk by chunk; any number of tokens.
void KdaForwardCpu(Tier tier, Dtype dtype, const KdaForward& args);
void KdaBackwardCpu(Tier tier, Dtype dtype, const KdaBackward& args);
// The same result as the forward, token by token: faster for sequences of a few tokens.
void KdaRecurrentCpu(Tier tier, Dtype dtype, const KdaForward& args);

}  // namespace packfree
