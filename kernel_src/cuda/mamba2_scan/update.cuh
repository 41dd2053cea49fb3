// For each row p of a head's state:
//   step = softplus(dt_p + dt_bias_p),  state_p = exp(step a_p) state_p + step x_p B,  y_p = state_p . C + D_p x_p.
// A warp has a row, its lanes neighbouring columns. The state is read and written once, 8 bytes a float, beside which
// everything else is small: 4.3 TB/s on an H200 are 5e11 state elements a second.
#pragma once

#include "common/mamba2_scan.h"
#include "cuda/common/elements.cuh"
#include "cuda/common/reduce.cuh"

namespace packfree {

constexpr int kUpdateThreads = 128;

template <class Elem, class State, class Coefficient>
__global__ void __launch_bounds__(kUpdateThreads) StateUpdateKernel(SelectiveStateUpdate args) {
  constexpr int kWarps = kUpdateThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t P = args.head_dim, S = args.state_dim, rows = args.batch * args.heads * P;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const int64_t p = row % P, head = row / P % args.heads, batch = row / P / args.heads;
    const int64_t group = (batch * args.groups + head / (args.heads / args.groups)) * S;
    // Nothing looks at these numbers before: a padding slot gives 0, one past the end NaN, and neither touches a state.
    const int64_t owner = args.state_of == nullptr ? batch : args.state_of[batch];
    if (owner < 0 || owner >= args.num_states) {
      if (lane == 0) static_cast<Elem*>(args.y)[row] = FromFloat<Elem>(owner < 0 ? 0.0f : nanf(""));
      continue;
    }
    State* state =
        static_cast<State*>(args.state) + owner * args.state_batch + head * args.state_head + p * args.state_row;
    const Coefficient* b = static_cast<const Coefficient*>(args.b) + group;
    const Coefficient* c = static_cast<const Coefficient*>(args.c) + group;
    const float* a = static_cast<const float*>(args.a) + head * args.a_head + p * args.a_row;
    float step = static_cast<const float*>(args.dt)[batch * args.dt_batch + head * args.dt_head + p * args.dt_row];
    if (args.dt_bias != nullptr) step += static_cast<const float*>(args.dt_bias)[head * P + p];
    if (args.softplus) step = Softplus(step);
    const float x = ToFloat(static_cast<const Elem*>(args.x)[row]), input = step * x;
    // A decay that all columns share is computed once.
    const bool shared = args.a_column == 0;
    const float decay = shared ? expf(a[0] * step) : 0.0f;
    float y = 0.0f;
    for (int64_t s = lane; s < S; s += 32) {
      const float factor = shared ? decay : expf(a[s * args.a_column] * step);
      const float next = fmaf(factor, ToFloat(state[s]), ToFloat(b[s]) * input);
      state[s] = FromFloat<State>(next);
      y = fmaf(next, ToFloat(c[s]), y);
    }
    y = WarpSum(y);
    if (lane != 0) continue;
    if (args.d != nullptr) y = fmaf(static_cast<const float*>(args.d)[head * P + p], x, y);
    if (args.z != nullptr) {
      const float gate = ToFloat(static_cast<const Elem*>(args.z)[row]);
      y = y * (gate * Sigmoid(gate));
    }
    static_cast<Elem*>(args.y)[row] = FromFloat<Elem>(y);
  }
}

}  // namespace packfree
