// bfloat16 by its bits, rounded to nearest, ties to even: HIP's own type differs from release to release.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};
  const uint32_t wide = __float_as_uint(value);
  return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}
