#include "cpu/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <vector>

#include "cpu/parallel.h"

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

#define PACKFREE_TEXTS "cpu/causal_conv1d/tier-inl.h"
#include "cpu/simd/each_tier.h"

namespace packfree {
namespace {

// Blocks [first, last) of the block list: about kConvGroupTokens tokens that one work item runs through.
struct Group {
  int64_t first;
  int64_t last;
};

std::vector<Group> MakeGroups(const std::vector<SequenceBlock>& blocks) {
  std::vector<Group> groups;
  int64_t tokens = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(blocks.size()); ++b) {
    if (groups.empty() || tokens >= kConvGroupTokens) {
      groups.push_back({b, b});
      tokens = 0;
    }
    groups.back().last = b + 1;
    tokens += blocks[b].end - blocks[b].begin;
  }
  return groups;
}

// The sums over at most kConvGroupTokens tokens each are Acc; their total is kept in double.
template <class Acc>
void ReducePartials(const ConvBackwardArgs& args, int64_t groups, Acc* dweight, Acc* dbias) {
  const Acc* partials = static_cast<const Acc*>(args.partials);
  const int64_t rows = args.width + 1;
  const int64_t columns = (args.channels + kConvChannels - 1) / kConvChannels;
  ParallelForEach(columns, [&](int64_t item) {
    const int64_t channel = item * kConvChannels;
    const int64_t channels = std::min(kConvChannels, args.channels - channel);
    for (int64_t row = 0; row < rows; ++row) {
      double sum[kConvChannels] = {};
      for (int64_t group = 0; group < groups; ++group) {
        const Acc* partial = partials + (group * rows + row) * args.channels + channel;
        for (int64_t c = 0; c < channels; ++c) sum[c] += partial[c];
      }
      for (int64_t c = 0; c < channels; ++c) {
        if (row < args.width) {
          dweight[(channel + c) * args.width + row] = static_cast<Acc>(sum[c]);
        } else if (dbias != nullptr) {
          dbias[channel + c] = static_cast<Acc>(sum[c]);
        }
      }
    }
  });
}

}  // namespace

int64_t ConvGroups(const PackingView& packing, bool channels_last) {
  return static_cast<int64_t>(MakeGroups(SequenceBlocks(packing, ConvBlockTokens(channels_last))).size());
}

void causal_conv1d_fwd_cpu(const ConvForwardArgs& args, Tier tier) {
  const ConvKernels kernels = PickKernels(tier, args.dtype);
  const std::vector<SequenceBlock> blocks = SequenceBlocks(args.packing, ConvBlockTokens(args.channels_last));
  const std::vector<Group> groups = MakeGroups(blocks);
  const int64_t columns = (args.channels + kConvChannels - 1) / kConvChannels;
  ParallelForEach(static_cast<int64_t>(groups.size()) * columns, [&](int64_t item) {
    const Group& group = groups[item / columns];
    const int64_t channel = item % columns * kConvChannels;
    const int64_t channels = std::min(kConvChannels, args.channels - channel);
    for (int64_t b = group.first; b < group.last; ++b) kernels.forward(args, blocks[b], channel, channels);
  });
  if (args.final_state == nullptr) return;
  ParallelForEach(args.packing.num_sequences, [&](int64_t n) { kernels.final_state(args, n, 0, args.channels); });
}

void causal_conv1d_bwd_cpu(const ConvBackwardArgs& args, Tier tier) {
  const ConvKernels kernels = PickKernels(tier, args.dtype);
  const int64_t acc_bytes = args.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
  const std::vector<SequenceBlock> blocks = SequenceBlocks(args.packing, ConvBlockTokens(args.channels_last));
  const std::vector<Group> groups = MakeGroups(blocks);
  const int64_t columns = (args.channels + kConvChannels - 1) / kConvChannels;
  const int64_t rows = args.width + 1;
  ParallelForEach(static_cast<int64_t>(groups.size()) * columns, [&](int64_t item) {
    const Group& group = groups[item / columns];
    const int64_t channel = item % columns * kConvChannels;
    const int64_t channels = std::min(kConvChannels, args.channels - channel);
    char* partials = static_cast<char*>(args.partials) + item / columns * rows * args.channels * acc_bytes;
    for (int64_t row = 0; row < rows; ++row) {
      std::fill_n(partials + (row * args.channels + channel) * acc_bytes, channels * acc_bytes, 0);
    }
    for (int64_t b = group.first; b < group.last; ++b) kernels.backward(args, blocks[b], channel, channels, partials);
  });
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

void causal_conv1d_reduce_cpu(const ConvBackwardArgs& args, int64_t groups, void* dweight, void* dbias) {
  if (args.dtype == Dtype::kFloat64) {
    ReducePartials<double>(args, groups, static_cast<double*>(dweight), static_cast<double*>(dbias));
  } else {
    ReducePartials<float>(args, groups, static_cast<float*>(dweight), static_cast<float*>(dbias));
  }
}

void causal_conv1d_update_cpu(const ConvUpdateArgs& args, Tier tier) {
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
