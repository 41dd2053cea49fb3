// Sums over lanes of a warp and over partial sums in memory, each in one fixed order.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"

namespace packfree {

constexpr unsigned kAllLanes = 0xffffffffu;

// The sum over a warp's lanes, in every lane.
__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int reach = 16; reach > 0; reach /= 2) value += __shfl_xor_sync(kAllLanes, value, reach);
  return value;
}

// One step of WarpSum16: lanes kReach apart halve the values that each of them keeps.
template <int kReach>
__device__ __forceinline__ void HalveValues(float (&values)[16], int lane) {
  constexpr int kKept = kReach / 2;
  const bool upper = (lane & kReach) != 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float given = __shfl_xor_sync(kAllLanes, upper ? values[i] : values[i + kKept], kReach);
    values[i] = (upper ? values[i + kKept] : values[i]) + given;
  }
}

// Sums of 16 values over a warp's lanes by 16 exchanges, in place of 80. Returns the sum of value number lane / 2.
// Every value is summed by the same tree, so its place makes no difference.
__device__ __forceinline__ float WarpSum16(float (&values)[16], int lane) {
  HalveValues<16>(values, lane);
  HalveValues<8>(values, lane);
  HalveValues<4>(values, lane);
  HalveValues<2>(values, lane);
  return values[0] + __shfl_xor_sync(kAllLanes, values[0], 1);
}

// Partial sums [groups, all_rows, columns] of which rows [first, first + rows) are wanted.
struct Partials {
  const float* data;
  int64_t groups, all_rows, columns;
};

// target [columns, rows] = the sums over the groups in order, kept in double.
static __global__ void __launch_bounds__(kElementThreads)
    ReduceKernel(Partials partials, int64_t first, int64_t rows, float* target) {
  const int64_t elements = rows * partials.columns;
  for (int64_t element = FirstElement(); element < elements; element += ElementStride()) {
    const int64_t row = element / partials.columns, column = element % partials.columns;
    double sum = 0;
    for (int64_t group = 0; group < partials.groups; ++group) {
      sum += partials.data[(group * partials.all_rows + first + row) * partials.columns + column];
    }
    target[column * rows + row] = static_cast<float>(sum);
  }
}

// The same, unless `target` is null.
inline void RunReduce(Launcher& launcher, const Partials& partials, int64_t first, int64_t rows, void* target) {
  if (target == nullptr) return;
  launcher.Run(&ReduceKernel, ElementBlocks(rows * partials.columns), kElementThreads, partials, first, rows,
               static_cast<float*>(target));
}

}  // namespace packfree
