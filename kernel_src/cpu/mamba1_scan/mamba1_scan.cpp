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
#define PACKFREE_HIGHEST_TIER PACKFREE_UP_TO_VECTORS
#define PACKFREE_SOURCE "cpu/mamba1_scan/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {
namespace {

// Stands for the dtype of the arithmetic.
Dtype AccDtype(const ScanArgs& args) { return args.is_double ? Dtype::kFloat64 : Dtype::kFloat32; }

void ClearTokens(const ScanArgs& args, const ScanOutput& output) {
  if (output.data == nullptr) return;
  const ScanStrides& strides = output.strides;
  ClearPaddingOfRows(args.packing, args.row_tokens, args.channels, output.data, strides.row, strides.token,
                     strides.channel, ElementBytes(output.dtype));
}

void ClearTokens(const ScanArgs& args, const ScanCoefficients& of, void* gradient) {
  if (!of.fixed) ClearPadding(args.packing, gradient, args.groups * args.states * ElementBytes(of.dtype));
}

// The parameter gradients from the partial sums of the stretches, which are Acc.
template <class Acc>
void SumStretches(const ScanBackwardArgs& args, int64_t stretches) {
  const Acc* partials = static_cast<const Acc*>(args.parameter_partials);
  int64_t row = 0;
  const auto sum = [&](int64_t rows, void* target) {
    SumParts(partials + row * args.channels, stretches, ScanParameterRows(args) * args.channels, rows, args.channels,
             static_cast<Acc*>(target));
    row += rows;
  };
  sum(args.states, args.dA);
  if (args.B.fixed) sum(args.states, args.dB);
  if (args.C.fixed) sum(args.states, args.dC);
  sum(1, args.dD);
  sum(1, args.ddelta_bias);
}

}  // namespace

int64_t ScanChannelBlocks(const ScanArgs& args) {
  return args.groups * ((args.channels / args.groups + kScanChannels - 1) / kScanChannels);
}

void Mamba1ScanForwardCpu(Tier tier, const ScanForwardArgs& args) {
  const ScanKernels kernels = PickKernels(tier, AccDtype(args));
  ClearTokens(args, args.y);
  const ScanWork work(args, args.initial_state != nullptr || args.final_state != nullptr);
  ScratchPool pool(ScratchBytes<ScanForwardTiles>(AccDtype(args), args));
  ParallelForEach(static_cast<int64_t>(work.items.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.forward(args, work.items[item], scratch.get());
  });
}

void Mamba1ScanBackwardCpu(Tier tier, const ScanBackwardArgs& given) {
  ScanBackwardArgs args = given;
  const ScanKernels kernels = PickKernels(tier, AccDtype(args));
  for (const ScanOutput* output : {&args.du, &args.ddelta, &args.dz}) ClearTokens(args, *output);
  ClearTokens(args, args.B, args.dB);
  ClearTokens(args, args.C, args.dC);
  const int64_t stretches = static_cast<int64_t>(ScanStretches(args.packing).size()), bytes = AccBytes(AccDtype(args));
  const Buffer parameters(stretches * ScanParameterRows(args) * args.channels * bytes);
  const int64_t token_sums = ScanChannelBlocks(args) * args.packing.tokens * args.states * bytes;
  const Buffer dB(args.B.fixed ? 0 : token_sums), dC(args.C.fixed ? 0 : token_sums);
  args.parameter_partials = parameters.get();
  args.dB_partials = dB.get();
  args.dC_partials = dC.get();
  const ScanWork work(args,
                      args.initial_state != nullptr || args.dfinal_state != nullptr || args.dinitial_state != nullptr);
  ScratchPool pool(ScratchBytes<ScanBackwardTiles>(AccDtype(args), args, work.longest));
  ParallelForEach(static_cast<int64_t>(work.items.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    kernels.backward(args, work.items[item], work.longest, scratch.get());
  });
  if (args.is_double) {
    SumStretches<double>(args, stretches);
  } else {
    SumStretches<float>(args, stretches);
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
