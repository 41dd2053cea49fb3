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
  void (*forward)(const ConvForwardArgs&, const ConvBlock&, int64_t channel, int64_t channels);
  void (*final_state)(const ConvForwardArgs&, int64_t sequence, int64_t channel, int64_t channels);
  void (*backward)(const ConvBackwardArgs&, const ConvBlock&, int64_t channel, int64_t channels, void* partials);
  void (*update)(const ConvUpdateArgs&, int64_t batch, int64_t channel, int64_t channels);
};

}  // namespace
}  // namespace packfree

#define PACKFREE_SOURCE "cpu/causal_conv1d/kernels-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {
namespace {

// See ConvBlock: of every token of the pack, and of some behind it.
std::vector<int32_t> ReachOfTokens(const ConvArgs& args) {
  constexpr int64_t kBehind = kConvMaxWidth + 64;  // W - 1 tokens and a register of the widest tier
  const PackingView& packing = args.packing;
  const int32_t most = args.width - 1;
  std::vector<int32_t> reach(packing.end() + kBehind, most);
  const auto begin_at = [&](int64_t token, int64_t end) {
    for (int32_t i = 0; i < most && token + i < end; ++i) reach[token + i] = i;
  };
  for (int64_t n = 0; n < packing.num_sequences; ++n) begin_at(packing.bos(n), packing.eos(n));
  begin_at(packing.end(), packing.end() + kBehind);
  return reach;
}

// The whole work: the tokens of the pack in blocks, and neighbours of these in groups of about kConvGroupTokens.
struct ConvWork {
  explicit ConvWork(const ConvArgs& args) : reach(ReachOfTokens(args)) {
    const int64_t end = args.packing.end();
    for (int64_t first = 0; first < end;) {
      const int64_t row_end = (first / args.row_tokens + 1) * args.row_tokens;
      const int64_t last = std::min({first + kConvGroupTokens, row_end, end});
      blocks.push_back({first, last, first % args.row_tokens, reach.data() + first});
      first = last;
    }
    groups = CutNeighbours(static_cast<int64_t>(blocks.size()), kConvGroupTokens,
                           [&](int64_t s) { return blocks[s].last - blocks[s].first; });
    columns = (args.channels + kConvItemChannels - 1) / kConvItemChannels;
    num_channels = args.channels;
  }

  // Calls run(block, group, channel, channels) for every block of every group and every slice of the channels; the
  // blocks of a group and slice in their order and by one thread. begin(group, channel, channels) comes first.
  template <class Begin, class Run>
  void ForEach(const Begin& begin, const Run& run) const {
    ParallelForEach(static_cast<int64_t>(groups.size()) * columns, [&](int64_t item) {
      const int64_t group = item / columns, channel = item % columns * kConvItemChannels;
      const int64_t channels = std::min(kConvItemChannels, num_channels - channel);
      begin(group, channel, channels);
      for (int64_t s = groups[group].first; s < groups[group].last; ++s) run(blocks[s], group, channel, channels);
    });
  }

  std::vector<int32_t> reach;
  std::vector<ConvBlock> blocks;
  std::vector<Stretch> groups;
  int64_t columns, num_channels;
};

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
  ConvWork(args).ForEach([](int64_t, int64_t, int64_t) {},
                         [&](const ConvBlock& block, int64_t, int64_t channel, int64_t channels) {
                           kernels.forward(args, block, channel, channels);
                         });
  if (args.final_state == nullptr) return;
  ParallelForEach(args.packing.num_sequences, [&](int64_t n) { kernels.final_state(args, n, 0, args.channels); });
}

void CausalConv1dBackwardCpu(Tier tier, const ConvBackwardArgs& given) {
  ConvBackwardArgs args = given;
  const ConvKernels kernels = PickKernels(tier, args.dtype);
  const int64_t acc_bytes = AccBytes(args.dtype);
  ClearTokens(args, args.dx, args.dx_strides);
  const ConvWork work(args);
  const int64_t groups = static_cast<int64_t>(work.groups.size()), rows = args.width + 1;
  const Buffer partial_sums(groups * rows * args.channels * acc_bytes);
  args.partials = partial_sums.get();
  const auto sums_of = [&](int64_t group) {
    return static_cast<char*>(args.partials) + group * rows * args.channels * acc_bytes;
  };
  work.ForEach(
      [&](int64_t group, int64_t channel, int64_t channels) {
        for (int64_t row = 0; row < rows; ++row) {
          std::fill_n(sums_of(group) + (row * args.channels + channel) * acc_bytes, channels * acc_bytes, 0);
        }
      },
      [&](const ConvBlock& block, int64_t group, int64_t channel, int64_t channels) {
        kernels.backward(args, block, channel, channels, sums_of(group));
      });
  if (args.dtype == Dtype::kFloat64) {
    SumGroups<double>(args, groups);
  } else {
    SumGroups<float>(args, groups);
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
  // A step of a few rows is too small to be worth waking threads for fewer channels.
  constexpr int64_t kStepChannels = 1024;
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
