#include "cuda/packing/packing.h"

#include "cuda/common/launch.cuh"

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
  PACKFREE_SHARED(BoundaryScratch, scratch);
  CountBoundaries(CudaBlock{blockIdx.x}, marks, tokens, counts, scratch);
}

template <class Int>
__global__ void __launch_bounds__(kBoundaryThreads)
    PlaceKernel(Marks<Int> marks, int64_t tokens, bool clip, const BoundaryCount* counts, int32_t* offsets) {
  PACKFREE_SHARED(BoundaryScratch, scratch);
  PlaceBoundaries(CudaBlock{blockIdx.x}, marks, tokens, gridDim.x, clip, counts, offsets, scratch);
}

template <class Int>
__global__ void __launch_bounds__(kBoundaryThreads)
    BoundKernel(const Int* values, int64_t size, int64_t tokens, int32_t* offsets) {
  const int64_t n = int64_t{blockIdx.x} * kBoundaryThreads + threadIdx.x;
  if (n < size) offsets[n] = BoundedOffset(values[n], n, tokens);
}

template <class Int>
static void RunBoundaries(Launcher& launcher, const BoundarySource& source, BoundaryCount* counts, int32_t* offsets) {
  const Marks<Int> marks{static_cast<const Int*>(source.values), source.length, source.rule};
  launcher.Run(&CountKernel<Int>, source.tiles(), kBoundaryThreads, marks, source.tokens, counts);
  launcher.Run(&PlaceKernel<Int>, source.tiles(), kBoundaryThreads, marks, source.tokens, source.clip, counts, offsets);
}

const char* BoundariesCuda(const BoundarySource& source, BoundaryCount* counts, int32_t* offsets, void* stream) {
  Launcher launcher(stream);
  source.wide ? RunBoundaries<int64_t>(launcher, source, counts, offsets)
              : RunBoundaries<int32_t>(launcher, source, counts, offsets);
  return launcher.error();
}

const char* BoundOffsetsCuda(const void* values, bool wide, int64_t size, int64_t tokens, int32_t* offsets,
                             void* stream) {
  Launcher launcher(stream);
  const int64_t blocks = (size + kBoundaryThreads - 1) / kBoundaryThreads;
  if (wide) {
    launcher.Run(&BoundKernel<int64_t>, blocks, kBoundaryThreads, static_cast<const int64_t*>(values), size, tokens,
                 offsets);
  } else {
    launcher.Run(&BoundKernel<int32_t>, blocks, kBoundaryThreads, static_cast<const int32_t*>(values), size, tokens,
                 offsets);
  }
  return launcher.error();
}

}  // namespace packfree
