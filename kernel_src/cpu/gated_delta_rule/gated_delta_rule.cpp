#include "cpu/gated_delta_rule/gated_delta_rule.h"

#include "cpu/gated_delta_rule/plan.h"

namespace packfree {
using GatedDeltaRuleKernels = DeltaKernels<GatedDeltaRuleForward, GatedDeltaRuleBackward>;
}  // namespace packfree

#define PACKFREE_TEXTS "cpu/gated_delta_rule/tier-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {

void GatedDeltaRuleForwardCpu(Tier tier, Dtype dtype, const GatedDeltaRuleForward& args) {
  RunDeltaForward<GatedChunkTiles>(PickKernels(tier, dtype), dtype, args);
}

void GatedDeltaRuleBackwardCpu(Tier tier, Dtype dtype, const GatedDeltaRuleBackward& args) {
  RunDeltaBackward<GatedBackwardTiles>(PickKernels(tier, dtype), dtype, args, args.in.value_heads);
}

void GatedDeltaRuleRecurrentCpu(Tier tier, Dtype dtype, const GatedDeltaRuleForward& args) {
  RunDeltaRecurrent(PickKernels(tier, dtype), dtype, args);
}

}  // namespace packfree
