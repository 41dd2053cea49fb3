#include "cpu/kda/kda.h"

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
  std::optional<Tensor> a_log, dt_bias, initial_state;
  KdaInputs view;
  Dtype dtype;
  int64_t tokens, sequences;

  CheckedInputs(const char* op, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in, const Tensor& g_in,
                const Tensor& beta_in, const std::optional<Tensor>& a_log_in, const std::optional<Tensor>& dt_bias_in,
                std::optional<double> lower_bound, const Tensor& cu_seqlens, const std::optional<Tensor>& state_in,
                double scale, bool l2norm)
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
    STD_TORCH_CHECK(g_in.dim() == 3 && g_in.size(0) == tokens && g_in.size(1) == HV && g_in.size(2) == K &&
                        beta_in.dim() == 2 && beta_in.size(0) == tokens && beta_in.size(1) == HV &&
                        g_in.scalar_type() == accumulation && beta_in.scalar_type() == accumulation,
                    op, ": g must have shape [T, HV, K], beta [T, HV], both dtype float32 (float64 beside float64)");
    STD_TORCH_CHECK(a_log_in.has_value() || (!dt_bias_in.has_value() && !lower_bound.has_value()), op,
                    ": dt_bias and lower_bound need A_log");
    STD_TORCH_CHECK(!a_log_in.has_value() || (a_log_in->dim() == 1 && a_log_in->size(0) == HV &&
                                              a_log_in->scalar_type() == accumulation),
                    op, ": A_log must have shape [HV] and the dtype of g");
    STD_TORCH_CHECK(!dt_bias_in.has_value() || (dt_bias_in->dim() == 2 && dt_bias_in->size(0) == HV &&
                                                dt_bias_in->size(1) == K && dt_bias_in->scalar_type() == accumulation),
                    op, ": dt_bias must have shape [HV, K] and the dtype of g");
    a_log = Contiguous(a_log_in);
    dt_bias = Contiguous(dt_bias_in);
    g = Contiguous(g_in);
    beta = Contiguous(beta_in);
    const PackingView packing = CheckedPacking(op, cu_seqlens, tokens);
    sequences = packing.num_sequences;
    initial_state = CheckedState(op, "initial_state", state_in);
    view = KdaInputs{packing,
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
                                DataOrNull(a_log),
                                DataOrNull(dt_bias),
                                lower_bound.has_value(),
                                lower_bound.value_or(0.0),
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

using ForwardFunction = void (*)(Tier, Dtype, const KdaForward&);

std::tuple<Tensor, Tensor> Forward(const char* op, ForwardFunction run, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& g, const Tensor& beta,
                                   const std::optional<Tensor>& a_log, const std::optional<Tensor>& dt_bias,
                                   std::optional<double> lower_bound, const Tensor& cu_seqlens,
                                   const std::optional<Tensor>& initial_state, double scale, bool l2norm,
                                   bool want_state) {
  const CheckedInputs in(op, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens, initial_state, scale, l2norm);
  Tensor o = NewTensor(in.q, {in.tokens, in.v.size(1), in.v.size(2)}, in.q.scalar_type());
  Tensor final_state = want_state ? in.NewState() : AbsentTensor(in.q, AccumulationType(in.q));
  run(CheckedTier(op), in.dtype, {in.view, o.mutable_data_ptr(), DataOrNull(final_state)});
  return {o, final_state};
}

std::tuple<Tensor, Tensor> kda_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                   const Tensor& beta, const std::optional<Tensor>& a_log,
                                   const std::optional<Tensor>& dt_bias, std::optional<double> lower_bound,
                                   const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state, double scale,
                                   bool l2norm, bool want_state) {
  return Forward("kda_fwd", &KdaForwardCpu, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens, initial_state,
                 scale, l2norm, want_state);
}

std::tuple<Tensor, Tensor> kda_recurrent_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                             const Tensor& beta, const std::optional<Tensor>& a_log,
                                             const std::optional<Tensor>& dt_bias, std::optional<double> lower_bound,
                                             const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
                                             double scale, bool l2norm, bool want_state) {
  return Forward("kda_recurrent_fwd", &KdaRecurrentCpu, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens,
                 initial_state, scale, l2norm, want_state);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kda_bwd(
    const Tensor& d_o, const std::optional<Tensor>& d_final_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, const std::optional<Tensor>& a_log, const std::optional<Tensor>& dt_bias,
    std::optional<double> lower_bound, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
    double scale, bool l2norm) {
  const char* op = "kda_bwd";
  const CheckedInputs in(op, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens, initial_state, scale, l2norm);
  STD_TORCH_CHECK(d_o.dim() == 3 && d_o.size(0) == in.tokens && d_o.size(1) == in.v.size(1) &&
                      d_o.size(2) == in.v.size(2) && d_o.scalar_type() == in.q.scalar_type(),
                  op, ": do must have shape [T, HV, V] and the dtype of q");
  const Tensor d_o_rows = Contiguous(d_o);
  const std::optional<Tensor> d_final = in.CheckedState(op, "dfinal_state", d_final_state);
  const ScalarType dtype = in.q.scalar_type(), accumulation = AccumulationType(in.q);
  const int64_t H = in.q.size(1), K = in.q.size(2), HV = in.v.size(1), V = in.v.size(2);
  Tensor dq = NewTensor(in.q, {in.tokens, H, K}, dtype);
  Tensor dk = NewTensor(in.q, {in.tokens, H, K}, dtype);
  Tensor dv = NewTensor(in.q, {in.tokens, HV, V}, dtype);
  Tensor dg = NewTensor(in.q, {in.tokens, HV, K}, accumulation);
  Tensor dbeta = NewTensor(in.q, {in.tokens, HV}, accumulation);
  Tensor d_a_log = in.a_log.has_value() ? NewTensor(in.q, {HV}, accumulation) : AbsentTensor(in.q, accumulation);
  Tensor d_dt_bias = in.dt_bias.has_value() ? NewTensor(in.q, {HV, K}, accumulation) : AbsentTensor(in.q, accumulation);
  Tensor d_initial = in.initial_state.has_value() ? in.NewState() : AbsentTensor(in.q, accumulation);
  KdaBackwardCpu(CheckedTier(op), in.dtype,
                 {in.view, d_o_rows.const_data_ptr(), DataOrNull(d_final), dq.mutable_data_ptr(), dk.mutable_data_ptr(),
                  dv.mutable_data_ptr(), dg.mutable_data_ptr(), dbeta.mutable_data_ptr(), DataOrNull(d_a_log),
                  DataOrNull(d_dt_bias), DataOrNull(d_initial), nullptr});
  return {dq, dk, dv, dg, dbeta, d_a_log, d_dt_bias, d_initial};
}

}  // namespace

void define_kda(OpLibrary& ops) {
  ops.def(
      "kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, Tensor? dt_bias, float? lower_bound, "
      "Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, bool want_state) "
      "-> (Tensor o, Tensor final_state)");
  ops.def(
      "kda_bwd(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, "
      "Tensor? dt_bias, float? lower_bound, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor da_log, Tensor ddt_bias, "
      "Tensor dinitial_state)");
  ops.def(
      "kda_recurrent_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, Tensor? dt_bias, "
      "float? lower_bound, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, bool want_state) "
      "-> (Tensor o, Tensor final_state)");
}

void implement_kda_cpu(OpLibrary& ops) {
  ops.impl("kda_fwd", TORCH_BOX(&kda_fwd));
  ops.impl("kda_bwd", TORCH_BOX(&kda_bwd));
  ops.impl("kda_recurrent_fwd", TORCH_BOX(&kda_recurrent_fwd));
}

}  // namespace packfree
