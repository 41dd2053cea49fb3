// Backward of the selective scan, in the order of fwd.cuh. With g = dy silu(z) and x = delta u, from the last token to
// the first:
//   dh = g C + (dh of the next token, decayed),   dC += g h,   dB += dh x,   dx = sum of dh B,
//   dA += dh (a h_before) delta,   ddelta = sum of dh (a h_before) A + u dx,   dh carried = a dh,   a = exp(delta A).
// States are recomputed: first forward through the tile's chunks, with the state before every eighth token kept in
// scratch that stays in the second-level cache; then back, run by run, forward once more inside it.
//
// A token of a channel moves 14 bytes with 16-bit elements, and at 16 states about 12 more for slots and partial sums;
// with its five exponentials a state, and some 40 other operations, arithmetic bounds it as it does the forward.
#pragma once

#include "cuda/common/reduce.cuh"
#include "cuda/mamba1_scan/fwd.cuh"

namespace packfree {

struct ScanBackwardShared {
  ScanShared tiles;
  float sums[kScanThreads / 32][kScanStatesStaged][2 * kScanRun];  // of each warp: dB of the run's tokens, then dC
};

// Scratch of one block, [.., kScanThreads]: the state before each run, and the gradient that goes on to the left.
struct ScanStates {
  float* states;   // [kScanRuns, N, kScanThreads]
  float* carried;  // [N, kScanThreads]

  __device__ __forceinline__ float* State(const ScanArgs& args, int run, int64_t state) const {
    return states + (run * args.states + state) * kScanThreads + threadIdx.x;
  }
  __device__ __forceinline__ float* Carried(int64_t state) const {
    return carried + state * kScanThreads + threadIdx.x;
  }
};
__host__ __device__ __forceinline__ int64_t KeptFloats(const ScanArgs& args) {
  return (kScanRuns + 1) * args.states * kScanThreads;
}

// A thread's values of a run's tokens.
struct ScanGradientRun {
  float steps[kScanRun], inputs[kScanRun], g[kScanRun];
  float y[kScanRun], dinput[kScanRun], drate[kScanRun];  // sums over the states
};

// A state's sums over the tokens of a run.
struct ScanStateSums {
  float dA, dB, dC;
};

// One state through a run: forward from `value`, then back from `carried`, which it returns moved on to the left.
// per_token [2 * kScanRun] gets dB and dC.
template <bool kHasEnds>
__device__ __forceinline__ float ScanBackwardRun(const ScanBackwardArgs& args, const ScanShared& shared,
                                                 const ScanRun& run, const ScanChannel& channel, int64_t state,
                                                 float rate, const float (&b)[kScanRun], const float (&c)[kScanRun],
                                                 float value, float carried, ScanGradientRun& tokens,
                                                 float (&per_token)[2 * kScanRun], ScanStateSums& sums) {
  const float rate2 = rate * kLog2E;
  float decay[kScanRun], kept[kScanRun];
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    if (kHasEnds && i < run.count && shared.tokens[run.first + i].begins) {
      value = StateOf(args, args.initial_state, shared.tokens[run.first + i].sequence, channel.index, state);
    }
    decay[i] = exp2f(tokens.steps[i] * rate2);
    kept[i] = decay[i] * value;
    value = fmaf(tokens.inputs[i], b[i], kept[i]);
  }
  sums = {0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = kScanRun - 1; i >= 0; --i) {
    if (kHasEnds && i < run.count && shared.tokens[run.first + i].ends) {
      carried = StateOf(args, args.dfinal_state, shared.tokens[run.first + i].sequence, channel.index, state);
    }
    const float h = fmaf(tokens.inputs[i], b[i], kept[i]);
    const float dh = fmaf(tokens.g[i], c[i], carried);
    tokens.y[i] = fmaf(c[i], h, tokens.y[i]);
    tokens.dinput[i] = fmaf(dh, b[i], tokens.dinput[i]);
    per_token[i] = dh * tokens.inputs[i];
    per_token[kScanRun + i] = tokens.g[i] * h;
    sums.dB += per_token[i];
    sums.dC += per_token[kScanRun + i];
    const float dexponent = dh * kept[i];
    tokens.drate[i] = fmaf(dexponent, rate, tokens.drate[i]);
    sums.dA = fmaf(dexponent, tokens.steps[i], sums.dA);
    carried = decay[i] * dh;
    if (kHasEnds && i < run.count && shared.tokens[run.first + i].begins && args.dinitial_state != nullptr &&
        channel.present) {
      const int64_t sequence = shared.tokens[run.first + i].sequence;
      static_cast<float*>(args.dinitial_state)[(sequence * args.channels + channel.index) * args.states + state] =
          carried;
    }
  }
  return carried;
}

// The state before each run of the tile, for all states.
__device__ __forceinline__ void KeepStates(const ScanBackwardArgs& args, const ScanSlots& slots, int64_t tile,
                                           int tokens, const ScanChannel& channel, ScanShared& shared,
                                           const ScanStates& kept) {
  for (int r = 0; r * kScanRun < tokens; ++r) {
    const ScanRun run = RunAt(shared, r, tokens);
    float steps[kScanRun], inputs[kScanRun];
    LoadSteps(args, shared, run, channel, steps);
    LoadTokens(args.u, shared, run, channel, inputs);
#pragma unroll
    for (int i = 0; i < kScanRun; ++i) inputs[i] = steps[i] * inputs[i];
    const auto stage = [&](int64_t first, int count) {
      StageRows(args, args.B, shared, run, channel, first, count, shared.B);
    };
    ForStateGroups(args, stage, [&](int64_t first, int count) {
      for (int n = 0; n < count; ++n) {
        const int64_t state = first + n;
        float value = 0.0f;
        if (r > 0) {
          value = *kept.State(args, r, state);
        } else {
          if (channel.present && !shared.tokens[0].begins) value = *slots.Value(args, tile, state, channel.index);
          *kept.State(args, r, state) = value;
        }
        if ((r + 1) * kScanRun >= tokens) continue;
        float b[kScanRun];
        ReadRow(args, args.B, shared.B, channel, first, n, b);
        const float rate2 = RateOf(args, channel, state) * kLog2E;
#pragma unroll
        for (int i = 0; i < kScanRun; ++i) {
          const ScanToken& token = shared.tokens[run.first + i];
          if (token.begins) value = StateOf(args, args.initial_state, token.sequence, channel.index, state);
          value = fmaf(inputs[i], b[i], exp2f(steps[i] * rate2) * value);
        }
        *kept.State(args, r + 1, state) = value;
      }
    });
  }
}

// Adds this run's part to a row of the tile's partial sums; the first run sets it.
__device__ __forceinline__ void AddToRow(const ScanBackwardArgs& args, int64_t tile, int64_t row,
                                         const ScanChannel& channel, bool first, float part) {
  if (!channel.present) return;
  float* sum = static_cast<float*>(args.parameter_partials) + (tile * ScanParameterRows(args) + row) * args.channels +
               channel.index;
  *sum = first ? part : *sum + part;
}

// dB and dC of a run, summed over the block's channels: from the warps' sums into the partial sums [columns, T, N].
__device__ __forceinline__ void StoreTokenSums(const ScanBackwardArgs& args, const ScanBackwardShared& shared,
                                               int64_t begin, const ScanRun& run, const ScanChannel& channel,
                                               int64_t first, int count) {
  for (int place = threadIdx.x; place < count * 2 * kScanRun; place += kScanThreads) {
    const int n = place % count, value = place / count, i = value % kScanRun;
    float sum = shared.sums[0][n][value];
    for (int warp = 1; warp < kScanThreads / 32; ++warp) sum += shared.sums[warp][n][value];
    float* partials = static_cast<float*>(value < kScanRun ? args.dB_partials : args.dC_partials);
    if (partials == nullptr || i >= run.count) continue;
    const int64_t token = begin + run.first + i;
    partials[(channel.column * args.packing.tokens + token) * args.states + first + n] = sum;
  }
}

// From the sums over the states to du, ddelta and dz; dskip and dbias go on to the next run.
__device__ __forceinline__ void FinishBackward(const ScanBackwardArgs& args, const ScanShared& shared,
                                               const ScanRun& run, const ScanChannel& channel, ScanGradientRun& tokens,
                                               float& dskip, float& dbias) {
  const float* skips = static_cast<const float*>(args.D);
  const float* biases = static_cast<const float*>(args.delta_bias);
  const float skip = skips != nullptr && channel.present ? skips[channel.index] : 0.0f;
  const float bias = biases != nullptr && channel.present ? biases[channel.index] : 0.0f;
  float u[kScanRun], raw[kScanRun], out[kScanRun];
  LoadTokens(args.u, shared, run, channel, u);
  LoadTokens(args.delta, shared, run, channel, raw);
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    out[i] = tokens.steps[i] * tokens.dinput[i];
    if (skips != nullptr) {
      out[i] = fmaf(skip, tokens.g[i], out[i]);
      tokens.y[i] = fmaf(skip, u[i], tokens.y[i]);
    }
    if (i < run.count) dskip = fmaf(tokens.g[i], u[i], dskip);
  }
  StoreTokens(args.du, shared, run, channel, out);
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    out[i] = fmaf(u[i], tokens.dinput[i], tokens.drate[i]);
    if (args.softplus) out[i] = out[i] * SoftplusSlope(raw[i] + bias);
    if (i < run.count) dbias += out[i];
  }
  StoreTokens(args.ddelta, shared, run, channel, out);
  if (args.z.data == nullptr) return;
  LoadTokens(args.z, shared, run, channel, raw);
  LoadTokens(args.dy, shared, run, channel, u);
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) out[i] = tokens.y[i] * (u[i] * SiluSlope(raw[i]));
  StoreTokens(args.dz, shared, run, channel, out);
}

__device__ __forceinline__ void LoadGradientRun(const ScanBackwardArgs& args, const ScanShared& shared,
                                                const ScanRun& run, const ScanChannel& channel,
                                                ScanGradientRun& tokens) {
  LoadSteps(args, shared, run, channel, tokens.steps);
  LoadTokens(args.u, shared, run, channel, tokens.inputs);
  LoadTokens(args.dy, shared, run, channel, tokens.g);
  float gate[kScanRun];
  if (args.z.data != nullptr) LoadTokens(args.z, shared, run, channel, gate);
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    tokens.inputs[i] = tokens.steps[i] * tokens.inputs[i];
    if (args.z.data != nullptr) tokens.g[i] = tokens.g[i] * (gate[i] * Sigmoid(gate[i]));
    tokens.y[i] = tokens.dinput[i] = tokens.drate[i] = 0.0f;
  }
}

// A state of a run: reads what is kept of it, and leaves its sums.
__device__ __forceinline__ void ReverseState(const ScanBackwardArgs& args, int64_t tile, const ScanRun& run, int r,
                                             bool last, const ScanChannel& channel, int64_t first, int n, float carried,
                                             const ScanStates& kept, ScanGradientRun& tokens,
                                             ScanBackwardShared& shared) {
  const int64_t state = first + n;
  float b[kScanRun], c[kScanRun], per_token[2 * kScanRun];
  ReadRow(args, args.B, shared.tiles.B, channel, first, n, b);
  ReadRow(args, args.C, shared.tiles.C, channel, first, n, c);
  const float rate = RateOf(args, channel, state), value = *kept.State(args, r, state);
  ScanStateSums sums;
  *kept.Carried(state) = run.has_ends ? ScanBackwardRun<true>(args, shared.tiles, run, channel, state, rate, b, c,
                                                              value, carried, tokens, per_token, sums)
                                      : ScanBackwardRun<false>(args, shared.tiles, run, channel, state, rate, b, c,
                                                               value, carried, tokens, per_token, sums);
  int64_t row = state;
  AddToRow(args, tile, row, channel, last, sums.dA);
  if (args.B.fixed) AddToRow(args, tile, row += args.states, channel, last, sums.dB);
  if (args.C.fixed) AddToRow(args, tile, row += args.states, channel, last, sums.dC);
  if (args.B.fixed && args.C.fixed) return;
  const int lane = threadIdx.x % 32;
  const float sum = WarpSum16(per_token, lane);
  if (lane % 2 == 0) shared.sums[threadIdx.x / 32][n][lane / 2] = sum;
}

static __global__ void __launch_bounds__(kScanThreads, kScanBackwardResident)
    ScanBackwardKernel(ScanBackwardArgs args, const int32_t* owners, ScanSlots states, ScanSlots gradients,
                       float* scratch) {
  PACKFREE_SHARED(ScanBackwardShared, shared);
  float* own = scratch + blockIdx.x * KeptFloats(args);
  const ScanStates kept{own, own + kScanRuns * args.states * kScanThreads};
  const int64_t columns = ColumnsOf(args), items = TilesOf(args.packing.tokens) * columns;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t tile = item / columns;
    const ScanChannel channel(args, item % columns);
    const ScanTileSpan span(args, owners, tile);
    const int64_t padding = span.begin + span.live;
    ClearTokens(args, args.du, padding, span.end, channel);
    ClearTokens(args, args.ddelta, padding, span.end, channel);
    ClearTokens(args, args.dz, padding, span.end, channel);
    const int64_t rows = ScanParameterRows(args);
    if (span.live == 0) {
      for (int64_t row = 0; row < rows; ++row) AddToRow(args, tile, row, channel, true, 0.0f);
      continue;
    }
    DescribeTokens(args, owners, span.begin, span.live, shared.tiles);
    KeepStates(args, states, tile, span.live, channel, shared.tiles, kept);
    // What the last token gets from behind, unless its sequence ends there: the next tile goes on with it.
    const bool goes_on = channel.present && !shared.tiles.tokens[span.live - 1].ends;
    const int last = (span.live - 1) / kScanRun;
    float dskip = 0.0f, dbias = 0.0f;
    for (int r = last; r >= 0; --r) {
      const ScanRun run = RunAt(shared.tiles, r, span.live);
      ScanGradientRun tokens;
      LoadGradientRun(args, shared.tiles, run, channel, tokens);
      const auto stage = [&](int64_t first, int count) {
        StageRows(args, args.B, shared.tiles, run, channel, first, count, shared.tiles.B);
        StageRows(args, args.C, shared.tiles, run, channel, first, count, shared.tiles.C);
      };
      ForStateGroups(args, stage, [&](int64_t first, int count) {
        for (int n = 0; n < count; ++n) {
          float carried = 0.0f;
          if (r < last) {
            carried = *kept.Carried(first + n);
          } else if (goes_on) {
            carried = *gradients.Value(args, tile + 1, first + n, channel.index);
          }
          ReverseState(args, tile, run, r, r == last, channel, first, n, carried, kept, tokens, shared);
        }
        __syncthreads();
        if (!(args.B.fixed && args.C.fixed)) {
          StoreTokenSums(args, shared, span.begin, run, channel, first, count);
        }
      });
      FinishBackward(args, shared.tiles, run, channel, tokens, dskip, dbias);
    }
    AddToRow(args, tile, rows - 2, channel, true, dskip);
    AddToRow(args, tile, rows - 1, channel, true, dbias);
  }
}

// dB or dC [B T, G, N]: the sums over the columns of each group, in order; 0 for padding.
static __global__ void __launch_bounds__(kElementThreads)
    ScanReduceTokensKernel(ScanArgs args, Dtype dtype, const int32_t* owners, const float* partials, void* target) {
  const int64_t columns = ColumnsOf(args) / args.groups, elements = args.packing.tokens * args.groups * args.states;
  for (int64_t element = FirstElement(); element < elements; element += ElementStride()) {
    const int64_t state = element % args.states, group = element / args.states % args.groups;
    const int64_t token = element / args.states / args.groups;
    float sum = 0.0f;
    if (owners[token] >= 0) {
      for (int64_t column = group * columns; column < (group + 1) * columns; ++column) {
        sum += partials[(column * args.packing.tokens + token) * args.states + state];
      }
    }
    StoreAs(target, dtype, element, sum);
  }
}

}  // namespace packfree
