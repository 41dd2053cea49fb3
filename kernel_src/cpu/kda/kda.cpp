#include "cpu/kda/kda.h"

#include "cpu/kda/plan.h"

namespace packfree {
struct KdaKernels : DeltaKernels<KdaForward, KdaBackward> {
  void (*parameters)(const KdaBackward& args, int64_t hv);
};
}  // namespace packfree

#define PACKFREE_SOURCE "cpu/kda/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {

void KdaForwardCpu(Tier tier, const KdaForward& args) {
  RunDeltaForward<KdaChunkTiles>(PickKernels(tier, args.in.dtype), args);
}

void KdaBackwardCpu(Tier tier, const KdaBackward& given) {
  const KdaInputs& in = given.in;
  const KdaKernels kernels = PickKernels(tier, in.dtype);
  KdaBackward args = given;
  const Buffer rates(in.a_log == nullptr ? 0 : in.packing.end() * in.value_heads * AccBytes(in.dtype));
  if (in.a_log != nullptr) args.d_rates = rates.get();
  RunDeltaBackward<KdaBackwardTiles>(kernels, args, in.value_heads * in.key_dim);
  if (in.a_log == nullptr) return;
  ParallelForEach(in.value_heads, [&](int64_t hv) { kernels.parameters(args, hv); });
}

void KdaRecurrentCpu(Tier tier, const KdaForward& args) { RunDeltaRecurrent(PickKernels(tier, args.in.dtype), args); }

}  // namespace packfree
