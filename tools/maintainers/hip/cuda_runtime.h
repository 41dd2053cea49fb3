// What the kernels of kernel_src/cuda/ use of CUDA, in HIP's words: tools/maintainers/hip_check.py compiles them for
// AMD GPUs, and tests/cuda_host runs them on a host in waves of 64 lanes and of 32. Never run on a GPU.
//
// Their warp is 32 neighbouring lanes. A wave of an AMD GPU has 32 or 64, and HIP's exchanges take a width; whole warps
// exchange and nothing else does, so the two halves of a wave of 64 need not know of each other.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#define __CUDACC__  // by which kernel_src/common/device.h knows a compiler for a GPU

// HIP would read the blocks of a multiprocessor, the second number, as the waves of a SIMD, and spill registers.
#undef __launch_bounds__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))

using cudaStream_t = hipStream_t;
using cudaError_t = hipError_t;
constexpr hipError_t cudaSuccess = hipSuccess;
constexpr hipDeviceAttribute_t cudaDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline const char* cudaGetErrorString(cudaError_t error) { return hipGetErrorString(error); }
inline cudaError_t cudaGetDevice(int* device) { return hipGetDevice(device); }
inline cudaError_t cudaDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  return hipDeviceGetAttribute(value, attribute, device);
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  hipLaunchKernelGGL(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, arguments...);
  return hipGetLastError();
}

template <class Value>
__device__ __forceinline__ Value __shfl_sync(unsigned, Value value, int source) {
  return __shfl(value, source, 32);
}
template <class Value>
__device__ __forceinline__ Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return __shfl_xor(value, mask, 32);
}
