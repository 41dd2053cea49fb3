// In CUDA variants only: build.toml lists it with the CUDA kernels.
#include "bindings/cuda.h"
#include "bindings/mamba1_scan.h"
#include "cuda/mamba1_scan/mamba1_scan.h"

namespace packfree {
namespace {

std::tuple<Tensor, Tensor> mamba1_scan_fwd(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                           const Tensor& C, const std::optional<Tensor>& D,
                                           const std::optional<Tensor>& z, const std::optional<Tensor>& delta_bias,
                                           const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
                                           bool delta_softplus, bool channels_last, bool want_states) {
  const char* op = "mamba1_scan_fwd";
  CheckNoDouble(op, "u", u);
  const CudaCall call(op, u);
  ScanInputs inputs(op, u, delta, A, B, C, D, z, delta_bias, initial_states, delta_softplus, channels_last);
  inputs.SetPacking(DevicePacking(op, cu_seqlens, u, inputs.tokens()));
  ScanForward out(inputs, want_states);
  const Tensor scratch = NewTensor(u, {ScanForwardScratch(inputs.args)}, ScalarType::Float);
  call.Check(Mamba1ScanForwardCuda(out.args, FloatsOf(scratch), call.stream()));
  return {out.y, out.final_states};
}

ScanGradients mamba1_scan_bwd(const Tensor& dy, const std::optional<Tensor>& dfinal_states, const Tensor& u,
                              const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                              const std::optional<Tensor>& D, const std::optional<Tensor>& z,
                              const std::optional<Tensor>& delta_bias, const Tensor& cu_seqlens,
                              const std::optional<Tensor>& initial_states, bool delta_softplus, bool channels_last) {
  const char* op = "mamba1_scan_bwd";
  CheckNoDouble(op, "u", u);
  const CudaCall call(op, u);
  ScanInputs inputs(op, u, delta, A, B, C, D, z, delta_bias, initial_states, delta_softplus, channels_last);
  inputs.SetPacking(DevicePacking(op, cu_seqlens, u, inputs.tokens()));
  ScanBackward out(inputs, dy, dfinal_states, ScanTiles(inputs.tokens()), ScanColumns(inputs.args));
  const Tensor scratch = NewTensor(u, {ScanBackwardScratch(inputs.args)}, ScalarType::Float);
  call.Check(Mamba1ScanBackwardCuda(out.args, FloatsOf(scratch), call.stream()));
  return GradientsOf(out);
}

}  // namespace

void implement_mamba1_scan_cuda(OpLibrary& ops) {
  ops.impl("mamba1_scan_fwd", TORCH_BOX(&mamba1_scan_fwd));
  ops.impl("mamba1_scan_bwd", TORCH_BOX(&mamba1_scan_bwd));
}

}  // namespace packfree
