// What goes from chunk to chunk: states from left to right, their gradients from right to left. Two passes each. The
// first runs through a chunk from 0, all chunks at once; the second carries its result on through the chunks of a
// sequence, one thread a state and channel. A chunk's decay is exp(A times the sum of its steps).
//
// Slots [tiles, N, D]: slot j belongs to the continued chunk of tile j. Beside them [tiles, D]: sums of steps.
#pragma once

#include "cuda/mamba1_scan/tiles.cuh"

namespace packfree {

struct ScanSlots {
  float* values;  // [tiles, N, D]
  float* steps;   // [tiles, D]

  __device__ __forceinline__ float* Value(const ScanArgs& args, int64_t tile, int64_t state, int64_t channel) const {
    return values + (tile * args.states + state) * args.channels + channel;
  }
};

// Forward: the chunk before each continued one, from the state 0 to the state at its end. kBackward: the continued
// chunk itself, from the gradient 0 behind it to that of the state before it, dh = g C + ..., g = dy silu(z).
template <bool kBackward>
__global__ void __launch_bounds__(kScanThreads, kScanChunkResident)
    ScanChunkKernel(ScanArgs args, ScanInput dy, const int32_t* owners, ScanSlots slots) {
  PACKFREE_SHARED(ScanShared, shared);
  const int64_t columns = ColumnsOf(args), items = TilesOf(args.packing.tokens) * columns;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t tile = item / columns;
    const ScanChunk chunk = ContinuedChunk(args, owners, tile);
    if (chunk.number == 0) continue;
    const ScanChannel channel(args, item % columns);
    const int64_t begin = kBackward ? chunk.begin : chunk.begin - kScanChunk;
    const int tokens = kBackward ? static_cast<int>(chunk.end - chunk.begin) : kScanChunk;
    DescribeTokens(args, owners, begin, tokens, shared);
    const int runs = (tokens + kScanRun - 1) / kScanRun;
    float sum = 0.0f;
    for (int turn = 0; turn < runs; ++turn) {
      const ScanRun run = RunAt(shared, kBackward ? runs - 1 - turn : turn, tokens);
      float steps[kScanRun], given[kScanRun], gate[kScanRun];
      LoadSteps(args, shared, run, channel, steps);
      LoadTokens(kBackward ? dy : args.u, shared, run, channel, given);
      if (kBackward && args.z.data != nullptr) LoadTokens(args.z, shared, run, channel, gate);
#pragma unroll
      for (int i = 0; i < kScanRun; ++i) {
        if (kBackward) {
          if (args.z.data != nullptr) given[i] = given[i] * (gate[i] * Sigmoid(gate[i]));
        } else {
          given[i] = steps[i] * given[i];
        }
        sum += steps[i];
      }
      ScanRows& rows = kBackward ? shared.C : shared.B;
      const ScanCoefficients& source = kBackward ? args.C : args.B;
      const auto stage = [&](int64_t first, int count) {
        StageRows(args, source, shared, run, channel, first, count, rows);
      };
      ForStateGroups(args, stage, [&](int64_t first, int count) {
        for (int n = 0; n < count && channel.present; ++n) {
          float coefficients[kScanRun];
          ReadRow(args, source, rows, channel, first, n, coefficients);
          const float rate2 = RateOf(args, channel, first + n) * kLog2E;
          float* slot = slots.Value(args, tile, first + n, channel.index);
          float value = turn == 0 ? 0.0f : *slot;
#pragma unroll
          for (int k = 0; k < kScanRun; ++k) {
            const int i = kBackward ? kScanRun - 1 - k : k;
            const float decay = exp2f(steps[i] * rate2);
            value = kBackward ? decay * fmaf(given[i], coefficients[i], value)
                              : fmaf(given[i], coefficients[i], decay * value);
          }
          *slot = value;
        }
      });
    }
    if (channel.present) slots.steps[tile * args.channels + channel.index] = sum;
  }
}

// Turns the slots of each sequence into what stands before its continued chunks: the state, or with kBackward the
// gradient of it. `given` is what the sequence starts from, states [sequences, D, N] or null.
template <bool kBackward>
__global__ void __launch_bounds__(kElementThreads)
    ScanCarryKernel(ScanArgs args, const void* given, const int32_t* owners, ScanSlots slots) {
  const int64_t elements = args.states * args.channels, blocks = (elements + kElementThreads - 1) / kElementThreads;
  const int64_t items = TilesOf(args.packing.tokens) * blocks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t tile = item / blocks, element = item % blocks * kElementThreads + threadIdx.x;
    const ScanChunk chunk = ContinuedChunk(args, owners, tile);
    // The first continued chunk speaks for its sequence; the others are in the tiles behind it, one each.
    if (chunk.number != 1 || element >= elements) continue;
    const int64_t state = element / args.channels, channel = element % args.channels;
    const Bounds bounds = BoundsOf(args.packing, chunk.sequence);
    const int64_t count = (bounds.eos - bounds.bos - 1) / kScanChunk;
    const float rate2 = static_cast<const float*>(args.A)[channel * args.states + state] * kLog2E;
    float value = StateOf(args, given, chunk.sequence, channel, state);
#pragma unroll 4
    for (int64_t k = 0; k < count; ++k) {
      const int64_t place = kBackward ? tile + count - 1 - k : tile + k;
      float* slot = slots.Value(args, place, state, channel);
      value = fmaf(exp2f(rate2 * slots.steps[place * args.channels + channel]), value, *slot);
      *slot = value;
    }
  }
}

// An empty sequence hands its state on, and its gradient back.
static __global__ void __launch_bounds__(kElementThreads)
    ScanEmptyKernel(ScanArgs args, const void* given, void* target) {
  const int64_t size = args.channels * args.states, elements = args.packing.num_sequences * size;
  for (int64_t element = FirstElement(); element < elements; element += ElementStride()) {
    const Bounds bounds = BoundsOf(args.packing, element / size);
    if (bounds.bos < bounds.eos) continue;
    static_cast<float*>(target)[element] = given == nullptr ? 0.0f : static_cast<const float*>(given)[element];
  }
}

}  // namespace packfree
