// Forward of the causal convolution. A thread runs through its tokens with the filter in registers; x is read once from
// memory (and a few tokens at the seams of tiles again, from a cache) and y written once: with 16-bit elements 4 bytes
// a token and channel and 4 more a token for its owner, so memory bounds it: 4.3 TB/s on an H200 are 1.1e12 outputs a
// second. What a token's output is made of does not depend on where tiles begin.
#pragma once

#include "cuda/causal_conv1d/tokens.cuh"

namespace packfree {

// Blocks of a multiprocessor that are resident at once: they stride over the rest.
constexpr int kConvForwardResident = 5;

template <int kWidth>
constexpr int kConvForwardRun = kWidth > 4 ? 4 : 8;  // tokens of a run

template <class Elem, int kWidth, bool kChannelsLast>
__global__ void __launch_bounds__(kConvThreads, kConvForwardResident)
    ConvForwardKernel(ConvForwardArgs args, const int32_t* owners, ConvElements<Elem> x, ConvElements<Elem> y) {
  using Shape = ConvShape<kChannelsLast>;
  constexpr int kChannels = Shape::kChannels, kRun = kConvForwardRun<kWidth>;
  for (int64_t item = blockIdx.x; item < ConvItems(args); item += gridDim.x) {
    const ConvPlace<kChannelsLast> place(args, item);
    const ConvFilter<kWidth, kChannels> filter(args, place.channel, place.channels);
    ConvReader<Elem, kWidth, kChannelsLast, kRun> reader(args, place, x);
    const int64_t origin = place.row * args.y_strides.row + place.channel * args.y_strides.channel;
    for (int begin = 0; begin < Shape::kTokens; begin += kRun) {
      const int64_t first = place.first + int64_t{begin} * Shape::kStep;
      if (first >= args.row_tokens) break;
      reader.Start(first);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int64_t token = first + i * Shape::kStep;
        const ConvOwner owner(args, owners, place.row, token);
        float taps[kWidth][kChannels], z[kChannels];
        reader.Next(i, token, owner, taps);
#pragma unroll
        for (int v = 0; v < kChannels; ++v) {
          z[v] = filter.Convolve(taps, v);
          if (args.silu) z[v] = z[v] * Sigmoid(z[v]);
          if (owner.sequence < 0) z[v] = 0.0f;
        }
        if (token < args.row_tokens) y.Store(origin + token * args.y_strides.token, place.channels, z);
      }
    }
  }
}

// State after each sequence's last token: its last W - 1 tokens, older ones from the initial state.
static __global__ void __launch_bounds__(kElementThreads) ConvFinalStateKernel(ConvForwardArgs args) {
  const int64_t elements = args.packing.num_sequences * args.channels, length = args.width - 1;
  for (int64_t element = FirstElement(); element < elements; element += ElementStride()) {
    const int64_t sequence = element / args.channels, channel = element % args.channels;
    const Bounds bounds = BoundsOf(args.packing, sequence);
    for (int64_t i = 0; i < length; ++i) {
      const int64_t token = bounds.eos - length + i;
      float value;
      if (token >= bounds.bos) {
        const int64_t row = token / args.row_tokens, in_row = token % args.row_tokens;
        value = LoadAs(args.x, args.dtype,
                       row * args.x_strides.row + in_row * args.x_strides.token + channel * args.x_strides.channel);
      } else {
        value = StateBefore(args, sequence, channel, bounds.bos - token);
      }
      StoreAs(args.final_state, args.dtype, element * length + i, value);
    }
  }
}

}  // namespace packfree
