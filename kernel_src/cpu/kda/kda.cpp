#include "cpu/kda/kda.h"

#include "cpu/chunked/layout.h"
#include "cpu/kda/plan.h"
#include "cpu/parallel.h"

#include "cpu/simd/begin_scalar.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/kda/gate-inl.h"
#include "cpu/kda/chunk-inl.h"
#include "cpu/kda/fwd-inl.h"
#include "cpu/kda/bwd-inl.h"
#include "cpu/kda/recurrent-inl.h"
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/kda/gate-inl.h"
#include "cpu/kda/chunk-inl.h"
#include "cpu/kda/fwd-inl.h"
#include "cpu/kda/bwd-inl.h"
#include "cpu/kda/recurrent-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/kda/gate-inl.h"
#include "cpu/kda/chunk-inl.h"
#include "cpu/kda/fwd-inl.h"
#include "cpu/kda/bwd-inl.h"
#include "cpu/kda/recurrent-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/kda/gate-inl.h"
#include "cpu/kda/chunk-inl.h"
#include "cpu/kda/fwd-inl.h"
#include "cpu/kda/bwd-inl.h"
#include "cpu/kda/recurrent-inl.h"
#include "cpu/simd/end_tier.h"
#endif

namespace packfree {

namespace {

// The kernels of one tier and dtype. `h` counts key heads, in `recurrent` and `parameters` value heads.
struct Kernels {
  void (*forward)(const KdaForward& args, int64_t n, int64_t h, void* scratch);
  void (*backward)(const KdaBackward& args, int64_t n, int64_t h, void* scratch);
  void (*recurrent)(const KdaForward& args, int64_t n, int64_t h, void* scratch);
  void (*parameters)(const KdaBackward& args, int64_t h);
};

#define PACKFREE_KERNELS(tier, Elem, Acc)                                                           \
  Kernels {                                                                                         \
    &tier::ForwardUnit<Elem, Acc>, &tier::BackwardUnit<Elem, Acc>, &tier::RecurrentUnit<Elem, Acc>, \
        &tier::GateParameterGradients<Acc>                                                          \
  }

Kernels PickKernels(Tier tier, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return PACKFREE_KERNELS(scalar, double, double);
#if PACKFREE_X86
  switch (tier) {
    case Tier::kAmx:  // has no text of its own
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

void KdaForwardCpu(Tier tier, Dtype dtype, const KdaForward& args) {
  const KdaInputs& in = args.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const KdaPlan plan(in);
  ClearPadding(in.packing, args.o, in.value_heads * in.value_dim * ElementBytes(dtype));
  // An empty sequence has work only where its state is asked for.
  const std::vector<SequenceHead> work =
      LongestFirst(in.packing, in.key_heads, args.final_state == nullptr ? 1 : 0);
  ScratchPool pool(dtype == Dtype::kFloat64 ? KdaForwardScratchBytes<double>(plan)
                                            : KdaForwardScratchBytes<float>(plan));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.forward(args, work[item].sequence, work[item].head, scratch.get());
  });
}

void KdaBackwardCpu(Tier tier, Dtype dtype, const KdaBackward& given) {
  const KdaInputs& in = given.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const KdaPlan plan(in);
  const int64_t key_row = in.key_heads * in.key_dim * ElementBytes(dtype);
  ClearPadding(in.packing, given.dq, key_row);
  ClearPadding(in.packing, given.dk, key_row);
  ClearPadding(in.packing, given.dv, in.value_heads * in.value_dim * ElementBytes(dtype));
  ClearPadding(in.packing, given.dg, in.value_heads * in.key_dim * AccBytes(dtype));
  ClearPadding(in.packing, given.dbeta, in.value_heads * AccBytes(dtype));
  KdaBackward args = given;
  std::vector<double> rates;  // doubles for their alignment; the kernels see Acc
  if (in.a_log != nullptr) {
    rates.resize((in.packing.end() * in.value_heads * AccBytes(dtype) + 7) / 8);
    args.d_rates = rates.data();
  }
  const std::vector<SequenceHead> work =
      LongestFirst(in.packing, in.key_heads, args.d_initial_state == nullptr ? 1 : 0);
  const int64_t longest = LongestSequence(in.packing);
  ScratchPool pool(dtype == Dtype::kFloat64 ? KdaBackwardScratchBytes<double>(plan, longest)
                                            : KdaBackwardScratchBytes<float>(plan, longest));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.backward(args, work[item].sequence, work[item].head, scratch.get());
  });
  if (in.a_log == nullptr) return;
  ParallelForEach(in.value_heads, [&](int64_t hv) { kernels.parameters(args, hv); });
}

void KdaRecurrentCpu(Tier tier, Dtype dtype, const KdaForward& args) {
  const KdaInputs& in = args.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const KdaPlan plan(in);
  ClearPadding(in.packing, args.o, in.value_heads * in.value_dim * ElementBytes(dtype));
  const std::vector<SequenceHead> work =
      LongestFirst(in.packing, in.value_heads, args.final_state == nullptr ? 1 : 0);
  ScratchPool pool((5 * plan.ldk + 2 * plan.ldv + plan.state) * AccBytes(dtype));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.recurrent(args, work[item].sequence, work[item].head, scratch.get());
  });
}

}  // namespace packfree
