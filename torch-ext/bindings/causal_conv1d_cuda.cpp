// In CUDA variants only: build.toml lists it with the CUDA kernels.
#include "bindings/causal_conv1d.h"
#include "bindings/cuda.h"
#include "cuda/causal_conv1d/causal_conv1d.h"

namespace packfree {
namespace {

std::tuple<Tensor, Tensor> causal_conv1d_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                             const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
                                             bool silu, bool channels_last, bool want_states) {
  const char* op = "causal_conv1d_fwd";
  CheckNoDouble(op, "x", x);
  const CudaCall call(op, x);
  ConvInputs inputs(op, x, weight, bias, initial_states, silu, channels_last);
  inputs.SetPacking(DevicePacking(op, cu_seqlens, x, inputs.tokens()));
  ConvForward out(inputs, want_states);
  Tensor owners = NewOwners(x, inputs.tokens());
  call.Check(CausalConv1dForwardCuda(out.args, OwnersOf(owners), call.stream()));
  return {out.y, out.final_states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_bwd(
    const Tensor& dy, const std::optional<Tensor>& dfinal_states, const Tensor& x, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states, bool silu,
    bool channels_last) {
  const char* op = "causal_conv1d_bwd";
  CheckNoDouble(op, "x", x);
  const CudaCall call(op, x);
  ConvInputs inputs(op, x, weight, bias, initial_states, silu, channels_last);
  inputs.SetPacking(DevicePacking(op, cu_seqlens, x, inputs.tokens()));
  const int64_t tiles = ConvTiles(inputs.x.size(0), inputs.args.row_tokens, channels_last);
  ConvBackward out(inputs, dy, dfinal_states, tiles);
  Tensor owners = NewOwners(x, inputs.tokens());
  call.Check(CausalConv1dBackwardCuda(out.args, OwnersOf(owners), call.stream()));
  return {out.dx, out.dweight, out.dbias, out.dinitial};
}

Tensor causal_conv1d_update(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& cache_seqlens,
                            const std::optional<Tensor>& conv_state_indices, bool silu) {
  const char* op = "causal_conv1d_update";
  CheckNoDouble(op, "x", x);
  const CudaCall call(op, x);
  const ConvUpdate step(op, x, conv_state, weight, bias, cache_seqlens, conv_state_indices, silu);
  call.Check(CausalConv1dUpdateCuda(step.args, step.rows, call.stream()));
  return step.y;
}

}  // namespace

void implement_causal_conv1d_cuda(OpLibrary& ops) {
  ops.impl("causal_conv1d_fwd", TORCH_BOX(&causal_conv1d_fwd));
  ops.impl("causal_conv1d_bwd", TORCH_BOX(&causal_conv1d_bwd));
  ops.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update));
}

}  // namespace packfree
