// What CUDA C++ and HIP have in common, on host threads: see engine.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "engine.h"

#define __global__
#define __device__
#define __host__
// In earnest: exchanges and barriers are told apart by the place of the call in the kernel.
#define __forceinline__ inline __attribute__((always_inline))
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
inline constexpr struct {
  operator int() const { return static_cast<int>(cuda_host::wave_lanes); }
} warpSize{};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

__forceinline__ void __syncthreads() {
  if (cuda_host::lane->barriers++ != cuda_host::faults.skipped_barrier) cuda_host::lane->block->all.Wait();
}

// What lane `source` of this lane's wave gives; see Wave::Exchange.
template <class Value>
__forceinline__ Value cuda_host_exchange(Value value, unsigned source, bool whole) {
  static_assert(sizeof(Value) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = cuda_host::OwnWave().Exchange(bits, source, whole);
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

// Whether the launch was one that a GPU takes; if so it has run.
template <class... Parameters, class... Arguments>
bool cuda_host_launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, Arguments&&... arguments) {
  if (blocks.x == 0 || threads.x == 0 || threads.x > 1024) return false;
  cuda_host::RunGrid(blocks.x, threads.x, [&] { kernel(arguments...); });
  return true;
}
