// What the engine makes of lanes, barriers and kernels that take them for something else;
// tests/cuda/test_cuda_waves.py.
//
//     waves WAVE update | halves | left | outside | barriers | width
//
// Prints one number a line.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/common/reduce.cuh"
#include "cuda/mamba2_scan/mamba2_scan.h"
#include "engine.h"

namespace packfree {
namespace {

// The kernel itself: y of 5 rows of 70 states that are 0 before, so that each is dt x times the sum of B C.
std::vector<float> Update() {
  constexpr int64_t kRows = 5, kStates = 70;
  std::vector<float> state(kRows * kStates), x(kRows, 1.0f), dt(kRows, 0.5f), a(kRows * kStates, -1.0f), y(kRows);
  std::vector<float> b(kStates), c(kStates, 1.0f);
  for (int64_t s = 0; s < kStates; ++s) b[s] = static_cast<float>(s);
  SelectiveStateUpdate args{};
  args.dtype = Dtype::kFloat32;
  args.batch = args.heads = args.groups = args.num_states = 1;
  args.head_dim = kRows;
  args.state_dim = kStates;
  args.state = state.data();
  args.state_batch = args.state_head = kRows * kStates;
  args.state_row = kStates;
  args.wide_state = args.wide_coefficients = true;
  args.x = x.data();
  args.b = b.data();
  args.c = c.data();
  args.dt = dt.data();
  args.dt_row = 1;
  args.a = a.data();
  args.a_row = kStates;
  args.a_column = 1;
  args.y = y.data();
  if (SelectiveStateUpdateCuda(args, nullptr) != nullptr) std::abort();
  return y;
}

// What a kernel of one block of 64 threads leaves for each.
std::vector<float> Run(void (*kernel)(float*)) {
  std::vector<float> out(64);
  Launcher launcher(nullptr);
  launcher.Run(kernel, 1, 64, out.data());
  return out;
}

// Each lane reads its right neighbour in its warp.
__global__ void Halves(float* out) {
  const int lane = threadIdx.x % 32;
  out[threadIdx.x] = __shfl_sync(kAllLanes, static_cast<float>(threadIdx.x), (lane + 1) % 32);
}

// The same, but the last lanes of each warp have left.
__global__ void Left(float* out) {
  const int lane = threadIdx.x % 32;
  if (lane >= 30) return;
  out[threadIdx.x] = __shfl_sync(kAllLanes, static_cast<float>(threadIdx.x), (lane + 1) % 32);
}

// The same, past the end of the warp.
__global__ void Outside(float* out) {
  const int lane = threadIdx.x % 32;
  out[threadIdx.x] = __shfl_sync(kAllLanes, static_cast<float>(threadIdx.x), lane + 1);
}

// Two barriers that a GPU of AMD's would take for one.
__global__ void Barriers(float* out) {
  if (threadIdx.x < 32) {
    out[threadIdx.x] = 1;
    __syncthreads();
  } else {
    __syncthreads();
    out[threadIdx.x] = out[threadIdx.x - 32];
  }
}

__global__ void Width(float* out) { out[threadIdx.x] = static_cast<float>(warpSize); }

}  // namespace
}  // namespace packfree

int main(int, char** arguments) {
  using namespace packfree;
  cuda_host::wave_lanes = std::atoi(arguments[1]);
  const std::string what = arguments[2];
  const std::vector<float> numbers = what == "update"     ? Update()
                                     : what == "halves"   ? Run(&Halves)
                                     : what == "left"     ? Run(&Left)
                                     : what == "outside"  ? Run(&Outside)
                                     : what == "barriers" ? Run(&Barriers)
                                                          : Run(&Width);
  for (float number : numbers) std::printf("%g\n", number);
}
