#include "cpu/kda/kda.h"

#include "bindings/delta_rule.h"
#include "torch_binding.h"

namespace packfree {

namespace {

// The inputs of all three ops, checked and kept alive.
struct CheckedKda : CheckedDelta {
  std::optional<Tensor> a_log, dt_bias;
  KdaInputs inputs;

  CheckedKda(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
             const std::optional<Tensor>& a_log_in, const std::optional<Tensor>& dt_bias_in,
             std::optional<double> lower_bound, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
             double scale, bool l2norm)
      : CheckedDelta(op, q, k, v, g, beta, true, cu_seqlens, initial_state, scale, l2norm) {
    PACKFREE_CHECK(a_log_in.has_value() || (!dt_bias_in.has_value() && !lower_bound.has_value()), op,
                   ": dt_bias and lower_bound need A_log");
    PACKFREE_CHECK(!a_log_in.has_value() || (a_log_in->dim() == 1 && a_log_in->size(0) == value_heads &&
                                             a_log_in->scalar_type() == accumulation),
                   op, ": A_log must have shape [HV] and the dtype of g");
    PACKFREE_CHECK(
        !dt_bias_in.has_value() || (dt_bias_in->dim() == 2 && dt_bias_in->size(0) == value_heads &&
                                    dt_bias_in->size(1) == key_dim && dt_bias_in->scalar_type() == accumulation),
        op, ": dt_bias must have shape [HV, K] and the dtype of g");
    a_log = Contiguous(a_log_in);
    dt_bias = Contiguous(dt_bias_in);
    inputs = KdaInputs{view, DataOrNull(a_log), DataOrNull(dt_bias), lower_bound.has_value(), lower_bound.value_or(0)};
  }
};

std::tuple<Tensor, Tensor> kda_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                   const Tensor& beta, const std::optional<Tensor>& a_log,
                                   const std::optional<Tensor>& dt_bias, std::optional<double> lower_bound,
                                   const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state, double scale,
                                   bool l2norm, bool want_state) {
  const char* op = "kda_fwd";
  const CheckedKda in(op, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens, initial_state, scale, l2norm);
  return RunForward(op, &KdaForwardCpu, in, in.inputs, want_state);
}

std::tuple<Tensor, Tensor> kda_recurrent_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                             const Tensor& beta, const std::optional<Tensor>& a_log,
                                             const std::optional<Tensor>& dt_bias, std::optional<double> lower_bound,
                                             const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
                                             double scale, bool l2norm, bool want_state) {
  const char* op = "kda_recurrent_fwd";
  const CheckedKda in(op, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens, initial_state, scale, l2norm);
  return RunForward(op, &KdaRecurrentCpu, in, in.inputs, want_state);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kda_bwd(
    const Tensor& dout, const std::optional<Tensor>& dfinal_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, const std::optional<Tensor>& a_log, const std::optional<Tensor>& dt_bias,
    std::optional<double> lower_bound, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
    double scale, bool l2norm) {
  const char* op = "kda_bwd";
  const CheckedKda in(op, q, k, v, g, beta, a_log, dt_bias, lower_bound, cu_seqlens, initial_state, scale, l2norm);
  const DeltaGradients d(op, in, dout, dfinal_state);
  Tensor da_log = in.a_log.has_value() ? in.NewWide({in.value_heads}) : in.Absent();
  Tensor ddt_bias = in.dt_bias.has_value() ? in.NewWide({in.value_heads, in.key_dim}) : in.Absent();
  KdaBackwardCpu(CheckedTier(op), {d.View(in.inputs), DataOrNull(da_log), DataOrNull(ddt_bias), nullptr});
  return {d.dq, d.dk, d.dv, d.dg, d.dbeta, da_log, ddt_bias, d.dinitial_state};
}

}  // namespace

void define_kda(OpLibrary& ops) {
  ops.def(
      "kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, Tensor? dt_bias, "
      "float? lower_bound, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, bool want_state) "
      "-> (Tensor out, Tensor final_state)");
  ops.def(
      "kda_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, "
      "Tensor? dt_bias, float? lower_bound, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor da_log, Tensor ddt_bias, "
      "Tensor dinitial_state)");
  ops.def(
      "kda_recurrent_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, Tensor? dt_bias, "
      "float? lower_bound, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, bool want_state) "
      "-> (Tensor out, Tensor final_state)");
}

void implement_kda_cpu(OpLibrary& ops) {
  ops.impl("kda_fwd", TORCH_BOX(&kda_fwd));
  ops.impl("kda_bwd", TORCH_BOX(&kda_bwd));
  ops.impl("kda_recurrent_fwd", TORCH_BOX(&kda_recurrent_fwd));
}

}  // namespace packfree
