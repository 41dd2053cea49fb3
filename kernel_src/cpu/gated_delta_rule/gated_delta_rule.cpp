#include "cpu/gated_delta_rule/gated_delta_rule.h"

#include <type_traits>

#include "cpu/chunked/layout.h"
#include "cpu/gated_delta_rule/plan.h"
#include "cpu/parallel.h"

#include "cpu/simd/begin_scalar.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/gated_delta_rule/chunk-inl.h"
#include "cpu/gated_delta_rule/fwd-inl.h"
#include "cpu/gated_delta_rule/bwd-inl.h"
#include "cpu/gated_delta_rule/recurrent-inl.h"
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/gated_delta_rule/chunk-inl.h"
#include "cpu/gated_delta_rule/fwd-inl.h"
#include "cpu/gated_delta_rule/bwd-inl.h"
#include "cpu/gated_delta_rule/recurrent-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/gated_delta_rule/chunk-inl.h"
#include "cpu/gated_delta_rule/fwd-inl.h"
#include "cpu/gated_delta_rule/bwd-inl.h"
#include "cpu/gated_delta_rule/recurrent-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/gated_delta_rule/chunk-inl.h"
#include "cpu/gated_delta_rule/fwd-inl.h"
#include "cpu/gated_delta_rule/bwd-inl.h"
#include "cpu/gated_delta_rule/recurrent-inl.h"
#include "cpu/simd/end_tier.h"
#endif

namespace packfree {

namespace {

// The kernels of one tier and dtype. `h` counts key heads, in `recurrent` value heads.
struct Kernels {
  void (*forward)(const GatedDeltaRuleForward& args, int64_t n, int64_t h, void* scratch);
  void (*backward)(const GatedDeltaRuleBackward& args, int64_t n, int64_t h, void* scratch);
  void (*recurrent)(const GatedDeltaRuleForward& args, int64_t n, int64_t h, void* scratch);
};

#define PACKFREE_KERNELS(tier, Elem, Acc) \
  Kernels { &tier::ForwardUnit<Elem, Acc>, &tier::BackwardUnit<Elem, Acc>, &tier::RecurrentUnit<Elem, Acc> }

Kernels PickKernels(Tier tier, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return PACKFREE_KERNELS(scalar, double, double);
#if PACKFREE_X86
  switch (tier) {
    case Tier::kAmx:
    case Tier::kAvx512Bf16:
      if (dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(avx512_bf16, bf16, float);
      [[fallthrough]];
    case Tier::kAvx512:
      if (dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(avx512, bf16, float);
      if (dtype == Dtype::kFloat16) return PACKFREE_KERNELS(avx512, fp16, float);
      return PACKFREE_KERNELS(avx512, float, float);
    case Tier::kAvx2:
      if (dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(avx2, bf16, float);
      if (dtype == Dtype::kFloat16) return PACKFREE_KERNELS(avx2, fp16, float);
      return PACKFREE_KERNELS(avx2, float, float);
    case Tier::kScalar:
      break;
  }
#else
  (void)tier;
#endif
  if (dtype == Dtype::kBFloat16) return PACKFREE_KERNELS(scalar, bf16, float);
  if (dtype == Dtype::kFloat16) return PACKFREE_KERNELS(scalar, fp16, float);
  return PACKFREE_KERNELS(scalar, float, float);
}
#undef PACKFREE_KERNELS

int64_t ElementBytes(Dtype dtype) {
  if (dtype == Dtype::kFloat64) return 8;
  return dtype == Dtype::kFloat32 ? 4 : 2;
}
int64_t AccBytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

}  // namespace

void GatedDeltaRuleForwardCpu(Tier tier, Dtype dtype, const GatedDeltaRuleForward& args) {
  const GatedDeltaRuleInputs& in = args.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const GatedDeltaRulePlan plan(in);
  ClearPadding(in.packing, args.o, in.value_heads * in.value_dim * ElementBytes(dtype));
  // An empty sequence has work only where its state is asked for.
  const std::vector<SequenceHead> work =
      LongestFirst(in.packing, in.key_heads, args.final_state == nullptr ? 1 : 0);
  ScratchPool pool(dtype == Dtype::kFloat64 ? ForwardScratchBytes<double>(plan) : ForwardScratchBytes<float>(plan));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.forward(args, work[item].sequence, work[item].head, scratch.get());
  });
}

void GatedDeltaRuleBackwardCpu(Tier tier, Dtype dtype, const GatedDeltaRuleBackward& args) {
  const GatedDeltaRuleInputs& in = args.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const GatedDeltaRulePlan plan(in);
  const int64_t key_row = in.key_heads * in.key_dim * ElementBytes(dtype);
  ClearPadding(in.packing, args.dq, key_row);
  ClearPadding(in.packing, args.dk, key_row);
  ClearPadding(in.packing, args.dv, in.value_heads * in.value_dim * ElementBytes(dtype));
  ClearPadding(in.packing, args.dg, in.value_heads * AccBytes(dtype));
  ClearPadding(in.packing, args.dbeta, in.value_heads * AccBytes(dtype));
  const std::vector<SequenceHead> work =
      LongestFirst(in.packing, in.key_heads, args.d_initial_state == nullptr ? 1 : 0);
  const int64_t longest = LongestSequence(in.packing);
  ScratchPool pool(dtype == Dtype::kFloat64 ? BackwardScratchBytes<double>(plan, longest)
                                            : BackwardScratchBytes<float>(plan, longest));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.backward(args, work[item].sequence, work[item].head, scratch.get());
  });
}

void GatedDeltaRuleRecurrentCpu(Tier tier, Dtype dtype, const GatedDeltaRuleForward& args) {
  const GatedDeltaRuleInputs& in = args.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const GatedDeltaRulePlan plan(in);
  ClearPadding(in.packing, args.o, in.value_heads * in.value_dim * ElementBytes(dtype));
  const std::vector<SequenceHead> work =
      LongestFirst(in.packing, in.value_heads, args.final_state == nullptr ? 1 : 0);
  ScratchPool pool((2 * plan.ldk + 2 * plan.ldv + plan.state) * AccBytes(dtype));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.recurrent(args, work[item].sequence, work[item].head, scratch.get());
  });
}

}  // namespace packfree
