// From tensors to the arguments of the delta rules: what gated_delta_rule.cpp and kda.cpp share.
#pragma once

#include "bindings/tensors.h"
#include "cpu/delta_rule/inputs.h"

namespace packfree {

// The inputs that all their ops take, checked and kept alive.
struct CheckedDelta {
  Tensor q, k, v, g, beta;
  std::optional<Tensor> initial_state;
  Dtype dtype;
  ScalarType accumulation;
  int64_t tokens, key_heads, key_dim, value_heads, value_dim, sequences;
  DeltaInputs view;

  // g has shape [T, HV], or with `decay_per_channel` [T, HV, K].
  CheckedDelta(const char* op, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& g_in,
               const Tensor& beta_in, bool decay_per_channel, const Tensor& cu_seqlens,
               const std::optional<Tensor>& state_in, double scale, bool l2norm)
      : dtype(DtypeOf(op, q_in)), accumulation(AccumulationType(q_in)) {
    PACKFREE_CHECK(q_in.dim() == 3 && k_in.dim() == 3 && v_in.dim() == 3, op,
                   ": q and k must have shape [T, H, K], v [T, HV, V]");
    q = DenseRows(q_in);
    k = DenseRows(k_in);
    v = DenseRows(v_in);
    tokens = q.size(0);
    key_heads = q.size(1);
    key_dim = q.size(2);
    value_heads = v.size(1);
    value_dim = v.size(2);
    PACKFREE_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
                   ": q, k and v must have one dtype");
    PACKFREE_CHECK(k.size(0) == tokens && k.size(1) == key_heads && k.size(2) == key_dim && v.size(0) == tokens, op,
                   ": q and k must have shape [T, H, K], v [T, HV, V]");
    PACKFREE_CHECK(key_heads > 0 && key_dim > 0 && value_dim > 0 && value_heads > 0 && value_heads % key_heads == 0, op,
                   ": HV must be a multiple of H, and H, K and V at least 1");
    const bool per_channel = g_in.dim() == 3 && g_in.size(2) == key_dim;
    PACKFREE_CHECK((decay_per_channel ? per_channel : g_in.dim() == 2) && IsPerToken(g_in) && beta_in.dim() == 2 &&
                       IsPerToken(beta_in),
                   op, ": g must have shape ", decay_per_channel ? "[T, HV, K]" : "[T, HV]",
                   ", beta [T, HV], both dtype float32 (float64 beside float64)");
    g = Contiguous(g_in);
    beta = Contiguous(beta_in);
    const PackingView packing = CheckedPacking(op, cu_seqlens, tokens);
    sequences = packing.num_sequences;
    initial_state = CheckedState(op, "initial_state", state_in);
    view = DeltaInputs{dtype,
                       packing,
                       key_heads,
                       value_heads,
                       key_dim,
                       value_dim,
                       q.const_data_ptr(),
                       k.const_data_ptr(),
                       v.const_data_ptr(),
                       q.stride(0),
                       q.stride(1),
                       k.stride(0),
                       k.stride(1),
                       v.stride(0),
                       v.stride(1),
                       g.const_data_ptr(),
                       beta.const_data_ptr(),
                       DataOrNull(initial_state),
                       scale,
                       l2norm};
  }

  // A state [N, HV, K, V] or its gradient, contiguous.
  std::optional<Tensor> CheckedState(const char* op, const char* argument, const std::optional<Tensor>& state) const {
    if (!state.has_value()) return std::nullopt;
    PACKFREE_CHECK(state->dim() == 4 && state->size(0) == sequences && state->size(1) == value_heads &&
                       state->size(2) == key_dim && state->size(3) == value_dim && state->scalar_type() == accumulation,
                   op, ": ", argument, " must have shape [N, HV, K, V] and dtype float32 (float64 beside float64)");
    return Contiguous(*state);
  }

  Tensor New(const std::vector<int64_t>& sizes) const { return NewTensor(q, sizes, q.scalar_type()); }
  Tensor NewWide(const std::vector<int64_t>& sizes) const { return NewTensor(q, sizes, accumulation); }
  Tensor NewStateIf(bool wanted) const {
    return wanted ? NewWide({sequences, value_heads, key_dim, value_dim}) : Absent();
  }
  Tensor Absent() const { return AbsentTensor(q, accumulation); }

 private:
  bool IsPerToken(const Tensor& gate) const {
    return gate.size(0) == tokens && gate.size(1) == value_heads && gate.scalar_type() == accumulation;
  }
};

// out and the final states. `inputs` are the op's, made from in.view.
template <class Inputs>
std::tuple<Tensor, Tensor> RunForward(const char* op, void (*run)(Tier, const DeltaForward<Inputs>&),
                                      const CheckedDelta& in, const Inputs& inputs, bool want_state) {
  Tensor out = in.New({in.tokens, in.value_heads, in.value_dim});
  Tensor final_state = in.NewStateIf(want_state);
  run(CheckedTier(op), {inputs, out.mutable_data_ptr(), DataOrNull(final_state)});
  return {out, final_state};
}

// The gradients of CheckedDelta's tensors, and those of the outputs that they come from.
struct DeltaGradients {
  Tensor dout;
  std::optional<Tensor> dfinal_state;
  Tensor dq, dk, dv, dg, dbeta, dinitial_state;

  DeltaGradients(const char* op, const CheckedDelta& in, const Tensor& dout_in, const std::optional<Tensor>& dfinal_in)
      : dfinal_state(in.CheckedState(op, "dfinal_state", dfinal_in)) {
    PACKFREE_CHECK(dout_in.dim() == 3 && dout_in.size(0) == in.tokens && dout_in.size(1) == in.value_heads &&
                       dout_in.size(2) == in.value_dim && dout_in.scalar_type() == in.q.scalar_type(),
                   op, ": dout must have shape [T, HV, V] and the dtype of q");
    dout = Contiguous(dout_in);
    dq = in.New({in.tokens, in.key_heads, in.key_dim});
    dk = in.New({in.tokens, in.key_heads, in.key_dim});
    dv = in.New({in.tokens, in.value_heads, in.value_dim});
    dg =
        in.g.dim() == 2 ? in.NewWide({in.tokens, in.value_heads}) : in.NewWide({in.tokens, in.value_heads, in.key_dim});
    dbeta = in.NewWide({in.tokens, in.value_heads});
    dinitial_state = in.NewStateIf(in.initial_state.has_value());
  }

  template <class Inputs>
  DeltaBackward<Inputs> View(const Inputs& inputs) const {
    return {inputs,
            dout.const_data_ptr(),
            DataOrNull(dfinal_state),
            dq.mutable_data_ptr(),
            dk.mutable_data_ptr(),
            dv.mutable_data_ptr(),
            dg.mutable_data_ptr(),
            dbeta.mutable_data_ptr(),
            DataOrNull(dinitial_state)};
  }
};

}  // namespace packfree
