// Gated delta rule on a CPU: arguments and entry points. The formulas are in the README of the Python package's
// gated_delta_rule folder.
#pragma once

#include "common/dtypes.h"
#include "cpu/delta_rule/inputs.h"
#include "cpu/simd/tier.h"

namespace packfree {

// g and its gradient are Acc [T, HV], contiguous: log-decays.
using GatedDeltaRuleInputs = DeltaInputs;
using GatedDeltaRuleForward = DeltaForward<GatedDeltaRuleInputs>;
using GatedDeltaRuleBackward = DeltaBackward<GatedDeltaRuleInputs>;

// Sequences run chunk by chunk; any number of tokens.
void GatedDeltaRuleForwardCpu(Tier tier, const GatedDeltaRuleForward& args);
void GatedDeltaRuleBackwardCpu(Tier tier, const GatedDeltaRuleBackward& args);
// The same result as the forward, token by token: faster for sequences of a few tokens.
void GatedDeltaRuleRecurrentCpu(Tier tier, const GatedDeltaRuleForward& args);

}  // namespace packfree
