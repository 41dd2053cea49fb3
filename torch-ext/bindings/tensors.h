// What every binding needs to get from tensors to the plain views the kernels take. Only files in bindings/ include it:
// the kernels never see a tensor.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/check.h"
#include "bindings/tiers.h"
#include "common/dtypes.h"
#include "common/huge_pages.h"
#include "common/packing.h"

namespace packfree {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The element type of a tensor, for the dtype tables of the kernels.
inline Dtype DtypeOf(const char* op, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Double:
      return Dtype::kFloat64;
    default:
      PACKFREE_CHECK(false, op, ": tensors must be float32, bfloat16, float16 or float64");
  }
  return Dtype::kFloat32;
}

// The type a kernel computes and keeps states in: float, or double for double tensors.
inline ScalarType AccumulationType(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A new tensor with unspecified contents; under PACKFREE_DEBUG=1 filled with NaN, so that a kernel that leaves an
// element unwritten is seen.
inline Tensor NewTensor(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  Tensor tensor = torch::stable::empty(sizes, dtype, std::nullopt, like.device());
  if (tensor.is_cpu()) {
    AdviseHugePages(tensor.mutable_data_ptr(), tensor.numel() * static_cast<int64_t>(tensor.element_size()));
  }
  const char* debug = std::getenv("PACKFREE_DEBUG");
  if (debug != nullptr && std::strcmp(debug, "1") == 0 && dtype != ScalarType::Int && dtype != ScalarType::Long) {
    torch::stable::fill_(tensor, std::numeric_limits<double>::quiet_NaN());
  }
  return tensor;
}

// What an op returns for an output that was not asked for.
inline Tensor AbsentTensor(const Tensor& like, ScalarType dtype) { return NewTensor(like, {0}, dtype); }

inline Tensor Contiguous(const Tensor& tensor) { return torch::stable::contiguous(tensor); }
inline std::optional<Tensor> Contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  return torch::stable::contiguous(*tensor);
}
// Three axes as most kernels take them: the last dense, any other strides.
inline Tensor DenseRows(const Tensor& tensor) {
  return tensor.stride(2) == 1 || tensor.size(2) <= 1 ? tensor : Contiguous(tensor);
}
// Contiguous and of another type, as the kernels take parameters.
inline Tensor ToAccumulation(const Tensor& tensor, ScalarType acc) {
  return torch::stable::contiguous(torch::stable::to(tensor, acc));
}
inline std::optional<Tensor> ToAccumulation(const std::optional<Tensor>& tensor, ScalarType acc) {
  if (!tensor.has_value()) return std::nullopt;
  return ToAccumulation(*tensor, acc);
}
inline const void* DataOrNull(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}
// The same for an output that may be absent (size 0).
inline void* DataOrNull(const Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr(); }

// Boundaries as the kernels read them, checked for what memory safety needs: the ops can be called without the
// Python front that words these errors for users. `cu_seqlens` must outlive the view.
inline PackingView CheckedPacking(const char* op, const Tensor& cu_seqlens, int64_t tokens) {
  PACKFREE_CHECK(cu_seqlens.scalar_type() == ScalarType::Int && cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 &&
                     cu_seqlens.is_contiguous() && cu_seqlens.is_cpu(),
                 op, ": cu_seqlens must be a contiguous int32 CPU tensor [N + 1]");
  const PackingView packing{static_cast<const int32_t*>(cu_seqlens.const_data_ptr()), cu_seqlens.size(0) - 1, tokens};
  PACKFREE_CHECK(packing.cu_seqlens[0] == 0, op, ": cu_seqlens must start at 0, got ", packing.cu_seqlens[0]);
  for (int64_t n = 0; n < packing.num_sequences; ++n) {
    PACKFREE_CHECK(packing.eos(n) >= packing.bos(n), op, ": cu_seqlens must never decrease, got ", packing.eos(n),
                   " after ", packing.bos(n), " at index ", n + 1);
  }
  PACKFREE_CHECK(packing.end() <= tokens, op, ": cu_seqlens must end at the number of tokens (", tokens,
                 ") or before, got ", packing.end());
  return packing;
}

// Where B rows of `row_tokens` lie one after the other, no sequence may go on from one row into the next.
inline void CheckRowsAreCut(const char* op, const PackingView& packing, int64_t row_tokens) {
  for (int64_t n = 0; n < packing.num_sequences; ++n) {
    PACKFREE_CHECK(packing.length(n) == 0 || packing.bos(n) / row_tokens == (packing.eos(n) - 1) / row_tokens, op,
                   ": cu_seqlens must end a sequence where a row ends, got one from ", packing.bos(n), " to ",
                   packing.eos(n), " in rows of ", row_tokens);
  }
}

// The tier that serves this call, at most `highest`: the highest tier that the op has a source for.
inline Tier CheckedTier(const char* op, Tier highest = kVectorTier) {
  Tier tier = Tier::kScalar;
  PACKFREE_CHECK(SelectTier(&tier), op, ": ", TierRefusal());
  return tier > highest ? highest : tier;
}

}  // namespace packfree
