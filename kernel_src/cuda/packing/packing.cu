#include "cuda/packing/packing.h"

#include <cuda_runtime.h>

namespace packfree {

struct CudaBlock {
  int64_t index;

  template <class Step>
  __device__ __forceinline__ void ForEachThread(const Step& step) const {
    step(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

template <class Int>
__global__ void __launch_bounds__(kBoundaryThreads)
    CountKernel(Marks<Int> marks, int64_t tokens, BoundaryCount* counts) {
  __shared__ BoundaryScratch scratch;
  CountBoundaries(CudaBlock{blockIdx.x}, marks, tokens, counts, scratch);
}

template <class Int>
__global__ void __launch_bounds__(kBoundaryThreads)
    PlaceKernel(Marks<Int> marks, int64_t tokens, bool clip, const BoundaryCount* counts, int32_t* offsets) {
  __shared__ BoundaryScratch scratch;
  PlaceBoundaries(CudaBlock{blockIdx.x}, marks, tokens, gridDim.x, clip, counts, offsets, scratch);
}

template <class Int>
__global__ void __launch_bounds__(kBoundaryThreads)
    BoundKernel(const Int* values, int64_t size, int64_t tokens, int32_t* offsets) {
  const int64_t n = int64_t{blockIdx.x} * kBoundaryThreads + threadIdx.x;
  if (n < size) offsets[n] = BoundedOffset(values[n], tokens);
}

static const char* LaunchError() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class Int>
static const char* LaunchBoundaries(const BoundarySource& source, BoundaryCount* counts, int32_t* offsets,
                                    cudaStream_t stream) {
  const Marks<Int> marks{static_cast<const Int*>(source.values), source.length, source.rule};
  const unsigned tiles = static_cast<unsigned>(source.tiles());
  CountKernel<Int><<<tiles, kBoundaryThreads, 0, stream>>>(marks, source.tokens, counts);
  PlaceKernel<Int><<<tiles, kBoundaryThreads, 0, stream>>>(marks, source.tokens, source.clip, counts, offsets);
  return LaunchError();
}

const char* boundaries_cuda(const BoundarySource& source, BoundaryCount* counts, int32_t* offsets, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  return source.wide ? LaunchBoundaries<int64_t>(source, counts, offsets, queue)
                     : LaunchBoundaries<int32_t>(source, counts, offsets, queue);
}

const char* bound_offsets_cuda(const void* values, bool wide, int64_t size, int64_t tokens, int32_t* offsets,
                               void* stream) {
  if (size == 0) return nullptr;
  const auto queue = static_cast<cudaStream_t>(stream);
  const unsigned blocks = static_cast<unsigned>((size + kBoundaryThreads - 1) / kBoundaryThreads);
  if (wide) {
    BoundKernel<<<blocks, kBoundaryThreads, 0, queue>>>(static_cast<const int64_t*>(values), size, tokens, offsets);
  } else {
    BoundKernel<<<blocks, kBoundaryThreads, 0, queue>>>(static_cast<const int32_t*>(values), size, tokens, offsets);
  }
  return LaunchError();
}

}  // namespace packfree
