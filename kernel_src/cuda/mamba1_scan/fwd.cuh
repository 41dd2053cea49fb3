// Forward of the selective scan. A token of a channel reads u, delta and z and writes y, 8 bytes with 16-bit elements,
// and at 16 states about 4 more for the states between chunks; but it takes 16 exponentials here and 16 in
// ScanChunkKernel, of which a multiprocessor makes 16 a clock: on an H200 at 1.75 GHz 1.2e11 tokens of a channel a
// second, about 1.2 of its 4.3 TB/s. So exponentials bound it, not memory.
#pragma once

#include "cuda/mamba1_scan/chunks.cuh"

namespace packfree {

// y[t] += C h of one state, from `value` on; returns the state behind the run. kHasEnds: sequences begin or end in it.
template <bool kHasEnds>
__device__ __forceinline__ float ScanForwardRun(const ScanForwardArgs& args, const ScanShared& shared,
                                                const ScanRun& run, const ScanChannel& channel, int64_t state,
                                                float rate2, const float (&steps)[kScanRun],
                                                const float (&inputs)[kScanRun], const float (&b)[kScanRun],
                                                const float (&c)[kScanRun], float value, float (&y)[kScanRun]) {
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    if (kHasEnds && i < run.count && shared.tokens[run.first + i].begins) {
      value = StateOf(args, args.initial_state, shared.tokens[run.first + i].sequence, channel.index, state);
    }
    value = fmaf(inputs[i], b[i], exp2f(steps[i] * rate2) * value);
    y[i] = fmaf(c[i], value, y[i]);
    if (kHasEnds && i < run.count && shared.tokens[run.first + i].ends && args.final_state != nullptr) {
      const int64_t sequence = shared.tokens[run.first + i].sequence;
      static_cast<float*>(args.final_state)[(sequence * args.channels + channel.index) * args.states + state] = value;
    }
  }
  return value;
}

__device__ __forceinline__ void FinishForward(const ScanForwardArgs& args, const ScanShared& shared, const ScanRun& run,
                                              const ScanChannel& channel, const float (&u)[kScanRun],
                                              float (&y)[kScanRun]) {
  const float skip = args.D != nullptr && channel.present ? static_cast<const float*>(args.D)[channel.index] : 0.0f;
  float gate[kScanRun];
  if (args.z.data != nullptr) LoadTokens(args.z, shared, run, channel, gate);
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    if (args.D != nullptr) y[i] = fmaf(skip, u[i], y[i]);
    if (args.z.data != nullptr) y[i] = y[i] * (gate[i] * Sigmoid(gate[i]));
  }
  StoreTokens(args.y, shared, run, channel, y);
}

// Tokens of a tile's chunks: [begin, begin + live), and up to `end` padding.
struct ScanTileSpan {
  int64_t begin, end;
  int live;

  __device__ __forceinline__ ScanTileSpan(const ScanArgs& args, const int32_t* owners, int64_t tile)
      : begin(ContinuedChunk(args, owners, tile).first), end(ContinuedChunk(args, owners, tile + 1).first), live(0) {
    if (begin >= end || owners[begin] < 0) return;
    const int64_t last = args.packing.cu_seqlens[args.packing.num_sequences];
    live = static_cast<int>((last < end ? last : end) - begin);
  }
};

// In slot j stands the state before the tile's continued chunk; behind it, the state that the tile has reached.
static __global__ void __launch_bounds__(kScanThreads, kScanForwardResident)
    ScanForwardKernel(ScanForwardArgs args, const int32_t* owners, ScanSlots slots) {
  PACKFREE_SHARED(ScanShared, shared);
  const int64_t columns = ColumnsOf(args), items = TilesOf(args.packing.tokens) * columns;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t tile = item / columns;
    const ScanChannel channel(args, item % columns);
    const ScanTileSpan span(args, owners, tile);
    ClearTokens(args, args.y, span.begin + span.live, span.end, channel);
    if (span.live == 0) continue;
    DescribeTokens(args, owners, span.begin, span.live, shared);
    for (int r = 0; r * kScanRun < span.live; ++r) {
      const ScanRun run = RunAt(shared, r, span.live);
      float steps[kScanRun], u[kScanRun], inputs[kScanRun], y[kScanRun] = {};
      LoadSteps(args, shared, run, channel, steps);
      LoadTokens(args.u, shared, run, channel, u);
#pragma unroll
      for (int i = 0; i < kScanRun; ++i) inputs[i] = steps[i] * u[i];
      const auto stage = [&](int64_t first, int count) {
        StageRows(args, args.B, shared, run, channel, first, count, shared.B);
        StageRows(args, args.C, shared, run, channel, first, count, shared.C);
      };
      ForStateGroups(args, stage, [&](int64_t first, int count) {
        for (int n = 0; n < count && channel.present; ++n) {
          float b[kScanRun], c[kScanRun];
          ReadRow(args, args.B, shared.B, channel, first, n, b);
          ReadRow(args, args.C, shared.C, channel, first, n, c);
          const float rate2 = RateOf(args, channel, first + n) * kLog2E;
          float* slot = slots.Value(args, tile, first + n, channel.index);
          // Unless the tile continues a chunk, its first token sets the state.
          const float value = r == 0 && shared.tokens[0].begins ? 0.0f : *slot;
          *slot =
              run.has_ends
                  ? ScanForwardRun<true>(args, shared, run, channel, first + n, rate2, steps, inputs, b, c, value, y)
                  : ScanForwardRun<false>(args, shared, run, channel, first + n, rate2, steps, inputs, b, c, value, y);
        }
      });
      FinishForward(args, shared, run, channel, u, y);
    }
  }
}

}  // namespace packfree
