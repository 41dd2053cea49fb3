// Elements of tensors as the GPU's registers hold them, and elementary functions. All arithmetic is in float; it is
// contracted only where the text says fmaf (build.toml: -fmad=false), so that all paths of a kernel round alike.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/dtypes.h"

namespace packfree {

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

template <class Elem>
__device__ __forceinline__ Elem FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// Calls body(Elem{}) with the type that `dtype` names. Never float64: the bindings refuse it.
template <class Body>
void WithElement(Dtype dtype, const Body& body) {
  if (dtype == Dtype::kFloat32) body(float{});
  if (dtype == Dtype::kBFloat16) body(__nv_bfloat16{});
  if (dtype == Dtype::kFloat16) body(__half{});
}

// The same where the dtype is known at run time only: for what a kernel reads and writes beside much arithmetic, where
// a kernel for each combination of dtypes would be many times the code.
__device__ __forceinline__ float LoadAs(const void* data, Dtype dtype, int64_t index) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == Dtype::kBFloat16) return ToFloat(static_cast<const __nv_bfloat16*>(data)[index]);
  return ToFloat(static_cast<const __half*>(data)[index]);
}
__device__ __forceinline__ void StoreAs(void* data, Dtype dtype, int64_t index, float value) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == Dtype::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = FromFloat<__nv_bfloat16>(value);
  } else {
    static_cast<__half*>(data)[index] = FromFloat<__half>(value);
  }
}

__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// silu'(x) = s + x s (1 - s), s = sigmoid(x)
__device__ __forceinline__ float SiluSlope(float x) {
  const float s = Sigmoid(x);
  return fmaf(x * s, 1.0f - s, s);
}

// ln(1 + e^x), the identity above 20
__device__ __forceinline__ float Softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float SoftplusSlope(float x) { return x > 20.0f ? 1.0f : Sigmoid(x); }

}  // namespace packfree
