#include "cpu/kda/kda.h"

#include <vector>

#include "cpu/kda/plan.h"

namespace packfree {
struct KdaKernels : DeltaKernels<KdaForward, KdaBackward> {
  void (*parameters)(const KdaBackward& args, int64_t hv);
};
}  // namespace packfree

#define PACKFREE_TEXTS "cpu/kda/tier-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {

void KdaForwardCpu(Tier tier, Dtype dtype, const KdaForward& args) {
  RunDeltaForward<KdaChunkTiles>(PickKernels(tier, dtype), dtype, args);
}

void KdaBackwardCpu(Tier tier, Dtype dtype, const KdaBackward& given) {
  const KdaInputs& in = given.in;
  const KdaKernels kernels = PickKernels(tier, dtype);
  KdaBackward args = given;
  std::vector<double> rates;  // doubles for their alignment; the kernels see Acc
  if (in.a_log != nullptr) {
    rates.resize((in.packing.end() * in.value_heads * AccBytes(dtype) + 7) / 8);
    args.d_rates = rates.data();
  }
  RunDeltaBackward<KdaBackwardTiles>(kernels, dtype, args, in.value_heads * in.key_dim);
  if (in.a_log == nullptr) return;
  ParallelForEach(in.value_heads, [&](int64_t hv) { kernels.parameters(args, hv); });
}

void KdaRecurrentCpu(Tier tier, Dtype dtype, const KdaForward& args) {
  RunDeltaRecurrent(PickKernels(tier, dtype), dtype, args);
}

}  // namespace packfree
