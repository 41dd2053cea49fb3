// What selective_state_update checks and allocates, alike on every device.
#pragma once

#include "bindings/tensors.h"
#include "common/mamba2_scan.h"
#include "torch_binding.h"

namespace packfree {

// The arguments, and the tensors that own their memory.
struct StateUpdate {
  Tensor x_rows, b_rows, c_rows, a_rows, y;
  std::optional<Tensor> d_rows, z_rows, bias_rows, slots;
  SelectiveStateUpdate args;

  StateUpdate(const char* op, const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
              const Tensor& C, const std::optional<Tensor>& D, const std::optional<Tensor>& z,
              const std::optional<Tensor>& dt_bias, bool dt_softplus,
              const std::optional<Tensor>& state_batch_indices) {
    const ScalarType accumulation = AccumulationType(x);
    PACKFREE_CHECK(state.dim() == 4 && x.dim() == 3 && dt.dim() == 3 && A.dim() == 3 && B.dim() == 3 && C.dim() == 3,
                   op, ": state must have shape [R, H, P, S], x and dt [B, H, P], A [H, P, S], B and C [B, G, S]");
    const int64_t batch = x.size(0), heads = x.size(1), P = x.size(2), S = state.size(3), groups = B.size(1);
    slots = ToAccumulation(state_batch_indices, ScalarType::Long);
    PACKFREE_CHECK(slots.has_value() ? slots->dim() == 1 && slots->size(0) == batch : state.size(0) == batch, op,
                   ": state must have one row for each row of x, or state_batch_indices [B] must name them");
    PACKFREE_CHECK(state.size(1) == heads && state.size(2) == P && dt.size(0) == batch && dt.size(1) == heads &&
                       dt.size(2) == P && A.size(0) == heads && A.size(1) == P && A.size(2) == S &&
                       B.size(0) == batch && B.size(2) == S && C.size(0) == batch && C.size(1) == groups &&
                       C.size(2) == S && groups > 0 && heads % groups == 0,
                   op, ": state must have shape [R, H, P, S], x and dt [B, H, P], A [H, P, S], B and C [B, G, S]");
    PACKFREE_CHECK(state.stride(3) == 1 || S <= 1, op, ": the last axis of state must be dense");
    PACKFREE_CHECK(state.scalar_type() == x.scalar_type() || state.scalar_type() == accumulation, op,
                   ": state must have the dtype of x or float32 (float64 beside float64)");
    PACKFREE_CHECK(
        (B.scalar_type() == x.scalar_type() || B.scalar_type() == accumulation) && C.scalar_type() == B.scalar_type(),
        op, ": B and C must both have the dtype of x, or float32 (float64 beside float64)");
    PACKFREE_CHECK(dt.scalar_type() == accumulation && A.scalar_type() == accumulation, op,
                   ": dt and A must have dtype float32 (float64 beside float64)");
    for (const std::optional<Tensor>* row : {&D, &dt_bias}) {
      PACKFREE_CHECK(!row->has_value() || ((*row)->dim() == 2 && (*row)->size(0) == heads && (*row)->size(1) == P &&
                                           (*row)->scalar_type() == accumulation),
                     op, ": D and dt_bias must have shape [H, P] and dtype float32 (float64 beside float64)");
    }
    PACKFREE_CHECK(!z.has_value() || (z->dim() == 3 && z->size(0) == batch && z->size(1) == heads && z->size(2) == P &&
                                      z->scalar_type() == x.scalar_type()),
                   op, ": z must have the shape and dtype of x");
    x_rows = Contiguous(x), b_rows = Contiguous(B), c_rows = Contiguous(C);
    a_rows = A.stride(2) == 0 || A.stride(2) == 1 || S <= 1 ? A : Contiguous(A);
    d_rows = Contiguous(D), z_rows = Contiguous(z), bias_rows = Contiguous(dt_bias);
    y = NewTensor(x, {batch, heads, P}, x.scalar_type());
    args = {DtypeOf(op, x),
            batch,
            heads,
            groups,
            P,
            S,
            state.mutable_data_ptr(),
            state.stride(0),
            state.stride(1),
            state.stride(2),
            state.size(0),
            static_cast<const int64_t*>(DataOrNull(slots)),
            state.scalar_type() == accumulation,
            x_rows.const_data_ptr(),
            b_rows.const_data_ptr(),
            c_rows.const_data_ptr(),
            B.scalar_type() == accumulation,
            DataOrNull(z_rows),
            dt.const_data_ptr(),
            dt.stride(0),
            dt.stride(1),
            dt.stride(2),
            a_rows.const_data_ptr(),
            a_rows.stride(0),
            a_rows.stride(1),
            S <= 1 ? 0 : a_rows.stride(2),
            DataOrNull(d_rows),
            DataOrNull(bias_rows),
            dt_softplus,
            y.mutable_data_ptr()};
  }
};

}  // namespace packfree
