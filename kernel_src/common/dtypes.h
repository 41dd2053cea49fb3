// Storage types of tensors, as the kernels see them.
#pragma once

#include <cstdint>

namespace packfree {

// Bits only: conversion to and from float is a verb of the SIMD layer (simd/vec-inl.h).
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

enum class Dtype { kFloat32, kBFloat16, kFloat16, kFloat64 };

// Bytes of one element, and of what the kernels compute in beside it: float, or double for double.
inline int64_t ElementBytes(Dtype dtype) {
  if (dtype == Dtype::kFloat64) return 8;
  return dtype == Dtype::kFloat32 ? 4 : 2;
}
inline int64_t AccBytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

}  // namespace packfree
