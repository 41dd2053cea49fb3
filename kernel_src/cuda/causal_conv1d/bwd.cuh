// Backward of the causal convolution, in the order of fwd.cuh. z is recomputed from x. With dz = dy silu'(z):
//   dx[t] = sum over j of tap[j] dz[t + j],   dtap[j] = sum over t of dz[t] x[t - j],   dbias = sum over t of dz[t].
// Reads x and dy and writes dx: 6 bytes a token and channel with 16-bit elements, and a partial sum of the parameter
// gradients for each tile. A lane goes from its last tokens to its first, so that dz of the tokens behind is at hand.
#pragma once

#include "cuda/causal_conv1d/tokens.cuh"
#include "cuda/common/reduce.cuh"

namespace packfree {

// Tokens of a run: few, because their loads are two and the filter's gradient takes registers.
template <int kWidth>
constexpr int kConvBackwardRun = kWidth > 4 ? 2 : 4;

// Blocks of a multiprocessor that are resident at once: they stride over the rest.
constexpr int kConvBackwardResident = 4;

struct ConvSums {
  float rows[kConvWarps][kConvMaxWidth + 1][ConvShape<true>::kTileChannels];
};

// A lane's sums for its channels' parameter gradients.
template <int kWidth, int kChannels>
struct ConvFilterGradient {
  float tap[kWidth][kChannels] = {};
  float bias[kChannels] = {};
};

// This tile's partial sums: rows as in ConvBackwardArgs::partials.
template <int kWidth, bool kChannelsLast>
__device__ __forceinline__ void StorePartials(const ConvBackwardArgs& args, const ConvPlace<kChannelsLast>& place,
                                              ConvFilterGradient<kWidth, ConvShape<kChannelsLast>::kChannels>& gradient,
                                              ConvSums& sums) {
  using Shape = ConvShape<kChannelsLast>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t rows = args.width + 1;
  float* partials = static_cast<float*>(args.partials) + place.tile * rows * args.channels;
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) {
    if (j < kWidth && j >= args.width) continue;
    // Row k holds the tap W - 1 - k places back; the bias comes last.
    const int64_t row = j < kWidth ? args.width - 1 - j : args.width;
    float(&own)[Shape::kChannels] = j < kWidth ? gradient.tap[j < kWidth ? j : 0] : gradient.bias;
    if constexpr (kChannelsLast) {
#pragma unroll
      for (int v = 0; v < Shape::kChannels; ++v) sums.rows[warp][row][lane * Shape::kChannels + v] = own[v];
    } else {
      const float sum = WarpSum(own[0]);
      if (lane == 0 && place.channels > 0) partials[row * args.channels + place.channel] = sum;
    }
  }
  if constexpr (kChannelsLast) {
    __syncthreads();
    const int64_t first = place.channel - lane * Shape::kChannels;
    for (int64_t i = threadIdx.x; i < rows * Shape::kTileChannels; i += kConvThreads) {
      const int64_t row = i / Shape::kTileChannels, column = i % Shape::kTileChannels;
      float sum = sums.rows[0][row][column];
      for (int w = 1; w < kConvWarps; ++w) sum += sums.rows[w][row][column];
      if (first + column < args.channels) partials[row * args.channels + first + column] = sum;
    }
    __syncthreads();
  }
}

template <class Elem, int kWidth, bool kChannelsLast>
__global__ void __launch_bounds__(kConvThreads, kConvBackwardResident)
    ConvBackwardKernel(ConvBackwardArgs args, const int32_t* owners, ConvElements<Elem> x, ConvElements<Elem> dy,
                       ConvElements<Elem> dx) {
  using Shape = ConvShape<kChannelsLast>;
  constexpr int kChannels = Shape::kChannels;
  // Tokens behind a run whose dz reaches into it; a step of the lanes covers more than that.
  constexpr int kBehind = kChannelsLast ? kWidth - 1 : 1;
  constexpr int kRun = kConvBackwardRun<kWidth>;
  PACKFREE_SHARED(ConvSums, sums);
  for (int64_t item = blockIdx.x; item < ConvItems(args); item += gridDim.x) {
    const ConvPlace<kChannelsLast> place(args, item);
    const ConvFilter<kWidth, kChannels> filter(args, place.channel, place.channels);
    ConvFilterGradient<kWidth, kChannels> gradient;
    ConvReader<Elem, kWidth, kChannelsLast, kRun> reader(args, place, x);
    const int64_t origin_dy = place.row * args.dy_strides.row + place.channel * args.dy_strides.channel;
    const int64_t origin_dx = place.row * args.dx_strides.row + place.channel * args.dx_strides.channel;

    // dz of token i of a run. Its part in the parameter gradients counts in the tile that owns the token.
    const auto token_gradient = [&](int i, int64_t token, bool owned, float(&dz)[kChannels]) {
      const ConvOwner owner(args, owners, place.row, token);
      float taps[kWidth][kChannels];
      reader.Next(i, token, owner, taps);
      const bool live = owner.sequence >= 0;
      dy.Load(origin_dy + (live ? token : 0) * args.dy_strides.token, live ? place.channels : 0, dz);
#pragma unroll
      for (int v = 0; v < kChannels; ++v) {
        if (!live || v >= place.channels) continue;
        if (args.silu) dz[v] = dz[v] * SiluSlope(filter.Convolve(taps, v));
        if (!owned) continue;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) gradient.tap[j][v] = fmaf(dz[v], taps[j][v], gradient.tap[j][v]);
        gradient.bias[v] += dz[v];
      }
    };

    float dz[kRun + kBehind][kChannels] = {};
    // The first runs lie behind the lane's own tokens.
    for (int begin = Shape::kTokens + (kBehind - 1) / kRun * kRun; begin >= 0; begin -= kRun) {
#pragma unroll
      for (int i = kBehind - 1; i >= 0; --i) {
#pragma unroll
        for (int v = 0; v < kChannels; ++v) dz[kRun + i][v] = dz[i][v];
      }
      const int64_t first = place.first + int64_t{begin} * Shape::kStep;
      const bool owned = begin < Shape::kTokens;
      reader.Start(first);
#pragma unroll
      for (int i = 0; i < kRun; ++i) token_gradient(i, first + i * Shape::kStep, owned, dz[i]);
      if (!owned) continue;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int64_t token = first + i * Shape::kStep;
        const ConvOwner owner(args, owners, place.row, token);
        // The last W - 1 tokens of a sequence are also its final state.
        const int64_t place_in_state = token - (owner.eos - (args.width - 1));
        float sum[kChannels] = {};
        if (owner.sequence >= 0 && args.dfinal_state != nullptr && place_in_state >= 0) {
          const float* dfinal = static_cast<const float*>(args.dfinal_state) + place_in_state;
#pragma unroll
          for (int v = 0; v < kChannels; ++v) {
            if (v < place.channels) {
              sum[v] = dfinal[(owner.sequence * args.channels + place.channel + v) * (args.width - 1)];
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
#pragma unroll
          for (int v = 0; v < kChannels; ++v) {
            float later;
            if constexpr (kChannelsLast) {
              later = dz[i + j][v];
            } else {
              // Lane l's token j places on is lane l + j's, or of the next step.
              const int lane = threadIdx.x % 32;
              later = __shfl_sync(kAllLanes, lane < j ? dz[i + 1][v] : dz[i][v], (lane + j) % 32);
            }
            if (token + j < owner.eos) sum[v] = fmaf(filter.tap[j][v], later, sum[v]);
          }
        }
        if (token < args.row_tokens) dx.Store(origin_dx + token * args.dx_strides.token, place.channels, sum);
      }
    }
    StorePartials<kWidth, kChannelsLast>(args, place, gradient, sums);
  }
}

// Gradient of each initial state: it stands W - 1 tokens before its sequence, and in a shorter sequence some of it is
// the final state too.
static __global__ void __launch_bounds__(kElementThreads) ConvStateGradientKernel(ConvBackwardArgs args) {
  const int64_t elements = args.packing.num_sequences * args.channels;
  const int length = args.width - 1;
  const float* weight = static_cast<const float*>(args.weight);
  const float* bias = static_cast<const float*>(args.bias);
  const float* dfinal = static_cast<const float*>(args.dfinal_state);
  for (int64_t element = FirstElement(); element < elements; element += ElementStride()) {
    const int64_t sequence = element / args.channels, channel = element % args.channels;
    const Bounds bounds = BoundsOf(args.packing, sequence);
    const int64_t tokens = bounds.eos - bounds.bos;
    const int64_t row = args.row_tokens == 0 ? 0 : bounds.bos / args.row_tokens;
    const int64_t bos = bounds.bos - row * args.row_tokens;
    const int64_t x = row * args.x_strides.row + channel * args.x_strides.channel;
    const int64_t dy = row * args.dy_strides.row + channel * args.dy_strides.channel;
    float dz[kConvMaxWidth - 1];
#pragma unroll
    for (int t = 0; t < kConvMaxWidth - 1; ++t) {
      dz[t] = 0.0f;
      if (t >= tokens || t >= length || bos + t >= args.row_tokens) continue;
      float z = bias == nullptr ? 0.0f : bias[channel];
      for (int j = length; j >= 0; --j) {
        const float value = j <= t ? LoadAs(args.x, args.dtype, x + (bos + t - j) * args.x_strides.token)
                                   : StateBefore(args, sequence, channel, j - t);
        z = fmaf(weight[(length - j) * args.channels + channel], value, z);
      }
      dz[t] = LoadAs(args.dy, args.dtype, dy + (bos + t) * args.dy_strides.token);
      if (args.silu) dz[t] = dz[t] * SiluSlope(z);
    }
    float* out = static_cast<float*>(args.dinitial_state) + element * length;
    for (int i = 0; i < length; ++i) {
      float sum = dfinal != nullptr && i >= tokens ? dfinal[element * length + i - tokens] : 0.0f;
#pragma unroll
      for (int t = 0; t < kConvMaxWidth - 1; ++t) {
        // State entry i lies length - i + t places before token t.
        const int j = length - i + t;
        if (t < tokens && j <= length) sum = fmaf(weight[(length - j) * args.channels + channel], dz[t], sum);
      }
      out[i] = sum;
    }
  }
}

}  // namespace packfree
