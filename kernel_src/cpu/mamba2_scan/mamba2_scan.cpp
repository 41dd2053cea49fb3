#include "cpu/mamba2_scan/mamba2_scan.h"

#include <vector>

#include "cpu/chunked/layout.h"
#include "cpu/mamba2_scan/plan.h"
#include "cpu/parallel.h"

#include "cpu/simd/begin_scalar.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/mamba2_scan/chunk-inl.h"
#include "cpu/mamba2_scan/fwd-inl.h"
#include "cpu/mamba2_scan/bwd-inl.h"
#include "cpu/mamba2_scan/update-inl.h"
#include "cpu/simd/end_tier.h"

#if PACKFREE_X86
#include "cpu/simd/begin_avx2.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/mamba2_scan/chunk-inl.h"
#include "cpu/mamba2_scan/fwd-inl.h"
#include "cpu/mamba2_scan/bwd-inl.h"
#include "cpu/mamba2_scan/update-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/mamba2_scan/chunk-inl.h"
#include "cpu/mamba2_scan/fwd-inl.h"
#include "cpu/mamba2_scan/bwd-inl.h"
#include "cpu/mamba2_scan/update-inl.h"
#include "cpu/simd/end_tier.h"

#include "cpu/simd/begin_avx512_bf16.h"
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/mamba2_scan/chunk-inl.h"
#include "cpu/mamba2_scan/fwd-inl.h"
#include "cpu/mamba2_scan/bwd-inl.h"
#include "cpu/mamba2_scan/update-inl.h"
#include "cpu/simd/end_tier.h"
#endif

namespace packfree {

namespace {

// The kernels of one tier and dtype.
struct Kernels {
  void (*forward)(const Mamba2ScanForward& args, int64_t n, int64_t block, void* scratch);
  void (*backward)(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t n, int64_t slot,
                   int64_t block, void* scratch);
  void (*sum_units)(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t begin, int64_t end);
  void (*update)(const SelectiveStateUpdate& args, int64_t batch, int64_t head);
};

#define PACKFREE_KERNELS(tier, Elem, Acc)                                                                       \
  Kernels {                                                                                                     \
    &tier::ForwardUnit<Elem, Acc>, &tier::BackwardUnit<Elem, Acc>, &tier::SumUnits<Elem, Acc>,                   \
        &tier::UpdateAnyState<Elem, Acc>                                                                        \
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

// target[i] = sum over the sequences, in order, of partial[sequence * width + i], for i in [begin, end).
template <class Acc>
void SumSequences(int64_t sequences, int64_t width, const double* partial, int64_t begin, int64_t end, void* target) {
  for (int64_t i = begin; i < end; ++i) {
    double sum = 0;
    for (int64_t n = 0; n < sequences; ++n) sum += partial[n * width + i];
    static_cast<Acc*>(target)[i] = static_cast<Acc>(sum);
  }
}

void SumSequences(Dtype dtype, int64_t sequences, int64_t width, const double* partial, void* target) {
  constexpr int64_t kBlock = 1024;
  ParallelForEach((width + kBlock - 1) / kBlock, [&](int64_t item) {
    const int64_t begin = item * kBlock, end = std::min(width, begin + kBlock);
    if (dtype == Dtype::kFloat64) {
      SumSequences<double>(sequences, width, partial, begin, end, target);
    } else {
      SumSequences<float>(sequences, width, partial, begin, end, target);
    }
  });
}

// Memory for values that are written before they are read.
struct Buffer {
  explicit Buffer(int64_t bytes) : data(std::malloc(static_cast<size_t>(bytes == 0 ? 1 : bytes))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data;
};

}  // namespace

void Mamba2ScanForwardCpu(Tier tier, Dtype dtype, const Mamba2ScanForward& args) {
  const Mamba2ScanInputs& in = args.in;
  const Kernels kernels = PickKernels(tier, dtype);
  const Mamba2ScanPlan plan(in);
  ClearPadding(in.packing, args.y, in.heads * in.head_dim * ElementBytes(dtype));
  // An empty sequence has work only where its state is asked for.
  const std::vector<SequenceHead> work = LongestFirst(in.packing, plan.blocks, args.final_state == nullptr ? 1 : 0);
  ScratchPool pool(dtype == Dtype::kFloat64 ? Mamba2ForwardBytes<double>(plan) : Mamba2ForwardBytes<float>(plan));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.forward(args, work[item].sequence, work[item].head, scratch.get());
  });
}

void Mamba2ScanBackwardCpu(Tier tier, Dtype dtype, const Mamba2ScanBackward& args) {
  const Mamba2ScanInputs& in = args.in;
  const PackingView& packing = in.packing;
  const Kernels kernels = PickKernels(tier, dtype);
  const Mamba2ScanPlan plan(in);
  const int64_t row = in.heads * in.head_dim, group_row = in.groups * in.state_dim * ElementBytes(dtype);
  ClearPadding(packing, args.dx, row * ElementBytes(dtype));
  if (args.dz != nullptr) ClearPadding(packing, args.dz, row * ElementBytes(dtype));
  ClearPadding(packing, args.ddt, in.heads * AccBytes(dtype));
  ClearPadding(packing, args.db, group_row);
  ClearPadding(packing, args.dc, group_row);

  std::vector<int64_t> slots(packing.num_sequences);
  int64_t filled = 0;
  for (int64_t n = 0; n < packing.num_sequences; ++n) {
    slots[n] = filled;
    if (packing.length(n) > 0) ++filled;
  }
  const Buffer by_head(2 * filled * in.heads * static_cast<int64_t>(sizeof(double)));
  const Buffer by_channel(args.dd == nullptr ? 0 : filled * row * static_cast<int64_t>(sizeof(double)));
  const int64_t unit_sums = plan.group_blocks == 1 ? 0 : plan.blocks * packing.tokens * in.state_dim * AccBytes(dtype);
  const Buffer by_unit(2 * unit_sums);
  double* da = static_cast<double*>(by_head.data);
  const Mamba2ScanPartials partials{da, da + filled * in.heads,
                                    args.dd == nullptr ? nullptr : static_cast<double*>(by_channel.data),
                                    unit_sums == 0 ? nullptr : by_unit.data,
                                    unit_sums == 0 ? nullptr : static_cast<char*>(by_unit.data) + unit_sums};

  const std::vector<SequenceHead> work =
      LongestFirst(packing, plan.blocks, args.d_initial_state == nullptr ? 1 : 0);
  const int64_t longest = LongestSequence(packing);
  ScratchPool pool(dtype == Dtype::kFloat64 ? Mamba2BackwardBytes<double>(plan, longest)
                                            : Mamba2BackwardBytes<float>(plan, longest));
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    const int64_t n = work[item].sequence;
    kernels.backward(args, partials, n, slots[n], work[item].head, scratch.get());
  });

  SumSequences(dtype, filled, in.heads, partials.da, args.da);
  if (args.ddt_bias != nullptr) SumSequences(dtype, filled, in.heads, partials.ddt_bias, args.ddt_bias);
  if (args.dd != nullptr) SumSequences(dtype, filled, row, partials.dd, args.dd);
  if (unit_sums != 0) {
    constexpr int64_t kTokens = 256;
    ParallelForEach((packing.end() + kTokens - 1) / kTokens, [&](int64_t item) {
      kernels.sum_units(args, partials, item * kTokens, std::min(packing.end(), (item + 1) * kTokens));
    });
  }
}

void SelectiveStateUpdateCpu(Tier tier, Dtype dtype, const SelectiveStateUpdate& args) {
  const Kernels kernels = PickKernels(tier, dtype);
  ParallelForEach(args.batch * args.heads,
                  [&](int64_t item) { kernels.update(args, item / args.heads, item % args.heads); });
}

}  // namespace packfree
