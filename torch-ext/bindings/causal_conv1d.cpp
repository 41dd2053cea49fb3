#include "bindings/causal_conv1d.h"

#include "bindings/slots.h"
#include "cpu/causal_conv1d/causal_conv1d.h"

namespace packfree {
namespace {

PackingView ConvPacking(const ConvInputs& inputs, const Tensor& cu_seqlens) {
  const PackingView packing = CheckedPacking(inputs.op, cu_seqlens, inputs.tokens());
  CheckRowsAreCut(inputs.op, packing, inputs.args.row_tokens);
  return packing;
}

std::tuple<Tensor, Tensor> causal_conv1d_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                             const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
                                             bool silu, bool channels_last, bool want_states) {
  const char* op = "causal_conv1d_fwd";
  ConvInputs inputs(op, x, weight, bias, initial_states, silu, channels_last);
  inputs.SetPacking(ConvPacking(inputs, cu_seqlens));
  ConvForward out(inputs, want_states);
  CausalConv1dForwardCpu(CheckedTier(op), out.args);
  return {out.y, out.final_states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_bwd(
    const Tensor& dy, const std::optional<Tensor>& dfinal_states, const Tensor& x, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states, bool silu,
    bool channels_last) {
  const char* op = "causal_conv1d_bwd";
  ConvInputs inputs(op, x, weight, bias, initial_states, silu, channels_last);
  inputs.SetPacking(ConvPacking(inputs, cu_seqlens));
  ConvBackward out(inputs, dy, dfinal_states, 0);
  CausalConv1dBackwardCpu(CheckedTier(op), out.args);
  return {out.dx, out.dweight, out.dbias, out.dinitial};
}

Tensor causal_conv1d_update(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& cache_seqlens,
                            const std::optional<Tensor>& conv_state_indices, bool silu) {
  const char* op = "causal_conv1d_update";
  const ConvUpdate step(op, x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu);
  const int64_t* row_of = step.args.state_rows;
  const int64_t* seen_of = step.args.cache_seqlens;
  CheckSlots(op, "conv_state_indices", "conv_state", row_of, step.args.batch, step.rows);
  for (int64_t b = 0; seen_of != nullptr && b < step.args.batch; ++b) {
    PACKFREE_CHECK(seen_of[b] >= 0 || (row_of != nullptr && row_of[b] < 0), op,
                   ": cache_seqlens must not be negative, got ", seen_of[b], " at index ", b);
  }
  CausalConv1dUpdateCpu(CheckedTier(op), step.args);
  return step.y;
}

}  // namespace

void define_causal_conv1d(OpLibrary& ops) {
  ops.def(
      "causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor? initial_states, bool silu, "
      "bool channels_last, bool want_states) -> (Tensor y, Tensor final_states)");
  ops.def(
      "causal_conv1d_bwd(Tensor dy, Tensor? dfinal_states, Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, "
      "Tensor? initial_states, bool silu, bool channels_last) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_states)");
  ops.def(
      "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens, "
      "Tensor? conv_state_indices, bool silu) -> Tensor");
}

void implement_causal_conv1d_cpu(OpLibrary& ops) {
  ops.impl("causal_conv1d_fwd", TORCH_BOX(&causal_conv1d_fwd));
  ops.impl("causal_conv1d_bwd", TORCH_BOX(&causal_conv1d_bwd));
  ops.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update));
}

}  // namespace packfree
