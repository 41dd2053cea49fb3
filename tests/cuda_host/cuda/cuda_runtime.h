// What the kernels of kernel_src/cuda/ use of CUDA, on host threads: see engine.h.
#pragma once

#include "threads.h"

#define __launch_bounds__(...)

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
  return cuda_host_launch(kernel, config->gridDim, config->blockDim, arguments...) ? cudaSuccess
                                                                                   : cudaErrorInvalidConfiguration;
}

// Of all lanes of a warp, as the masks of the kernels say.
template <class Value>
__forceinline__ Value __shfl_sync(unsigned, Value value, int source) {
  return cuda_host_exchange(value, static_cast<unsigned>(source) % 32, true);
}
template <class Value>
__forceinline__ Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return cuda_host_exchange(value, (threadIdx.x ^ static_cast<unsigned>(mask)) % 32, true);
}
