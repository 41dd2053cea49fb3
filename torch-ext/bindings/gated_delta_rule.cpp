#include "cpu/gated_delta_rule/gated_delta_rule.h"

#include "bindings/tensors.h"
#include "torch_binding.h"

namespace packfree {

namespace {

// q, k, v as the kernels take them: the last axis dense, any other strides.
Tensor DenseRows(const Tensor& tensor) {
  return tensor.stride(2) == 1 || tensor.size(2) <= 1 ? tensor : Contiguous(tensor);
}

// The inputs of all three ops, checked and kept alive.
struct CheckedInputs {
  Tensor q, k, v, g, beta;
  std::optional<Tensor> initial_state;
  GatedDeltaRuleInputs view;
  Dtype dtype;
  int64_t tokens, sequences;

  CheckedInputs(const char* op, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& g_in,
                const Tensor& beta_in, const Tensor& cu_seqlens, const std::optional<Tensor>& state_in, double scale,
                bool l2norm)
      : dtype(DtypeOf(op, q_in)) {
    STD_TORCH_CHECK(q_in.dim() == 3 && k_in.dim() == 3 && v_in.dim() == 3, op,
                    ": q and k must have shape [T, H, K], v [T, HV, V]");
    q = DenseRows(q_in);
    k = DenseRows(k_in);
    v = DenseRows(v_in);
    tokens = q.size(0);
    const int64_t H = q.size(1), K = q.size(2), HV = v.size(1), V = v.size(2);
    const ScalarType accumulation = AccumulationType(q);
    STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
                    ": q, k and v must have one dtype");
    STD_TORCH_CHECK(k.size(0) == tokens && k.size(1) == H && k.size(2) == K && v.size(0) == tokens, op,
                    ": q and k must have shape [T, H, K], v [T, HV, V]");
    STD_TORCH_CHECK(H > 0 && K > 0 && V > 0 && HV > 0 && HV % H == 0, op,
                    ": HV must be a multiple of H, and H, K and V at least 1");
    for (const Tensor* gate : {&g_in, &beta_in}) {
      STD_TORCH_CHECK(gate->dim() == 2 && gate->size(0) == tokens && gate->size(1) == HV &&
                          gate->scalar_type() == accumulation,
                      op, ": g and beta must have shape [T, HV] and dtype float32 (float64 beside float64)");
    }
    g = Contiguous(g_in);
    beta = Contiguous(beta_in);
    const PackingView packing = CheckedPacking(op, cu_seqlens, tokens);
    sequences = packing.num_sequences;
    initial_state = CheckedState(op, "initial_state", state_in);
    view = GatedDeltaRuleInputs{packing,
                                H,
                                HV,
                                K,
                                V,
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
    STD_TORCH_CHECK(state->dim() == 4 && state->size(0) == sequences && state->size(1) == v.size(1) &&
                        state->size(2) == q.size(2) && state->size(3) == v.size(2) &&
                        state->scalar_type() == AccumulationType(q),
                    op, ": ", argument, " must have shape [N, HV, K, V] and dtype float32 (float64 beside float64)");
    return Contiguous(*state);
  }

  Tensor NewState() const {
    return NewTensor(q, {sequences, v.size(1), q.size(2), v.size(2)}, AccumulationType(q));
  }
};

using ForwardFunction = void (*)(Tier, Dtype, const GatedDeltaRuleForward&);

std::tuple<Tensor, Tensor> Forward(const char* op, ForwardFunction run, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                   const std::optional<Tensor>& initial_state, double scale, bool l2norm,
                                   bool want_state) {
  const CheckedInputs in(op, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm);
  Tensor o = NewTensor(in.q, {in.tokens, in.v.size(1), in.v.size(2)}, in.q.scalar_type());
  Tensor final_state = want_state ? in.NewState() : AbsentTensor(in.q, AccumulationType(in.q));
  run(CheckedTier(op), in.dtype, {in.view, o.mutable_data_ptr(), DataOrNull(final_state)});
  return {o, final_state};
}

std::tuple<Tensor, Tensor> gated_delta_rule_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                const Tensor& beta, const Tensor& cu_seqlens,
                                                const std::optional<Tensor>& initial_state, double scale, bool l2norm,
                                                bool want_state) {
  return Forward("gated_delta_rule_fwd", &GatedDeltaRuleForwardCpu, q, k, v, g, beta, cu_seqlens, initial_state, scale,
                 l2norm, want_state);
}

std::tuple<Tensor, Tensor> gated_delta_rule_recurrent_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                          const Tensor& g, const Tensor& beta,
                                                          const Tensor& cu_seqlens,
                                                          const std::optional<Tensor>& initial_state, double scale,
                                                          bool l2norm, bool want_state) {
  return Forward("gated_delta_rule_recurrent_fwd", &GatedDeltaRuleRecurrentCpu, q, k, v, g, beta, cu_seqlens,
                 initial_state, scale, l2norm, want_state);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_bwd(
    const Tensor& d_o, const std::optional<Tensor>& d_final_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
    double scale, bool l2norm) {
  const char* op = "gated_delta_rule_bwd";
  const CheckedInputs in(op, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm);
  STD_TORCH_CHECK(d_o.dim() == 3 && d_o.size(0) == in.tokens && d_o.size(1) == in.v.size(1) &&
                      d_o.size(2) == in.v.size(2) && d_o.scalar_type() == in.q.scalar_type(),
                  op, ": do must have shape [T, HV, V] and the dtype of q");
  const Tensor d_o_rows = Contiguous(d_o);
  const std::optional<Tensor> d_final = in.CheckedState(op, "dfinal_state", d_final_state);
  const ScalarType dtype = in.q.scalar_type(), accumulation = AccumulationType(in.q);
  Tensor dq = NewTensor(in.q, {in.tokens, in.q.size(1), in.q.size(2)}, dtype);
  Tensor dk = NewTensor(in.q, {in.tokens, in.q.size(1), in.q.size(2)}, dtype);
  Tensor dv = NewTensor(in.q, {in.tokens, in.v.size(1), in.v.size(2)}, dtype);
  Tensor dg = NewTensor(in.q, {in.tokens, in.v.size(1)}, accumulation);
  Tensor dbeta = NewTensor(in.q, {in.tokens, in.v.size(1)}, accumulation);
  Tensor d_initial = in.initial_state.has_value() ? in.NewState() : AbsentTensor(in.q, accumulation);
  GatedDeltaRuleBackwardCpu(CheckedTier(op), in.dtype,
                            {in.view, d_o_rows.const_data_ptr(), DataOrNull(d_final), dq.mutable_data_ptr(),
                             dk.mutable_data_ptr(), dv.mutable_data_ptr(), dg.mutable_data_ptr(),
                             dbeta.mutable_data_ptr(), DataOrNull(d_initial)});
  return {dq, dk, dv, dg, dbeta, d_initial};
}

}  // namespace

void define_gated_delta_rule(OpLibrary& ops) {
  ops.def(
      "gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, "
      "Tensor? initial_state, float scale, bool l2norm, bool want_state) -> (Tensor o, Tensor final_state)");
  ops.def(
      "gated_delta_rule_bwd(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)");
  ops.def(
      "gated_delta_rule_recurrent_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, "
      "Tensor? initial_state, float scale, bool l2norm, bool want_state) -> (Tensor o, Tensor final_state)");
}

void implement_gated_delta_rule_cpu(OpLibrary& ops) {
  ops.impl("gated_delta_rule_fwd", TORCH_BOX(&gated_delta_rule_fwd));
  ops.impl("gated_delta_rule_bwd", TORCH_BOX(&gated_delta_rule_bwd));
  ops.impl("gated_delta_rule_recurrent_fwd", TORCH_BOX(&gated_delta_rule_recurrent_fwd));
}

}  // namespace packfree
