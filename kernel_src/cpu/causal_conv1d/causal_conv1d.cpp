#include "cpu/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/work.h"

namespace packfree {
namespace {

// The functions of one tier and dtype.
struct ConvKernels {
  void (*forward)(const ConvForwardArgs&, const SequenceBlock&, int64_t channel, int64_t channels);
  void (*final_state)(const ConvForwardArgs&, int64_t sequence, int64_t channel, int64_t channels);
  void (*backward)(const ConvBackwardArgs&, const SequenceBlock&, int64_t channel, int64_t channels, void* partials);
  void (*update)(const ConvUpdateArgs&, int64_t batch, int64_t channel, int64_t channels);
};

}  // namespace
}  // namespace packfree

#define PACKFREE_SOURCE "cpu/causal_conv1d/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {
namespace {

// Stretches of the block list, of about kConvGroupTokens tokens each.
std::vector<Stretch> Groups(const std::vector<SequenceBlock>& blocks) {
  return CutNeighbours(static_cast<int64_t>(blocks.size()), kConvGroupTokens,
                       [&](int64_t b) { return blocks[b].end - blocks[b].begin; });
}

void ClearTokens(const ConvArgs& args, void* tensor, const ConvStrides& strides) {
  ClearPaddingOfRows(args.packing, args.row_tokens, args.channels, tensor, strides.row, strides.token, strides.channel,
                     ElementBytes(args.dtype));
}

// dweight and dbias from the partial sums, which are Acc.
template <class Acc>
void SumGroups(const ConvBackwardArgs& args, int64_t groups) {
  const Acc* partials = static_cast<const Acc*>(args.partials);
  const int64_t stride = (args.width + 1) * args.channels;
  SumParts(partials, groups, stride, args.width, args.channels, static_cast<Acc*>(args.dweight));
  SumParts(partials + args.width * args.channels, groups, stride, 1, args.channels, static_cast<Acc*>(args.dbias));
}

}  // namespace

void CausalConv1dForwardCpu(Tier tier, const ConvForwardArgs& args) {
  const ConvKernels kernels = PickKernels(tier, args.dtype);
  ClearTokens(args, args.y, args.y_strides);
  const std::vector<SequenceBlock> blocks = SequenceBlocks(args.packing, ConvBlockTokens(args.channels_last));
  const std::vector<Stretch> groups = Groups(blocks);
  const int64_t columns = (args.channels + kConvChannels - 1) / kConvChannels;
  ParallelForEach(static_cast<int64_t>(groups.size()) * columns, [&](int64_t item) {
    const Stretch& group = groups[item / columns];
    const int64_t channel = item % columns * kConvChannels;
    const int64_t channels = std::min(kConvChannels, args.channels - channel);
    for (int64_t b = group.first; b < group.last; ++b) kernels.forward(args, blocks[b], channel, channels);
  });
  if (args.final_state == nullptr) return;
  ParallelForEach(args.packing.num_sequences, [&](int64_t n) { kernels.final_state(args, n, 0, args.channels); });
}

void CausalConv1dBackwardCpu(Tier tier, const ConvBackwardArgs& given) {
  ConvBackwardArgs args = given;
  const ConvKernels kernels = PickKernels(tier, args.dtype);
  const int64_t acc_bytes = AccBytes(args.dtype);
  ClearTokens(args, args.dx, args.dx_strides);
  const std::vector<SequenceBlock> blocks = SequenceBlocks(args.packing, ConvBlockTokens(args.channels_last));
  const std::vector<Stretch> groups = Groups(blocks);
  const int64_t columns = (args.channels + kConvChannels - 1) / kConvChannels;
  const int64_t rows = args.width + 1;
  const Buffer partial_sums(static_cast<int64_t>(groups.size()) * rows * args.channels * acc_bytes);
  args.partials = partial_sums.get();
  ParallelForEach(static_cast<int64_t>(groups.size()) * columns, [&](int64_t item) {
    const Stretch& group = groups[item / columns];
    const int64_t channel = item % columns * kConvChannels;
    const int64_t channels = std::min(kConvChannels, args.channels - channel);
    char* partials = static_cast<char*>(args.partials) + item / columns * rows * args.channels * acc_bytes;
    for (int64_t row = 0; row < rows; ++row) {
      std::fill_n(partials + (row * args.channels + channel) * acc_bytes, channels * acc_bytes, 0);
    }
    for (int64_t b = group.first; b < group.last; ++b) kernels.backward(args, blocks[b], channel, channels, partials);
  });
  if (args.dtype == Dtype::kFloat64) {
    SumGroups<double>(args, static_cast<int64_t>(groups.size()));
  } else {
    SumGroups<float>(args, static_cast<int64_t>(groups.size()));
  }
  if (args.dinitial_state == nullptr) return;
  // An empty sequence hands its initial state on as its final state.
  const int64_t state_bytes = args.channels * (args.width - 1) * acc_bytes;
  for (int64_t n = 0; n < args.packing.num_sequences; ++n) {
    if (args.packing.length(n) > 0) continue;
    char* target = static_cast<char*>(args.dinitial_state) + n * state_bytes;
    if (args.dfinal_state == nullptr) {
      std::fill_n(target, state_bytes, 0);
    } else {
      std::copy_n(static_cast<const char*>(args.dfinal_state) + n * state_bytes, state_bytes, target);
    }
  }
}

void CausalConv1dUpdateCpu(Tier tier, const ConvUpdateArgs& args) {
  const ConvKernels kernels = PickKernels(tier, args.dtype);
  // A step of a few rows is too small to be worth waking threads for every 64 channels.
  constexpr int64_t kStepChannels = 16 * kConvChannels;
  const int64_t columns = (args.channels + kStepChannels - 1) / kStepChannels;
  ParallelForEach(args.batch * columns, [&](int64_t item) {
    const int64_t batch = item / columns, channel = item % columns * kStepChannels;
    const int64_t channels = std::min(kStepChannels, args.channels - channel);
    if (args.state_rows != nullptr && args.state_rows[batch] < 0) {
      const int64_t bytes = args.tokens * ElementBytes(args.dtype);
      std::fill_n(static_cast<char*>(args.y) + (batch * args.channels + channel) * bytes, channels * bytes, 0);
      return;
    }
    kernels.update(args, batch, channel, channels);
  });
}

}  // namespace packfree
