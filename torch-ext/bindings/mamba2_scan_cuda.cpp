// In CUDA variants only: build.toml lists it with the CUDA kernels.
#include "bindings/cuda.h"
#include "bindings/mamba2_scan.h"
#include "cuda/mamba2_scan/mamba2_scan.h"

namespace packfree {
namespace {

Tensor selective_state_update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                              const Tensor& C, const std::optional<Tensor>& D, const std::optional<Tensor>& z,
                              const std::optional<Tensor>& dt_bias, bool dt_softplus,
                              const std::optional<Tensor>& state_batch_indices) {
  const char* op = "selective_state_update";
  CheckNoDouble(op, "x", x);
  const CudaCall call(op, x);
  const StateUpdate step(op, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices);
  call.Check(SelectiveStateUpdateCuda(step.args, call.stream()));
  return step.y;
}

}  // namespace

void implement_mamba2_scan_cuda(OpLibrary& ops) {
  ops.impl("selective_state_update", TORCH_BOX(&selective_state_update));
}

}  // namespace packfree
