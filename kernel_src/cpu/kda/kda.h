// Kimi delta attention on a CPU: arguments and entry points. The formulas are in the README of the Python package's kda
// folder.
#pragma once

#include "common/dtypes.h"
#include "cpu/delta_rule/inputs.h"
#include "cpu/simd/tier.h"

namespace packfree {

// g is Acc [T, HV, K], contiguous: log-decays, or with a_log what the gate makes them from.
struct KdaInputs : DeltaInputs {
  const void* a_log;    // Acc [HV] or null for no gate
  const void* dt_bias;  // Acc [HV, K] or null for 0
  bool bounded;         // which gate
  double lower_bound;   // of the bounded gate
};

using KdaForward = DeltaForward<KdaInputs>;

struct KdaBackward : DeltaBackward<KdaInputs> {
  void* da_log;    // Acc [HV], null without a_log
  void* ddt_bias;  // Acc [HV, K], null without dt_bias
  void* d_rates;   // Acc [T, HV]: what each token gives to da_log; set by the entry point, null before
};

// Sequences run chunk by chunk; any number of tokens.
void KdaForwardCpu(Tier tier, const KdaForward& args);
void KdaBackwardCpu(Tier tier, const KdaBackward& args);
// The same result as the forward, token by token: faster for sequences of a few tokens.
void KdaRecurrentCpu(Tier tier, const KdaForward& args);

}  // namespace packfree
