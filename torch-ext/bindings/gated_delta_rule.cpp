#include "cpu/gated_delta_rule/gated_delta_rule.h"

#include "bindings/delta_rule.h"
#include "torch_binding.h"

namespace packfree {

namespace {

std::tuple<Tensor, Tensor> gated_delta_rule_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                                const Tensor& beta, const Tensor& cu_seqlens,
                                                const std::optional<Tensor>& initial_state, double scale, bool l2norm,
                                                bool want_state) {
  const char* op = "gated_delta_rule_fwd";
  const CheckedDelta in(op, q, k, v, g, beta, false, cu_seqlens, initial_state, scale, l2norm);
  return RunForward(op, &GatedDeltaRuleForwardCpu, in, in.view, want_state);
}

std::tuple<Tensor, Tensor> gated_delta_rule_recurrent_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                                          const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens,
                                                          const std::optional<Tensor>& initial_state, double scale,
                                                          bool l2norm, bool want_state) {
  const char* op = "gated_delta_rule_recurrent_fwd";
  const CheckedDelta in(op, q, k, v, g, beta, false, cu_seqlens, initial_state, scale, l2norm);
  return RunForward(op, &GatedDeltaRuleRecurrentCpu, in, in.view, want_state);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gated_delta_rule_bwd(
    const Tensor& dout, const std::optional<Tensor>& dfinal_state, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& g, const Tensor& beta, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
    double scale, bool l2norm) {
  const char* op = "gated_delta_rule_bwd";
  const CheckedDelta in(op, q, k, v, g, beta, false, cu_seqlens, initial_state, scale, l2norm);
  const DeltaGradients d(op, in, dout, dfinal_state);
  GatedDeltaRuleBackwardCpu(CheckedTier(op), d.View(in.view));
  return {d.dq, d.dk, d.dv, d.dg, d.dbeta, d.dinitial_state};
}

}  // namespace

void define_gated_delta_rule(OpLibrary& ops) {
  ops.def(
      "gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, "
      "Tensor? initial_state, float scale, bool l2norm, bool want_state) -> (Tensor out, Tensor final_state)");
  ops.def(
      "gated_delta_rule_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)");
  ops.def(
      "gated_delta_rule_recurrent_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, "
      "Tensor? initial_state, float scale, bool l2norm, bool want_state) -> (Tensor out, Tensor final_state)");
}

void implement_gated_delta_rule_cpu(OpLibrary& ops) {
  ops.impl("gated_delta_rule_fwd", TORCH_BOX(&gated_delta_rule_fwd));
  ops.impl("gated_delta_rule_bwd", TORCH_BOX(&gated_delta_rule_bwd));
  ops.impl("gated_delta_rule_recurrent_fwd", TORCH_BOX(&gated_delta_rule_recurrent_fwd));
}

}  // namespace packfree
