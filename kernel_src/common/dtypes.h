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

}  // namespace packfree
