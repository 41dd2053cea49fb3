// What the kernels of kernel_src/cuda/ use of CUDA, on host threads: see engine.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "engine.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define PACKFREE_SHARED(Type, name) Type& name = *static_cast<Type*>(cuda_host::lane->block->Shared(sizeof(Type)))

// Objects, because cudaLaunchConfig_t has members of these names.
template <cuda_host::Index& (*kIndex)()>
struct cuda_host_index {
  struct Extent {
    operator unsigned() const { return kIndex().x; }
  } x;
};
inline constexpr cuda_host_index<cuda_host::ThreadIndex> threadIdx{};
inline constexpr cuda_host_index<cuda_host::BlockIndex> blockIdx{};
inline constexpr cuda_host_index<cuda_host::BlockExtent> blockDim{};
inline constexpr cuda_host_index<cuda_host::GridExtent> gridDim{};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = struct cuda_host_stream*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// One multiprocessor: grids are small, and blocks stride over several items of work.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x == 0 || config->blockDim.x > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  cuda_host::RunGrid(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
  return cudaSuccess;
}

inline void __syncthreads() {
  if (cuda_host::lane->barriers++ != cuda_host::faults.skipped_barrier) cuda_host::lane->block->all.Wait();
}

template <class Value>
Value cuda_host_exchange(Value value, unsigned source) {
  cuda_host::Warp& warp = cuda_host::lane->block->warps[threadIdx.x / 32];
  static_assert(sizeof(Value) <= sizeof(warp.slots[0]));
  std::memcpy(&warp.slots[threadIdx.x % 32], &value, sizeof(Value));
  warp.barrier.Wait();
  std::memcpy(&value, &warp.slots[source % 32], sizeof(Value));
  warp.barrier.Wait();
  return value;
}
// Whole warps only, as in the kernels.
template <class Value>
Value __shfl_sync(unsigned, Value value, int source) {
  return cuda_host_exchange(value, static_cast<unsigned>(source));
}
template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return cuda_host_exchange(value, threadIdx.x % 32 ^ static_cast<unsigned>(mask));
}
