// One decode step: shift new tokens into the state and return the outputs there. A thread has one channel of a row.
#pragma once

#include "cuda/causal_conv1d/tokens.cuh"

namespace packfree {

static __global__ void __launch_bounds__(kElementThreads) ConvUpdateKernel(ConvUpdateArgs args, int64_t rows) {
  const int64_t elements = args.batch * args.channels, length = args.state_length;
  const float* weight = static_cast<const float*>(args.weight);
  for (int64_t element = FirstElement(); element < elements; element += ElementStride()) {
    const int64_t batch = element / args.channels, channel = element % args.channels;
    const int64_t x = batch * args.x_strides.row + channel * args.x_strides.channel, y = element * args.tokens;
    const int64_t row = args.state_rows == nullptr ? batch : args.state_rows[batch];
    if (row < 0 || row >= rows) {
      // A padding slot, or a row that is not there.
      const float value = row < 0 ? 0.0f : nanf("");
      for (int64_t t = 0; t < args.tokens; ++t) StoreAs(args.y, args.dtype, y + t, value);
      continue;
    }
    const int64_t state = row * args.state_strides.row + channel * args.state_strides.channel;
    // A plain state keeps its newest token last; a circular one keeps token number p at place p mod length.
    const bool circular = args.cache_seqlens != nullptr;
    const int64_t seen = circular ? (args.cache_seqlens[batch] % length + length) % length : 0;
    const int64_t newest = circular ? (seen + length - 1) % length : length - 1;

    // window[j] is the token j places back: first the ones before the step, then each new token takes place 0.
    float window[kConvMaxWidth];
#pragma unroll
    for (int j = 1; j < kConvMaxWidth; ++j) {
      const int64_t place = (newest - (j - 1) + length) % length;
      window[j - 1] = 0.0f;
      if (j < args.width) window[j - 1] = LoadAs(args.state, args.dtype, state + place * args.state_strides.token);
    }
    for (int64_t t = 0; t < args.tokens; ++t) {
#pragma unroll
      for (int j = kConvMaxWidth - 1; j > 0; --j) window[j] = window[j - 1];
      window[0] = LoadAs(args.x, args.dtype, x + t * args.x_strides.token);
      float z = args.bias == nullptr ? 0.0f : static_cast<const float*>(args.bias)[channel];
#pragma unroll
      for (int j = kConvMaxWidth - 1; j >= 0; --j) {
        if (j < args.width) z = fmaf(weight[(args.width - 1 - j) * args.channels + channel], window[j], z);
      }
      if (args.silu) z = z * Sigmoid(z);
      StoreAs(args.y, args.dtype, y + t, z);
    }
    // A plain state moves on; of a circular one only the places of the new tokens change.
    const int64_t places = circular ? args.tokens : length;
    for (int64_t i = 0; i < places; ++i) {
      const int64_t place = circular ? (seen + i) % length : i, from = circular ? length + i : i + args.tokens;
      const float value = from < length ? LoadAs(args.state, args.dtype, state + from * args.state_strides.token)
                                        : LoadAs(args.x, args.dtype, x + (from - length) * args.x_strides.token);
      StoreAs(args.state, args.dtype, state + place * args.state_strides.token, value);
    }
  }
}

}  // namespace packfree
