#include "cpu/causal_conv1d/causal_conv1d.h"

#include <algorithm>

#include "trial.h"

namespace packfree::fuzz {
namespace {

const std::vector<int64_t> kChannels = {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130};

// Strides of a tensor whose sizes are [B, T, D] with channels_last, else [B, D, T].
ConvStrides StridesOf(const std::vector<int64_t>& strides, bool channels_last) {
  if (channels_last) return {strides[0], strides[1], strides[2]};
  return {strides[0], strides[2], strides[1]};
}

}  // namespace

void FuzzConv(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  ConvArgs shared{};
  const Tier tier = trial.DrawTier(kVectorTier);
  shared.dtype = dtype;
  shared.channels_last = draw.Chance(50);
  shared.silu = draw.Chance(50);
  shared.width = static_cast<int>(draw.Between(kConvMinWidth, kConvMaxWidth));
  shared.channels = draw.Pick(kChannels);
  const int64_t rows = draw.Between(1, 3), D = shared.channels, W = shared.width;
  const int64_t edge = draw.Pick<int64_t>({16, 64, kConvGroupTokens});
  shared.row_tokens = trial.DrawTokens(std::min<int64_t>(1200, 40000 / (rows * D)), edge);
  const int64_t T = shared.row_tokens;
  shared.packing = trial.DrawPacking(rows, T, edge);
  const int64_t N = shared.packing.num_sequences;
  const bool bias = draw.Chance(50), initial = draw.Chance(50), final_state = draw.Chance(50);
  trial.Describe("tier %s, %s, B=%ld T=%ld D=%ld W=%ld%s%s%s%s%s", TierName(tier), NameOf(dtype), rows, T, D, W,
                 shared.channels_last ? ", channels last" : "", shared.silu ? ", silu" : "", bias ? ", bias" : "",
                 initial ? ", initial state" : "", final_state ? ", final state" : "");

  const Axes axes = shared.channels_last ? PerToken(shared.packing, {rows, T, D}, 1, 0)
                                         : PerToken(shared.packing, {rows, D, T}, 2, 0);
  const Axes states = {{N, D, W - 1}};
  const Strided x = trial.Read("x", dtype, axes, Lies::kLastDense);
  shared.x = x.data;
  shared.x_strides = StridesOf(x.strides, shared.channels_last);
  shared.weight = trial.Read("weight", wide, {{W, D}});
  shared.bias = bias ? trial.Read("bias", wide, {{D}}) : nullptr;
  shared.initial_state = initial ? trial.Read("initial_state", wide, states) : nullptr;
  const std::vector<int64_t> dense = {T * D, shared.channels_last ? D : T, 1};

  ConvForwardArgs forward{};
  static_cast<ConvArgs&>(forward) = shared;
  forward.y = trial.Write("y", dtype, axes);
  forward.y_strides = StridesOf(dense, shared.channels_last);
  forward.final_state = final_state ? trial.Write("final_state", dtype, states) : nullptr;
  CausalConv1dForwardCpu(tier, forward);

  ConvBackwardArgs backward{};
  static_cast<ConvArgs&>(backward) = shared;
  const Strided dy = trial.Read("dy", dtype, axes, Lies::kLastDense);
  backward.dy = dy.data;
  backward.dy_strides = StridesOf(dy.strides, shared.channels_last);
  backward.dfinal_state = final_state ? trial.Read("dfinal_state", wide, states) : nullptr;
  backward.dx = trial.Write("dx", dtype, axes);
  backward.dx_strides = StridesOf(dense, shared.channels_last);
  backward.dinitial_state = initial ? trial.Write("dinitial_state", wide, states) : nullptr;
  backward.dweight = trial.Write("dweight", wide, {{D, W}});
  backward.dbias = bias ? trial.Write("dbias", wide, {{D}}) : nullptr;
  CausalConv1dBackwardCpu(tier, backward);
}

void FuzzConvUpdate(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  ConvUpdateArgs args{};
  const Tier tier = trial.DrawTier(kVectorTier);
  args.dtype = dtype;
  args.silu = draw.Chance(50);
  args.width = static_cast<int>(draw.Between(kConvMinWidth, kConvMaxWidth));
  args.batch = draw.Between(0, 4);
  args.channels = draw.Chance(5) ? 1030 : draw.Pick(kChannels);
  args.tokens = draw.Between(0, 6);
  args.state_length = args.width - 1 + draw.Between(0, 3);
  const bool bias = draw.Chance(50), circular = draw.Chance(50), named = draw.Chance(50);
  const int64_t rows = args.batch + (named ? draw.Between(0, 3) : 0);
  trial.Describe("tier %s, %s, B=%ld T=%ld D=%ld W=%d, state %ld%s%s%s%s", TierName(tier), NameOf(dtype), args.batch,
                 args.tokens, args.channels, args.width, args.state_length, args.silu ? ", silu" : "",
                 bias ? ", bias" : "", circular ? ", circular" : "", named ? ", named rows" : "");

  const Axes axes = {{args.batch, args.channels, args.tokens}};
  const Strided x = trial.Read("x", dtype, axes, Lies::kAnyhow);
  args.x = x.data;
  args.x_strides = StridesOf(x.strides, false);
  const Strided state = trial.Update("state", dtype, {{rows, args.channels, args.state_length}}, Lies::kAnyhow);
  args.state = state.data;
  args.state_strides = StridesOf(state.strides, false);
  if (named) {
    args.state_rows = trial.ReadIntegers("state_rows", draw.Slots(args.batch, rows));
  }
  if (circular) {
    std::vector<int64_t> seen(static_cast<size_t>(args.batch));
    for (int64_t& count : seen) count = draw.Chance(10) ? INT64_MAX - draw.Between(0, 9) : draw.Between(0, 20);
    args.cache_seqlens = trial.ReadIntegers("cache_seqlens", seen);
  }
  args.weight = trial.Read("weight", wide, {{args.width, args.channels}});
  args.bias = bias ? trial.Read("bias", wide, {{args.channels}}) : nullptr;
  args.y = trial.Write("y", dtype, axes);
  CausalConv1dUpdateCpu(tier, args);
}

}  // namespace packfree::fuzz
