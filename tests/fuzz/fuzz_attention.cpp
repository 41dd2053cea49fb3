#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/flash_attn_varlen/flash_attn_varlen.h"
#include "trial.h"

namespace packfree::fuzz {
namespace {

HeadRows RowsOf(const Strided& tensor) { return {tensor.data, tensor.strides[0], tensor.strides[1]}; }

int64_t DrawDim(Draw& draw) {
  if (draw.Chance(5)) return draw.Pick<int64_t>({255, 256, 272, 512});
  return draw.Pick<int64_t>({1, 2, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 128});
}

// Keys of each sequence: as many as queries, or any number.
std::vector<int64_t> DrawKeyLengths(Draw& draw, const PackingView& queries, int64_t most) {
  std::vector<int64_t> lengths;
  const bool equal = draw.Chance(60);
  int64_t left = most;
  for (int64_t n = 0; n < queries.num_sequences; ++n) {
    int64_t length = queries.length(n);
    if (!equal && !draw.Chance(30)) {
      length = draw.Chance(20)   ? 0
               : draw.Chance(30) ? draw.Pick<int64_t>({127, 128, 129, 512, 513})
                                 : draw.Between(1, 70);
    }
    if (!equal) length = std::min(length, left);
    left -= length;
    lengths.push_back(length);
  }
  return lengths;
}

// Any two numbers for each query, most of them near its sequence's keys.
const int32_t* DrawRanges(Trial& trial, const AttentionArgs& args) {
  Draw& draw = trial.draw;
  std::vector<int32_t> ranges(static_cast<size_t>(2 * args.queries.tokens));
  for (int32_t& bound : ranges) {
    bound = static_cast<int32_t>(draw.Chance(5) ? draw.Pick<int64_t>({INT32_MIN, -1, 0, INT32_MAX})
                                                : draw.Between(-3, args.keys.tokens + 3));
  }
  for (int64_t n = 0; n < args.queries.num_sequences; ++n) {
    if (draw.Chance(30)) continue;
    const int64_t keys = args.keys.length(n), width = draw.Pick<int64_t>({0, 1, 40, 600});
    for (int64_t t = args.queries.bos(n); t < args.queries.eos(n); ++t) {
      const int64_t first = draw.Between(0, keys);
      ranges[2 * t] = static_cast<int32_t>(first);
      ranges[2 * t + 1] = static_cast<int32_t>(std::min(keys, first + draw.Between(0, width)) - 1);
    }
  }
  return trial.ReadIntegers("visible_keys", ranges);
}

}  // namespace

void FuzzAttention(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  AttentionArgs shared{};
  const Tier tier = trial.DrawTier(kBestTier);
  shared.dtype = dtype;
  shared.K = DrawDim(draw);
  shared.V = draw.Chance(60) ? shared.K : DrawDim(draw);
  shared.HK = draw.Between(1, 3);
  shared.H = shared.HK * draw.Pick<int64_t>({1, 1, 2, 3, 5});
  const int64_t K = shared.K, V = shared.V, H = shared.H, HK = shared.HK;
  const int64_t most = std::clamp<int64_t>(60000 / (H * (K + V)), 1, 1100);
  const int64_t edge = draw.Pick<int64_t>({32, kTileColumns, kKeyBlock, KeyRange(shared)});
  shared.queries = trial.DrawPacking(1, trial.DrawTokens(most, edge), edge);
  const std::vector<int64_t> key_lengths = DrawKeyLengths(draw, shared.queries, most);
  int64_t key_tokens = draw.Chance(30) ? draw.Between(1, 5) : 0;
  for (const int64_t length : key_lengths) key_tokens += length;
  shared.keys = trial.NewPacking(key_lengths, key_tokens);
  const int64_t Tq = shared.queries.tokens, Tk = shared.keys.tokens;
  shared.softmax_scale = draw.Chance(80) ? 1 / std::sqrt(static_cast<double>(K)) : draw.Pick<double>({0.0, -0.3, 2.0});
  shared.softcap = draw.Chance(25) ? draw.Uniform(0.5, 20) : 0;
  shared.window_left = draw.Chance(60) ? -1 : draw.Pick<int64_t>({0, 1, 5, 63, 64, 127, 200, kWidestWindow});
  shared.window_right = draw.Chance(50) ? 0 : draw.Chance(60) ? -1 : draw.Pick<int64_t>({1, 7, 64, 130, kWidestWindow});
  if (draw.Chance(30)) {
    shared.window_left = shared.window_right = -1;
    shared.visible_keys = DrawRanges(trial, shared);
  }
  shared.dropout_p = draw.Chance(20) ? draw.Uniform(0.01, 0.99) : 0;
  shared.dropout_seed = draw.Bits();
  const bool sinks = draw.Chance(30), want_lse = draw.Chance(80), dlse = draw.Chance(30);
  trial.Describe("tier %s, %s, H=%ld HK=%ld K=%ld V=%ld, scale %g softcap %g window %ld %ld dropout %g%s%s%s%s",
                 TierName(tier), NameOf(dtype), H, HK, K, V, shared.softmax_scale, shared.softcap, shared.window_left,
                 shared.window_right, shared.dropout_p, shared.visible_keys != nullptr ? ", ranges" : "",
                 sinks ? ", sinks" : "", want_lse ? ", lse" : "", dlse ? ", dlse" : "");

  const Axes q_axes = PerToken(shared.queries, {Tq, H, K}), out_axes = PerToken(shared.queries, {Tq, H, V});
  const Axes k_axes = PerToken(shared.keys, {Tk, HK, K}), v_axes = PerToken(shared.keys, {Tk, HK, V});
  const Axes lse_axes = PerToken(shared.queries, {H, Tq}, 1);
  shared.q = RowsOf(trial.Read("q", dtype, q_axes, Lies::kLastDense));
  shared.k = RowsOf(trial.Read("k", dtype, k_axes, Lies::kLastDense));
  shared.v = RowsOf(trial.Read("v", dtype, v_axes, Lies::kLastDense));
  shared.s_aux = sinks ? trial.Read("s_aux", wide, {{H}}) : nullptr;

  AttentionForwardArgs forward{};
  static_cast<AttentionArgs&>(forward) = shared;
  forward.out = trial.Write("out", dtype, out_axes);
  forward.lse = want_lse ? trial.Write("lse", wide, lse_axes) : nullptr;
  FlashAttnVarlenForwardCpu(tier, forward);
  if (!want_lse) return;

  AttentionBackwardArgs backward{};
  static_cast<AttentionArgs&>(backward) = shared;
  backward.dout = RowsOf(trial.Read("dout", dtype, out_axes, Lies::kLastDense));
  backward.out = {forward.out, H * V, V};
  backward.lse = forward.lse;
  backward.dlse = dlse ? trial.Read("dlse", wide, lse_axes) : nullptr;
  backward.dq = trial.Write("dq", dtype, q_axes);
  backward.dk = trial.Write("dk", dtype, k_axes);
  backward.dv = trial.Write("dv", dtype, v_axes);
  backward.ds_aux = sinks ? trial.Write("ds_aux", wide, {{H}}) : nullptr;
  FlashAttnVarlenBackwardCpu(tier, backward);
}

}  // namespace packfree::fuzz
