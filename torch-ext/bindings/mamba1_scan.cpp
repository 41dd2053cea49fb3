#include "bindings/mamba1_scan.h"

#include "cpu/mamba1_scan/mamba1_scan.h"

namespace packfree {
namespace {

PackingView ScanPacking(const ScanInputs& inputs, const Tensor& cu_seqlens) {
  const PackingView packing = CheckedPacking(inputs.op, cu_seqlens, inputs.tokens());
  CheckRowsAreCut(inputs.op, packing, inputs.args.row_tokens);
  return packing;
}

std::tuple<Tensor, Tensor> mamba1_scan_fwd(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                           const Tensor& C, const std::optional<Tensor>& D,
                                           const std::optional<Tensor>& z, const std::optional<Tensor>& delta_bias,
                                           const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
                                           bool delta_softplus, bool channels_last, bool want_states) {
  const char* op = "mamba1_scan_fwd";
  ScanInputs inputs(op, u, delta, A, B, C, D, z, delta_bias, initial_states, delta_softplus, channels_last);
  inputs.SetPacking(ScanPacking(inputs, cu_seqlens));
  ScanForward out(inputs, want_states);
  Mamba1ScanForwardCpu(CheckedTier(op), out.args);
  return {out.y, out.final_states};
}

ScanGradients mamba1_scan_bwd(const Tensor& dy, const std::optional<Tensor>& dfinal_states, const Tensor& u,
                              const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                              const std::optional<Tensor>& D, const std::optional<Tensor>& z,
                              const std::optional<Tensor>& delta_bias, const Tensor& cu_seqlens,
                              const std::optional<Tensor>& initial_states, bool delta_softplus, bool channels_last) {
  const char* op = "mamba1_scan_bwd";
  ScanInputs inputs(op, u, delta, A, B, C, D, z, delta_bias, initial_states, delta_softplus, channels_last);
  inputs.SetPacking(ScanPacking(inputs, cu_seqlens));
  ScanBackward out(inputs, dy, dfinal_states, 0, 0);
  Mamba1ScanBackwardCpu(CheckedTier(op), out.args);
  return GradientsOf(out);
}

}  // namespace

void define_mamba1_scan(OpLibrary& ops) {
  ops.def(
      "mamba1_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "Tensor cu_seqlens, Tensor? initial_states, bool delta_softplus, bool channels_last, bool want_states) "
      "-> (Tensor y, Tensor final_states)");
  ops.def(
      "mamba1_scan_bwd(Tensor dy, Tensor? dfinal_states, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, Tensor cu_seqlens, Tensor? initial_states, bool delta_softplus, "
      "bool channels_last) -> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
      "Tensor ddelta_bias, Tensor dinitial_states)");
}

void implement_mamba1_scan_cpu(OpLibrary& ops) {
  ops.impl("mamba1_scan_fwd", TORCH_BOX(&mamba1_scan_fwd));
  ops.impl("mamba1_scan_bwd", TORCH_BOX(&mamba1_scan_bwd));
}

}  // namespace packfree
