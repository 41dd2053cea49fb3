#include "cpu/mamba2_scan/mamba2_scan.h"

#include <algorithm>
#include <vector>

#include "cpu/mamba2_scan/plan.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/work.h"

namespace packfree {
// The kernels of one tier and dtype.
struct Mamba2ScanKernels {
  void (*forward)(const Mamba2ScanForward& args, int64_t n, int64_t block, void* scratch);
  void (*backward)(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t n, int64_t slot,
                   int64_t block, void* scratch);
  void (*sum_items)(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t begin, int64_t end);
  void (*update)(const SelectiveStateUpdate& args, int64_t batch, int64_t head);
};
}  // namespace packfree

#define PACKFREE_SOURCE "cpu/mamba2_scan/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {

namespace {

// Acc gradients of `width` numbers from a partial sum of each sequence.
void SumSequences(Dtype dtype, int64_t sequences, int64_t width, const double* partial, void* target) {
  if (dtype == Dtype::kFloat64) {
    SumParts(partial, sequences, width, 1, width, static_cast<double*>(target));
  } else {
    SumParts(partial, sequences, width, 1, width, static_cast<float*>(target));
  }
}

}  // namespace

void Mamba2ScanForwardCpu(Tier tier, const Mamba2ScanForward& args) {
  const Mamba2ScanInputs& in = args.in;
  const Dtype dtype = in.dtype;
  const Mamba2ScanKernels kernels = PickKernels(tier, dtype);
  const Mamba2ScanPlan plan(in);
  ClearPadding(in.packing, args.y, in.heads * in.head_dim * ElementBytes(dtype));
  ForEachSequenceHead(in.packing, plan.blocks, args.final_state, ScratchBytes<Mamba2ForwardTiles>(dtype, plan),
                      [&](int64_t n, int64_t block, void* scratch) { kernels.forward(args, n, block, scratch); });
}

void Mamba2ScanBackwardCpu(Tier tier, const Mamba2ScanBackward& args) {
  const Mamba2ScanInputs& in = args.in;
  const Dtype dtype = in.dtype;
  const PackingView& packing = in.packing;
  const Mamba2ScanKernels kernels = PickKernels(tier, dtype);
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
  const int64_t item_sums = plan.group_blocks == 1 ? 0 : plan.blocks * packing.tokens * in.state_dim * AccBytes(dtype);
  const Buffer by_item(2 * item_sums);
  double* da = static_cast<double*>(by_head.get());
  const Mamba2ScanPartials partials{da, da + filled * in.heads,
                                    args.dd == nullptr ? nullptr : static_cast<double*>(by_channel.get()),
                                    item_sums == 0 ? nullptr : by_item.get(),
                                    item_sums == 0 ? nullptr : static_cast<char*>(by_item.get()) + item_sums};

  ForEachSequenceHead(
      packing, plan.blocks, args.dinitial_state,
      ScratchBytes<Mamba2BackwardTiles>(dtype, plan, LongestSequence(packing)),
      [&](int64_t n, int64_t block, void* scratch) { kernels.backward(args, partials, n, slots[n], block, scratch); });

  SumSequences(dtype, filled, in.heads, partials.da, args.da);
  SumSequences(dtype, filled, in.heads, partials.ddt_bias, args.ddt_bias);
  SumSequences(dtype, filled, row, partials.dd, args.dd);
  if (item_sums != 0) {
    constexpr int64_t kTokens = 256;
    ParallelForEach((packing.end() + kTokens - 1) / kTokens, [&](int64_t item) {
      kernels.sum_items(args, partials, item * kTokens, std::min(packing.end(), (item + 1) * kTokens));
    });
  }
}

void SelectiveStateUpdateCpu(Tier tier, const SelectiveStateUpdate& args) {
  const Mamba2ScanKernels kernels = PickKernels(tier, args.dtype);
  ParallelForEach(args.batch * args.heads,
                  [&](int64_t item) { kernels.update(args, item / args.heads, item % args.heads); });
}

}  // namespace packfree
