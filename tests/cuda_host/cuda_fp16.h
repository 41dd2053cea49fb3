// float16 on the host.
#pragma once

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};

inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
