// What the boundary conversions check and register, alike on every device.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <limits>

#include "bindings/check.h"
#include "common/boundaries.h"
#include "torch_binding.h"

namespace packfree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Tensor NewOffsets(const Tensor& like, int64_t size) {
  return torch::stable::empty({size}, ScalarType::Int, std::nullopt, like.device());
}

// `values` [B, T] as a source of boundaries; it must be contiguous and outlive the source.
inline BoundarySource CheckedSource(const char* op, const Tensor& values, BoundaryRule rule) {
  PACKFREE_CHECK(values.dim() == 2 && values.is_contiguous(), op, ": values must be a contiguous tensor [B, T]");
  PACKFREE_CHECK(values.scalar_type() == ScalarType::Long || values.scalar_type() == ScalarType::Int, op,
                 ": values must be int32 or int64");
  PACKFREE_CHECK(values.numel() < std::numeric_limits<int32_t>::max(), op, ": offsets are int32, got ", values.numel(),
                 " tokens");
  const bool clip = rule == BoundaryRule::kLabels && values.size(0) == 1;
  return {
      values.const_data_ptr(), values.scalar_type() == ScalarType::Long, rule, values.size(1), values.numel(), clip};
}

// The ops of one device, from the two functions that run there. Both get contiguous tensors: positions or labels [B, T]
// with what starts a sequence in them, and offsets [N + 1] of a row of `tokens`.
template <Tensor (*kFromValues)(const char* op, const Tensor& values, BoundaryRule rule),
          Tensor (*kFromOffsets)(const char* op, const Tensor& values, int64_t tokens)>
struct PackingOps {
  static Tensor FromPositions(const Tensor& positions, bool only_falls) {
    const BoundaryRule rule = only_falls ? BoundaryRule::kFalls : BoundaryRule::kSteps;
    return kFromValues("packing_from_positions", torch::stable::contiguous(positions), rule);
  }

  static Tensor FromLabels(const Tensor& seq_idx) {
    return kFromValues("packing_from_labels", torch::stable::contiguous(seq_idx), BoundaryRule::kLabels);
  }

  static Tensor FromOffsets(const Tensor& cu_seqlens, int64_t tokens) {
    const char* op = "packing_from_offsets";
    PACKFREE_CHECK(cu_seqlens.dim() == 1, op, ": cu_seqlens must have shape [N + 1]");
    PACKFREE_CHECK(cu_seqlens.scalar_type() == ScalarType::Long || cu_seqlens.scalar_type() == ScalarType::Int, op,
                   ": cu_seqlens must be int32 or int64");
    return kFromOffsets(op, torch::stable::contiguous(cu_seqlens), tokens);
  }

  static void Implement(OpLibrary& ops) {
    ops.impl("packing_from_positions", TORCH_BOX(&PackingOps::FromPositions));
    ops.impl("packing_from_labels", TORCH_BOX(&PackingOps::FromLabels));
    ops.impl("packing_from_offsets", TORCH_BOX(&PackingOps::FromOffsets));
  }
};

}  // namespace packfree
