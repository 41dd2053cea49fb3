#include "cpu/mamba2_scan/mamba2_scan.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "cpu/chunked/work.h"
#include "cpu/mamba2_scan/plan.h"
#include "cpu/parallel.h"

namespace packfree {
// The kernels of one tier and dtype.
struct Mamba2ScanKernels {
  void (*forward)(const Mamba2ScanForward& args, int64_t n, int64_t block, void* scratch);
  void (*backward)(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t n, int64_t slot,
                   int64_t block, void* scratch);
  void (*sum_units)(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t begin, int64_t end);
  void (*update)(const SelectiveStateUpdate& args, int64_t batch, int64_t head);
};
}  // namespace packfree

#define PACKFREE_TEXTS "cpu/mamba2_scan/tier-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {

namespace {

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
  const Mamba2ScanKernels kernels = PickKernels(tier, dtype);
  const Mamba2ScanPlan plan(in);
  ClearPadding(in.packing, args.y, in.heads * in.head_dim * ElementBytes(dtype));
  ForEachSequenceHead(in.packing, plan.blocks, args.final_state, ScratchBytes<Mamba2ForwardTiles>(dtype, plan),
                      [&](int64_t n, int64_t block, void* scratch) { kernels.forward(args, n, block, scratch); });
}

void Mamba2ScanBackwardCpu(Tier tier, Dtype dtype, const Mamba2ScanBackward& args) {
  const Mamba2ScanInputs& in = args.in;
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
  const int64_t unit_sums = plan.group_blocks == 1 ? 0 : plan.blocks * packing.tokens * in.state_dim * AccBytes(dtype);
  const Buffer by_unit(2 * unit_sums);
  double* da = static_cast<double*>(by_head.data);
  const Mamba2ScanPartials partials{da, da + filled * in.heads,
                                    args.dd == nullptr ? nullptr : static_cast<double*>(by_channel.data),
                                    unit_sums == 0 ? nullptr : by_unit.data,
                                    unit_sums == 0 ? nullptr : static_cast<char*>(by_unit.data) + unit_sums};

  ForEachSequenceHead(packing, plan.blocks, args.d_initial_state,
                      ScratchBytes<Mamba2BackwardTiles>(dtype, plan, LongestSequence(packing)),
                      [&](int64_t n, int64_t block, void* scratch) {
                        kernels.backward(args, partials, n, slots[n], block, scratch);
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
  const Mamba2ScanKernels kernels = PickKernels(tier, dtype);
  ParallelForEach(args.batch * args.heads,
                  [&](int64_t item) { kernels.update(args, item / args.heads, item % args.heads); });
}

}  // namespace packfree
