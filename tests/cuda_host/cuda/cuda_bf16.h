// bfloat16 on the host, rounded to nearest, ties to even, as the GPU does.
#pragma once

#include "cuda_runtime.h"

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) return {0x7fff};
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  wide += 0x7fff + (wide >> 16 & 1);
  return {static_cast<uint16_t>(wide >> 16)};
}
