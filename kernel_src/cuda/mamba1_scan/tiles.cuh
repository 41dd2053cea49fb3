// How the scan is cut: a thread has a channel and runs through tokens in order, so that loads run along the channels.
// That alone would leave most of a GPU idle, so sequences are cut into chunks of 64 tokens, counted from their first
// token, and every chunk starts from a state that chunks.cuh has found.
//
// Work is given out by stretches of 64 tokens of the pack, whatever sequences lie there: tile j has the chunks that
// start in it, up to 127 tokens. So no list of work is needed, and all tiles have about the same. Since chunks of one
// sequence start 64 tokens apart, at most one chunk in a tile goes on from another chunk, the first: "the tile's
// continued chunk". Its state has slot j.
#pragma once

#include "common/mamba1_scan.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/sequences.cuh"

namespace packfree {

constexpr int kScanThreads = 128;                // channels of a block
constexpr int kScanChunk = 64;                   // tokens
constexpr int kScanRun = 8;                      // tokens whose steps and sums a thread keeps in registers
constexpr int kScanStatesStaged = 16;            // states whose B and C are staged at once
constexpr int kScanTileTokens = 2 * kScanChunk;  // at least the tokens of a tile's chunks
constexpr int kScanRuns = kScanTileTokens / kScanRun;
// Blocks of a multiprocessor that are resident at once: they stride over the rest.
constexpr int kScanChunkResident = 5;
constexpr int kScanForwardResident = 5;
constexpr int kScanBackwardResident = 3;
constexpr float kLog2E = 1.44269504088896340736f;

__host__ __device__ __forceinline__ int64_t TilesOf(int64_t tokens) { return (tokens + kScanChunk - 1) / kScanChunk; }
// Blocks of channels; none spans two groups of B and C.
__host__ __device__ __forceinline__ int64_t ColumnsOf(const ScanArgs& args) {
  return args.groups * ((args.channels / args.groups + kScanThreads - 1) / kScanThreads);
}

// The continued chunk of a tile: tokens [begin, end) of `sequence`, its chunk number `number` (from 1), or number 0:
// there is none. `first` is where the tile's chunks begin in any case.
struct ScanChunk {
  int64_t first, begin, end, number;
  int32_t sequence;
};
__device__ __forceinline__ ScanChunk ContinuedChunk(const ScanArgs& args, const int32_t* owners, int64_t tile) {
  const int64_t token = tile * kScanChunk;
  if (token >= args.packing.tokens) return {args.packing.tokens, 0, 0, 0, -1};
  const int32_t sequence = owners[token];
  if (sequence < 0) return {token, 0, 0, 0, -1};
  const Bounds bounds = BoundsOf(args.packing, sequence);
  const int64_t number = (token - bounds.bos + kScanChunk - 1) / kScanChunk;
  const int64_t begin = bounds.bos + number * kScanChunk;
  if (begin >= bounds.eos) return {bounds.eos, 0, 0, 0, -1};
  if (number == 0) return {begin, 0, 0, 0, sequence};
  const int64_t end = begin + kScanChunk < bounds.eos ? begin + kScanChunk : bounds.eos;
  return {begin, begin, end, number, sequence};
}

// The channel of a thread in column `column`.
struct ScanChannel {
  int64_t column, group, index;
  bool present;

  __device__ __forceinline__ ScanChannel(const ScanArgs& args, int64_t column_) : column(column_) {
    const int64_t of_group = args.channels / args.groups, columns = (of_group + kScanThreads - 1) / kScanThreads;
    group = column / columns;
    const int64_t inside = column % columns * kScanThreads + threadIdx.x;
    present = inside < of_group;
    index = group * of_group + (present ? inside : 0);
  }
};

// What the threads of a block know of each token of their tile.
struct ScanToken {
  int32_t row, position, sequence;
  bool begins, ends;  // the first token of its sequence, the last
};

// B or C of a run: [states][tokens], so that a thread reads a state's tokens at once.
struct alignas(16) ScanRows {
  float rows[kScanStatesStaged][kScanRun];
};

struct ScanShared {
  ScanToken tokens[kScanTileTokens];
  ScanRows B, C;
};

// What `tokens` holds of tokens [begin, begin + count), all of which sequences own. Ends with a barrier.
__device__ __forceinline__ void DescribeTokens(const ScanArgs& args, const int32_t* owners, int64_t begin, int count,
                                               ScanShared& shared) {
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < count) {
    const int64_t token = begin + threadIdx.x;
    const int32_t sequence = owners[token];
    const Bounds bounds = BoundsOf(args.packing, sequence < 0 ? 0 : sequence);
    shared.tokens[threadIdx.x] = {static_cast<int32_t>(token / args.row_tokens),
                                  static_cast<int32_t>(token % args.row_tokens), sequence, token == bounds.bos,
                                  token + 1 == bounds.eos};
  }
  __syncthreads();
}

// Tokens [first, first + count) of a tile, counted from its first token; `count` is at most kScanRun.
struct ScanRun {
  int first, count;
  bool has_ends;  // whether a sequence begins or ends in it
};
__device__ __forceinline__ ScanRun RunAt(const ScanShared& shared, int run, int tokens) {
  const int first = run * kScanRun, left = tokens - first;
  ScanRun found{first, left < kScanRun ? left : kScanRun, false};
  for (int i = 0; i < found.count; ++i) {
    found.has_ends = found.has_ends || shared.tokens[first + i].begins || shared.tokens[first + i].ends;
  }
  return found;
}

__device__ __forceinline__ int64_t OffsetOf(const ScanStrides& strides, const ScanToken& token, int64_t channel) {
  return token.row * strides.row + token.position * strides.token + channel * strides.channel;
}

// values[i] = token i of the run, 0 behind it and where the thread has no channel.
__device__ __forceinline__ void LoadTokens(const ScanInput& input, const ScanShared& shared, const ScanRun& run,
                                           const ScanChannel& channel, float (&values)[kScanRun]) {
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    values[i] = 0.0f;
    if (!channel.present || i >= run.count) continue;
    const int64_t offset = OffsetOf(input.strides, shared.tokens[run.first + i], channel.index);
    values[i] = LoadAs(input.data, input.dtype, offset);
  }
}
__device__ __forceinline__ void StoreTokens(const ScanOutput& output, const ScanShared& shared, const ScanRun& run,
                                            const ScanChannel& channel, const float (&values)[kScanRun]) {
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    if (!channel.present || i >= run.count) continue;
    const int64_t offset = OffsetOf(output.strides, shared.tokens[run.first + i], channel.index);
    StoreAs(output.data, output.dtype, offset, values[i]);
  }
}

// 0 for tokens [begin, end), which no sequence owns.
__device__ __forceinline__ void ClearTokens(const ScanArgs& args, const ScanOutput& output, int64_t begin, int64_t end,
                                            const ScanChannel& channel) {
  if (!channel.present || output.data == nullptr) return;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t offset = token / args.row_tokens * output.strides.row +
                           token % args.row_tokens * output.strides.token + channel.index * output.strides.channel;
    StoreAs(output.data, output.dtype, offset, 0.0f);
  }
}

// delta behind bias and softplus; 0 behind the run, where it leaves states as they are.
__device__ __forceinline__ void LoadSteps(const ScanArgs& args, const ScanShared& shared, const ScanRun& run,
                                          const ScanChannel& channel, float (&steps)[kScanRun]) {
  const float* biases = static_cast<const float*>(args.delta_bias);
  const float bias = biases != nullptr && channel.present ? biases[channel.index] : 0.0f;
  LoadTokens(args.delta, shared, run, channel, steps);
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) {
    const float raw = steps[i] + bias;
    const bool inside = channel.present && i < run.count;
    steps[i] = inside ? (args.softplus ? Softplus(raw) : raw) : 0.0f;
  }
}

// Stages B or C of states [first, first + count) of a run, with zeros behind it; nothing where they are fixed. To be
// followed by a barrier.
__device__ __forceinline__ void StageRows(const ScanArgs& args, const ScanCoefficients& source,
                                          const ScanShared& shared, const ScanRun& run, const ScanChannel& channel,
                                          int64_t first, int count, ScanRows& rows) {
  if (source.fixed) return;
  for (int place = threadIdx.x; place < count * kScanRun; place += kScanThreads) {
    const int state = place % count, i = place / count;
    const ScanToken& token = shared.tokens[run.first + (i < run.count ? i : 0)];
    const int64_t offset = token.row * source.row + token.position * source.token + channel.group * source.group +
                           (first + state) * source.state;
    rows.rows[state][i] = i < run.count ? LoadAs(source.data, source.dtype, offset) : 0.0f;
  }
}

// B or C of one state: staged, or where fixed the same for each token.
__device__ __forceinline__ void ReadRow(const ScanArgs& args, const ScanCoefficients& source, const ScanRows& rows,
                                        const ScanChannel& channel, int64_t first, int state,
                                        float (&values)[kScanRun]) {
  if (source.fixed) {
    const float value = static_cast<const float*>(source.data)[channel.index * args.states + first + state];
#pragma unroll
    for (int i = 0; i < kScanRun; ++i) values[i] = value;
    return;
  }
#pragma unroll
  for (int i = 0; i < kScanRun; ++i) values[i] = rows.rows[state][i];
}

// Calls body(first, count) for each group of staged states, between barriers.
template <class Stage, class Body>
__device__ __forceinline__ void ForStateGroups(const ScanArgs& args, const Stage& stage, const Body& body) {
  for (int64_t first = 0; first < args.states; first += kScanStatesStaged) {
    const int64_t left = args.states - first;
    const int count = left < kScanStatesStaged ? static_cast<int>(left) : kScanStatesStaged;
    __syncthreads();
    stage(first, count);
    __syncthreads();
    body(first, count);
  }
}

// Element (sequence, channel, state) of states [sequences, D, N], or 0 if null.
__device__ __forceinline__ float StateOf(const ScanArgs& args, const void* states, int64_t sequence, int64_t channel,
                                         int64_t state) {
  if (states == nullptr) return 0.0f;
  return static_cast<const float*>(states)[(sequence * args.channels + channel) * args.states + state];
}

__device__ __forceinline__ float RateOf(const ScanArgs& args, const ScanChannel& channel, int64_t state) {
  return channel.present ? static_cast<const float*>(args.A)[channel.index * args.states + state] : 0.0f;
}

}  // namespace packfree
