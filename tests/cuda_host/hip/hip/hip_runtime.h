// What tools/maintainers/hip/ takes of HIP, on host threads: see engine.h. A wave has cuda_host::wave_lanes lanes, 64
// or 32.
#pragma once

#include "threads.h"

#define amdgpu_flat_work_group_size(...)  // an attribute of clang's, which another compiler would warn of

using hipStream_t = struct hip_host_stream*;
enum hipError_t { hipSuccess, hipErrorInvalidConfiguration };
enum hipDeviceAttribute_t { hipDeviceAttributeMultiprocessorCount };
inline hipError_t hip_host_error = hipSuccess;

inline const char* hipGetErrorString(hipError_t) { return "invalid configuration argument"; }
inline hipError_t hipGetLastError() { return std::exchange(hip_host_error, hipSuccess); }
inline hipError_t hipGetDevice(int* device) { return *device = 0, hipSuccess; }
// One multiprocessor: grids are small, and blocks stride over several items of work.
inline hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t, int) { return *value = 1, hipSuccess; }

template <class... Parameters, class... Arguments>
void hipLaunchKernelGGL(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t, hipStream_t,
                        Arguments&&... arguments) {
  if (!cuda_host_launch(kernel, blocks, threads, arguments...)) hip_host_error = hipErrorInvalidConfiguration;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `width` lanes, a power of two, exchange among themselves: a wave's lanes [0, width), [width, 2 width) and so on.
// A source outside is taken back into them by some releases of HIP, and leads into other lanes with others: it reads
// a lane that is not there, as does a lane whose source takes another path.
template <class Value>
__forceinline__ Value __shfl(Value value, int source, int width = warpSize) {
  const unsigned self = cuda_host::OwnLane(), first = self - self % cuda_host::WidthOf(width);
  const bool inside = source >= 0 && source < width;
  return cuda_host_exchange(value, inside ? first + static_cast<unsigned>(source) : ~0u, false);
}
// Beyond the width a lane gets its own value.
template <class Value>
__forceinline__ Value __shfl_xor(Value value, int mask, int width = warpSize) {
  const unsigned self = cuda_host::OwnLane(), end = self - self % cuda_host::WidthOf(width) + width;
  const unsigned source = self ^ static_cast<unsigned>(mask);
  return cuda_host_exchange(value, source < end ? source : self, false);
}
