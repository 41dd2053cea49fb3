// The one place that starts a CUDA kernel. Grids are a line of blocks that stride over their work, so no extent of a
// tensor meets a limit of the grid; nothing waits for the stream. tests/cuda_host runs the same launches on host
// threads.
//
// Figures of speed in this folder are bounds by arithmetic: nothing here has been measured on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// Memory that the threads of a block share: one struct a kernel, so that a host can give it bounds.
#ifndef PACKFREE_SHARED
#define PACKFREE_SHARED(Type, name) __shared__ Type name
#endif

namespace packfree {

// Kernels one after the other on one stream. The first launch that fails stops the rest.
class Launcher {
 public:
  explicit Launcher(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  // `blocks` may be 0: there is nothing to do then.
  template <class... Parameters, class... Arguments>
  void Run(void (*kernel)(Parameters...), int64_t blocks, int threads, const Arguments&... arguments) {
    if (error_ != cudaSuccess || blocks == 0) return;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream_;
    error_ = cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }

  // Null, or the text of the first error.
  const char* error() const { return error_ == cudaSuccess ? nullptr : cudaGetErrorString(error_); }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

// Blocks for `items` of work of which each takes one after the other: `resident` for each multiprocessor, or fewer.
inline int64_t BlocksFor(int64_t items, int resident) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = int64_t{multiprocessors} * resident;
  return items < most ? items : most;
}

// Blocks for kernels of one element a thread.
constexpr int kElementThreads = 256;
inline int64_t ElementBlocks(int64_t elements) {
  return BlocksFor((elements + kElementThreads - 1) / kElementThreads, 8);
}

// This thread's first element of such a kernel, and how far its next one is.
__device__ __forceinline__ int64_t FirstElement() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t ElementStride() { return int64_t{gridDim.x} * blockDim.x; }

}  // namespace packfree
