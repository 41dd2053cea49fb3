#include "cpu/mamba1_scan/mamba1_scan.h"

#include <algorithm>
#include <vector>

#include "cpu/mamba1_scan/scratch.h"
#include "cpu/parallel.h"

namespace packfree {
// The functions of one tier; the dtypes of the tensors are looked at tile by tile.
struct ScanKernels {
  void (*forward)(const ScanForwardArgs&, const ScanItem&, void* scratch);
  void (*backward)(const ScanBackwardArgs&, const ScanItem&, int64_t longest, void* scratch);
  void (*reduce)(const ScanBackwardArgs&, const ScanCoefficients& input, const void* partials, void* target,
                 int64_t first, int64_t last);
};
}  // namespace packfree

// No tier of its own for the bf16 instructions: they multiply bf16 numbers, and the scan computes in float throughout.
#define PACKFREE_HIGHEST_TIER 2
#define PACKFREE_TEXTS "cpu/mamba1_scan/tier-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {
namespace {

// Stands for the dtype of the arithmetic.
Dtype AccDtype(const ScanArgs& args) { return args.is_double ? Dtype::kFloat64 : Dtype::kFloat32; }

// One parameter gradient [D, rows] from rows [first_row, first_row + rows) of the partial sums, which are Acc; their
// total is kept in double.
template <class Acc>
void ReduceRows(const ScanBackwardArgs& args, int64_t first_row, int64_t rows, void* target) {
  if (target == nullptr) return;
  const int64_t stretches = ScanGroups(args.packing), all_rows = ScanParameterRows(args);
  const Acc* partials = static_cast<const Acc*>(args.parameter_partials);
  Acc* out = static_cast<Acc*>(target);
  ParallelForEach((args.channels + kScanChannels - 1) / kScanChannels, [&](int64_t item) {
    const int64_t channel = item * kScanChannels;
    const int64_t channels = std::min(kScanChannels, args.channels - channel);
    for (int64_t row = 0; row < rows; ++row) {
      double sum[kScanChannels] = {};
      for (int64_t s = 0; s < stretches; ++s) {
        const Acc* partial = partials + (s * all_rows + first_row + row) * args.channels + channel;
        for (int64_t c = 0; c < channels; ++c) sum[c] += partial[c];
      }
      for (int64_t c = 0; c < channels; ++c) out[(channel + c) * rows + row] = static_cast<Acc>(sum[c]);
    }
  });
}

template <class Acc>
void ReduceParameters(const ScanBackwardArgs& args) {
  int64_t row = 0;
  ReduceRows<Acc>(args, row, args.states, args.dA);
  row += args.states;
  if (args.B.fixed) {
    ReduceRows<Acc>(args, row, args.states, args.dB);
    row += args.states;
  }
  if (args.C.fixed) {
    ReduceRows<Acc>(args, row, args.states, args.dC);
    row += args.states;
  }
  ReduceRows<Acc>(args, row, 1, args.dD);
  ReduceRows<Acc>(args, row + 1, 1, args.ddelta_bias);
}

}  // namespace

int64_t ScanGroups(const PackingView& packing) { return static_cast<int64_t>(ScanStretches(packing).size()); }

int64_t ScanChannelBlocks(const ScanArgs& args) {
  return args.groups * ((args.channels / args.groups + kScanChannels - 1) / kScanChannels);
}

void mamba1_scan_fwd_cpu(const ScanForwardArgs& args, Tier tier) {
  const ScanKernels kernels = PickKernels(tier, AccDtype(args));
  const std::vector<ScanItem> items = ScanItems(args);
  ScratchPool pool(ScratchBytes<ScanForwardTiles>(AccDtype(args), args));
  ParallelForEach(static_cast<int64_t>(items.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.forward(args, items[item], scratch.get());
  });
}

void mamba1_scan_bwd_cpu(const ScanBackwardArgs& args, Tier tier) {
  const ScanKernels kernels = PickKernels(tier, AccDtype(args));
  const std::vector<ScanItem> items = ScanItems(args);
  int64_t longest = 0;
  for (int64_t n = 0; n < args.packing.num_sequences; ++n) longest = std::max(longest, args.packing.length(n));
  ScratchPool pool(ScratchBytes<ScanBackwardTiles>(AccDtype(args), args, longest));
  ParallelForEach(static_cast<int64_t>(items.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.backward(args, items[item], longest, scratch.get());
  });
  if (args.is_double) {
    ReduceParameters<double>(args);
  } else {
    ReduceParameters<float>(args);
  }
  constexpr int64_t kReduceTokens = 256;
  const int64_t end = args.packing.end();
  ParallelForEach((end + kReduceTokens - 1) / kReduceTokens, [&](int64_t item) {
    const int64_t first = item * kReduceTokens, last = std::min(first + kReduceTokens, end);
    if (!args.B.fixed) kernels.reduce(args, args.B, args.dB_partials, args.dB, first, last);
    if (!args.C.fixed) kernels.reduce(args, args.C, args.dC_partials, args.dC, first, last);
  });
}

}  // namespace packfree
