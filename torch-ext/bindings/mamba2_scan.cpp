#include "cpu/mamba2_scan/mamba2_scan.h"

#include "bindings/mamba2_scan.h"
#include "bindings/slots.h"
#include "bindings/tensors.h"
#include "torch_binding.h"

namespace packfree {

namespace {

// The inputs of both directions, checked and kept alive.
struct CheckedScan {
  Tensor x, dt, a, b, c;
  std::optional<Tensor> d, z, dt_bias, initial_state;
  Mamba2ScanInputs view;
  Dtype dtype;
  ScalarType accumulation;
  int64_t tokens, sequences, heads, head_dim, groups, state_dim;

  CheckedScan(const char* op, const Tensor& x_in, const Tensor& dt_in, const Tensor& a_in, const Tensor& b_in,
              const Tensor& c_in, const std::optional<Tensor>& d_in, const std::optional<Tensor>& z_in,
              const std::optional<Tensor>& bias_in, const Tensor& cu_seqlens, const std::optional<Tensor>& state_in,
              bool softplus, double dt_min, double dt_max)
      : dtype(DtypeOf(op, x_in)), accumulation(AccumulationType(x_in)) {
    PACKFREE_CHECK(x_in.dim() == 3 && b_in.dim() == 3 && c_in.dim() == 3, op,
                   ": x must have shape [T, H, P], B and C [T, G, S]");
    x = DenseRows(x_in);
    b = DenseRows(b_in);
    c = DenseRows(c_in);
    tokens = x.size(0), heads = x.size(1), head_dim = x.size(2), groups = b.size(1), state_dim = b.size(2);
    PACKFREE_CHECK(b.scalar_type() == x.scalar_type() && c.scalar_type() == x.scalar_type(), op,
                   ": x, B and C must have one dtype");
    PACKFREE_CHECK(b.size(0) == tokens && c.size(0) == tokens && c.size(1) == groups && c.size(2) == state_dim, op,
                   ": x must have shape [T, H, P], B and C [T, G, S]");
    PACKFREE_CHECK(heads > 0 && head_dim > 0 && groups > 0 && state_dim > 0 && heads % groups == 0, op,
                   ": H must be a multiple of G, and H, P, G and S at least 1");
    dt = CheckedParameter(op, "dt", dt_in, {tokens, heads});
    a = CheckedParameter(op, "A", a_in, {heads});
    if (d_in.has_value()) d = CheckedParameter(op, "D", *d_in, {heads, head_dim});
    if (bias_in.has_value()) dt_bias = CheckedParameter(op, "dt_bias", *bias_in, {heads});
    if (z_in.has_value()) {
      PACKFREE_CHECK(z_in->dim() == 3 && z_in->size(0) == tokens && z_in->size(1) == heads &&
                         z_in->size(2) == head_dim && z_in->scalar_type() == x.scalar_type(),
                     op, ": z must have the shape and dtype of x");
      z = DenseRows(*z_in);
    }
    const PackingView packing = CheckedPacking(op, cu_seqlens, tokens);
    sequences = packing.num_sequences;
    initial_state = CheckedState(op, "initial_state", state_in);
    view = Mamba2ScanInputs{dtype,
                            packing,
                            heads,
                            groups,
                            head_dim,
                            state_dim,
                            x.const_data_ptr(),
                            b.const_data_ptr(),
                            c.const_data_ptr(),
                            DataOrNull(z),
                            x.stride(0),
                            x.stride(1),
                            b.stride(0),
                            b.stride(1),
                            c.stride(0),
                            c.stride(1),
                            z.has_value() ? z->stride(0) : 0,
                            z.has_value() ? z->stride(1) : 0,
                            dt.const_data_ptr(),
                            a.const_data_ptr(),
                            DataOrNull(d),
                            DataOrNull(dt_bias),
                            DataOrNull(initial_state),
                            softplus,
                            dt_min,
                            dt_max};
  }

  // A tensor of the accumulation type, contiguous.
  Tensor CheckedParameter(const char* op, const char* argument, const Tensor& tensor,
                          const std::vector<int64_t>& sizes) const {
    bool fits = tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.scalar_type() == accumulation;
    for (size_t i = 0; fits && i < sizes.size(); ++i) fits = tensor.size(static_cast<int64_t>(i)) == sizes[i];
    PACKFREE_CHECK(fits, op, ": ", argument,
                   " must have dtype float32 (float64 beside float64) and its shape: dt [T, H], A and dt_bias [H], "
                   "D [H, P]");
    return Contiguous(tensor);
  }

  // States [N, H, P, S] or their gradient, contiguous.
  std::optional<Tensor> CheckedState(const char* op, const char* argument, const std::optional<Tensor>& state) const {
    if (!state.has_value()) return std::nullopt;
    PACKFREE_CHECK(state->dim() == 4 && state->size(0) == sequences && state->size(1) == heads &&
                       state->size(2) == head_dim && state->size(3) == state_dim &&
                       state->scalar_type() == accumulation,
                   op, ": ", argument, " must have shape [N, H, P, S] and dtype float32 (float64 beside float64)");
    return Contiguous(*state);
  }

  Tensor New(const std::vector<int64_t>& sizes) const { return NewTensor(x, sizes, x.scalar_type()); }
  Tensor NewWide(const std::vector<int64_t>& sizes) const { return NewTensor(x, sizes, accumulation); }
  Tensor NewState() const { return NewWide({sequences, heads, head_dim, state_dim}); }
  Tensor Absent() const { return AbsentTensor(x, accumulation); }
};

std::tuple<Tensor, Tensor> mamba2_scan_fwd(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                                           const Tensor& C, const std::optional<Tensor>& D,
                                           const std::optional<Tensor>& z, const std::optional<Tensor>& dt_bias,
                                           const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
                                           bool dt_softplus, double dt_min, double dt_max, bool want_state) {
  const char* op = "mamba2_scan_fwd";
  const CheckedScan in(op, x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max);
  Tensor y = in.New({in.tokens, in.heads, in.head_dim});
  Tensor final_state = want_state ? in.NewState() : in.Absent();
  Mamba2ScanForwardCpu(CheckedTier(op), {in.view, y.mutable_data_ptr(), DataOrNull(final_state)});
  return {y, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mamba2_scan_bwd(
    const Tensor& dy, const std::optional<Tensor>& dfinal_state, const Tensor& x, const Tensor& dt, const Tensor& A,
    const Tensor& B, const Tensor& C, const std::optional<Tensor>& D, const std::optional<Tensor>& z,
    const std::optional<Tensor>& dt_bias, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_state,
    bool dt_softplus, double dt_min, double dt_max) {
  const char* op = "mamba2_scan_bwd";
  const CheckedScan in(op, x, dt, A, B, C, D, z, dt_bias, cu_seqlens, initial_state, dt_softplus, dt_min, dt_max);
  PACKFREE_CHECK(dy.dim() == 3 && dy.size(0) == in.tokens && dy.size(1) == in.heads && dy.size(2) == in.head_dim &&
                     dy.scalar_type() == in.x.scalar_type(),
                 op, ": dy must have the shape and dtype of x");
  const Tensor dy_rows = Contiguous(dy);
  const std::optional<Tensor> dfinal = in.CheckedState(op, "dfinal_state", dfinal_state);
  Tensor dx = in.New({in.tokens, in.heads, in.head_dim});
  Tensor ddt = in.NewWide({in.tokens, in.heads});
  Tensor dA = in.NewWide({in.heads});
  Tensor dB = in.New({in.tokens, in.groups, in.state_dim});
  Tensor dC = in.New({in.tokens, in.groups, in.state_dim});
  Tensor dD = in.d.has_value() ? in.NewWide({in.heads, in.head_dim}) : in.Absent();
  Tensor dz = in.z.has_value() ? in.New({in.tokens, in.heads, in.head_dim}) : AbsentTensor(in.x, in.x.scalar_type());
  Tensor ddt_bias = in.dt_bias.has_value() ? in.NewWide({in.heads}) : in.Absent();
  Tensor dinitial = in.initial_state.has_value() ? in.NewState() : in.Absent();
  Mamba2ScanBackwardCpu(CheckedTier(op),
                        {in.view, dy_rows.const_data_ptr(), DataOrNull(dfinal), dx.mutable_data_ptr(),
                         ddt.mutable_data_ptr(), dA.mutable_data_ptr(), dB.mutable_data_ptr(), dC.mutable_data_ptr(),
                         DataOrNull(dD), DataOrNull(dz), DataOrNull(ddt_bias), DataOrNull(dinitial)});
  return {dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial};
}

Tensor selective_state_update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                              const Tensor& C, const std::optional<Tensor>& D, const std::optional<Tensor>& z,
                              const std::optional<Tensor>& dt_bias, bool dt_softplus,
                              const std::optional<Tensor>& state_batch_indices) {
  const char* op = "selective_state_update";
  const StateUpdate step(op, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices);
  CheckSlots(op, "state_batch_indices", "state", step.args.state_of, step.args.batch, step.args.num_states);
  SelectiveStateUpdateCpu(CheckedTier(op), step.args);
  return step.y;
}

}  // namespace

void define_mamba2_scan(OpLibrary& ops) {
  ops.def(
      "mamba2_scan_fwd(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
      "Tensor cu_seqlens, Tensor? initial_state, bool dt_softplus, float dt_min, float dt_max, bool want_state) "
      "-> (Tensor y, Tensor final_state)");
  ops.def(
      "mamba2_scan_bwd(Tensor dy, Tensor? dfinal_state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? dt_bias, Tensor cu_seqlens, Tensor? initial_state, bool dt_softplus, float dt_min, "
      "float dt_max) -> (Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
      "Tensor ddt_bias, Tensor dinitial_state)");
  ops.def(
      "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices=None) -> Tensor");
}

void implement_mamba2_scan_cpu(OpLibrary& ops) {
  ops.impl("mamba2_scan_fwd", TORCH_BOX(&mamba2_scan_fwd));
  ops.impl("mamba2_scan_bwd", TORCH_BOX(&mamba2_scan_bwd));
  ops.impl("selective_state_update", TORCH_BOX(&selective_state_update));
}

}  // namespace packfree
