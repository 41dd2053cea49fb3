#include "cpu/gated_delta_rule/gated_delta_rule.h"

#include "cpu/gated_delta_rule/plan.h"

namespace packfree {
using GatedDeltaRuleKernels = DeltaKernels<GatedDeltaRuleForward, GatedDeltaRuleBackward>;
}  // namespace packfree

#define PACKFREE_SOURCE "cpu/gated_delta_rule/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {

void GatedDeltaRuleForwardCpu(Tier tier, const GatedDeltaRuleForward& args) {
  RunDeltaForward<GatedChunkTiles>(PickKernels(tier, args.in.dtype), args);
}

void GatedDeltaRuleBackwardCpu(Tier tier, const GatedDeltaRuleBackward& args) {
  RunDeltaBackward<GatedBackwardTiles>(PickKernels(tier, args.in.dtype), args, args.in.value_heads);
}

void GatedDeltaRuleRecurrentCpu(Tier tier, const GatedDeltaRuleForward& args) {
  RunDeltaRecurrent(PickKernels(tier, args.in.dtype), args);
}

}  // namespace packfree
