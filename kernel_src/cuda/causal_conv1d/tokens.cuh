// How a block's threads lie over tokens and channels, and what a thread reads there.
//
// One text serves both memory orders of x: the lanes of a warp run along whichever axis is contiguous. Channels last, a
// lane has two neighbouring channels and runs through 32 tokens, and the block's four warps take 128 tokens of 64
// channels. Else a lane has every 32nd token of one channel, and the block takes 256 tokens of four channels.
#pragma once

#include "common/causal_conv1d.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/sequences.cuh"

namespace packfree {

constexpr int kConvWarps = 4;
constexpr int kConvThreads = 32 * kConvWarps;

template <bool kChannelsLast>
struct ConvShape {
  static constexpr int kChannels = kChannelsLast ? 2 : 1;  // of a lane
  static constexpr int kStep = kChannelsLast ? 1 : 32;     // from one of its tokens to the next
  static constexpr int kTokens = kChannelsLast ? 32 : 8;   // of a lane
  static constexpr int kTileTokens = kChannelsLast ? kTokens * kConvWarps : kTokens * kStep;
  static constexpr int kTileChannels = kChannelsLast ? 32 * kChannels : kConvWarps;
};

// Tiles never cross a row.
__host__ __device__ __forceinline__ int64_t ConvRowTiles(int64_t row_tokens, bool channels_last) {
  const int64_t tokens = channels_last ? ConvShape<true>::kTileTokens : ConvShape<false>::kTileTokens;
  return (row_tokens + tokens - 1) / tokens;
}
__host__ __device__ __forceinline__ int64_t ConvChannelTiles(const ConvArgs& args) {
  const int64_t channels = args.channels_last ? ConvShape<true>::kTileChannels : ConvShape<false>::kTileChannels;
  return (args.channels + channels - 1) / channels;
}
__host__ __device__ __forceinline__ int64_t ConvItems(const ConvArgs& args) {
  if (args.row_tokens == 0) return 0;
  return args.packing.tokens / args.row_tokens * ConvRowTiles(args.row_tokens, args.channels_last) *
         ConvChannelTiles(args);
}

// Where the calling thread stands in work item `item`.
template <bool kChannelsLast>
struct ConvPlace {
  using Shape = ConvShape<kChannelsLast>;
  int64_t tile, row, first, channel;  // first: the lane's first token in the row
  int channels;                       // of the lane, 0 to Shape::kChannels

  __device__ __forceinline__ ConvPlace(const ConvArgs& args, int64_t item) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t columns = ConvChannelTiles(args), row_tiles = ConvRowTiles(args.row_tokens, kChannelsLast);
    tile = item / columns;
    row = tile / row_tiles;
    first = tile % row_tiles * Shape::kTileTokens + (kChannelsLast ? warp * Shape::kTokens : lane);
    channel = item % columns * Shape::kTileChannels + (kChannelsLast ? lane * Shape::kChannels : warp);
    const int64_t left = args.channels - channel;
    channels = left < 0 ? 0 : left < Shape::kChannels ? static_cast<int>(left) : Shape::kChannels;
  }
};

// The sequence of a token of a row; bos and eos are counted in the row, and no sequence reaches out of it.
struct ConvOwner {
  int32_t sequence;  // -1: padding, or past the row
  int64_t bos, eos;

  __device__ __forceinline__ ConvOwner(const ConvArgs& args, const int32_t* owners, int64_t row, int64_t token)
      : sequence(-1), bos(0), eos(0) {
    if (token >= args.row_tokens) return;
    const int64_t origin = row * args.row_tokens;
    sequence = owners[origin + token];
    if (sequence < 0) return;
    const Bounds bounds = BoundsOf(args.packing, sequence);
    bos = bounds.bos < origin ? 0 : bounds.bos - origin;
    eos = bounds.eos - origin < args.row_tokens ? bounds.eos - origin : args.row_tokens;
  }
};

// The value `back` tokens before a sequence's first, from its initial state.
__device__ __forceinline__ float StateBefore(const ConvArgs& args, int64_t sequence, int64_t channel, int64_t back) {
  const int64_t length = args.width - 1;
  if (args.initial_state == nullptr || back > length) return 0.0f;
  return static_cast<const float*>(args.initial_state)[(sequence * args.channels + channel) * length + length - back];
}

// Elements of a dtype known when a kernel is compiled: two neighbouring channels move at once where they may.
template <class Elem>
struct ConvElements {
  struct alignas(2 * sizeof(Elem)) Pair {
    Elem x, y;
  };
  Elem* data;
  bool pairs;

  ConvElements(const void* from, Dtype, const ConvStrides& strides)
      : data(static_cast<Elem*>(const_cast<void*>(from))),
        pairs(reinterpret_cast<uintptr_t>(from) % sizeof(Pair) == 0 && strides.row % 2 == 0 && strides.token % 2 == 0) {
  }

  // `count` neighbouring channels from an offset on; 0 for the rest.
  template <int kChannels>
  __device__ __forceinline__ void Load(int64_t offset, int count, float (&values)[kChannels]) const {
    if constexpr (kChannels == 2) {
      if (pairs && count == 2) {
        const Pair pair = *reinterpret_cast<const Pair*>(data + offset);
        values[0] = ToFloat(pair.x);
        values[1] = ToFloat(pair.y);
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < kChannels; ++v) values[v] = v < count ? ToFloat(data[offset + v]) : 0.0f;
  }
  template <int kChannels>
  __device__ __forceinline__ void Store(int64_t offset, int count, const float (&values)[kChannels]) const {
    if constexpr (kChannels == 2) {
      if (pairs && count == 2) {
        *reinterpret_cast<Pair*>(data + offset) = {FromFloat<Elem>(values[0]), FromFloat<Elem>(values[1])};
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < kChannels; ++v) {
      if (v < count) data[offset + v] = FromFloat<Elem>(values[v]);
    }
  }
};

// Elements of any dtype: for the forms that are rare, so that there are few kernels.
struct AnyElement {};
template <>
struct ConvElements<AnyElement> {
  void* data;
  Dtype dtype;

  ConvElements(const void* from, Dtype dtype_, const ConvStrides&) : data(const_cast<void*>(from)), dtype(dtype_) {}

  template <int kChannels>
  __device__ __forceinline__ void Load(int64_t offset, int count, float (&values)[kChannels]) const {
#pragma unroll
    for (int v = 0; v < kChannels; ++v) values[v] = v < count ? LoadAs(data, dtype, offset + v) : 0.0f;
  }
  template <int kChannels>
  __device__ __forceinline__ void Store(int64_t offset, int count, const float (&values)[kChannels]) const {
#pragma unroll
    for (int v = 0; v < kChannels; ++v) {
      if (v < count) StoreAs(data, dtype, offset + v, values[v]);
    }
  }
};

// A lane's filter. Widths up to kWidth run as kWidth with taps of 0.
template <int kWidth, int kChannels>
struct ConvFilter {
  float tap[kWidth][kChannels];  // tap[j] multiplies the token j places back
  float bias[kChannels];

  __device__ __forceinline__ ConvFilter(const ConvArgs& args, int64_t channel, int channels) {
    const float* weight = static_cast<const float*>(args.weight) + channel;
    const float* offset = static_cast<const float*>(args.bias);
#pragma unroll
    for (int v = 0; v < kChannels; ++v) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        tap[j][v] = v < channels && j < args.width ? weight[(args.width - 1 - j) * args.channels + v] : 0.0f;
      }
      bias[v] = v < channels && offset != nullptr ? offset[channel + v] : 0.0f;
    }
  }

  // z[t] = bias + sum over j of tap[j] x[t - j], from the oldest token on
  __device__ __forceinline__ float Convolve(const float (&taps)[kWidth][kChannels], int v) const {
    float z = bias[v];
#pragma unroll
    for (int j = kWidth - 1; j >= 0; --j) z = fmaf(tap[j][v], taps[j][v], z);
    return z;
  }
};

// Reads a lane's tokens one after the other, each with the kWidth - 1 before it.
// kRun tokens are read at once, so that their loads are in flight together.
template <class Elem, int kWidth, bool kChannelsLast, int kRun>
class ConvReader {
 public:
  using Shape = ConvShape<kChannelsLast>;
  static constexpr int kChannels = Shape::kChannels;

  __device__ __forceinline__ ConvReader(const ConvArgs& args, const ConvPlace<kChannelsLast>& place,
                                        const ConvElements<Elem>& x)
      : args_(args),
        place_(place),
        x_(x),
        origin_(place.row * args.x_strides.row + place.channel * args.x_strides.channel) {}

  // Loads a run of tokens `token`, `token` + kStep, ...
  __device__ __forceinline__ void Start(int64_t token) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) Load(token + i * Shape::kStep, fresh_[i]);
    if constexpr (kChannelsLast) {
#pragma unroll
      for (int j = 0; j < kWidth - 1; ++j) Load(token - 1 - j, window_[j]);
    }
  }

  // Token i of the run, to be asked for in order: taps[j] is the value j places back, from the sequence or its state.
  __device__ __forceinline__ void Next(int i, int64_t token, const ConvOwner& owner, float (&taps)[kWidth][kChannels]) {
#pragma unroll
    for (int j = kWidth - 1; j > 0; --j) {
      if constexpr (kChannelsLast) {
        Copy(window_[j - 1], window_[j]);
      } else if (owner.sequence >= 0 && j < args_.width) {
        Load(token - j, window_[j]);
      }
    }
    Copy(fresh_[i], window_[0]);
    // Behind the filter nothing is seen, not even times 0: it may be infinite.
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int v = 0; v < kChannels; ++v) taps[j][v] = j < args_.width ? window_[j][v] : 0.0f;
    }
    const int64_t since = token - owner.bos;
    if (owner.sequence < 0 || since >= kWidth - 1) return;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int v = 0; v < kChannels; ++v) {
        if (j <= since) continue;
        const bool present = v < place_.channels;
        taps[j][v] = present ? StateBefore(args_, owner.sequence, place_.channel + v, j - since) : 0.0f;
      }
    }
  }

 private:
  __device__ __forceinline__ void Load(int64_t token, float (&values)[kChannels]) const {
    const bool inside = token >= 0 && token < args_.row_tokens;
    x_.Load(origin_ + (inside ? token : 0) * args_.x_strides.token, inside ? place_.channels : 0, values);
  }
  static __device__ __forceinline__ void Copy(const float (&from)[kChannels], float (&to)[kChannels]) {
#pragma unroll
    for (int v = 0; v < kChannels; ++v) to[v] = from[v];
  }

  const ConvArgs& args_;
  const ConvPlace<kChannelsLast>& place_;
  const ConvElements<Elem>& x_;
  int64_t origin_;
  float fresh_[kRun][kChannels];
  float window_[kWidth][kChannels];
};

}  // namespace packfree
