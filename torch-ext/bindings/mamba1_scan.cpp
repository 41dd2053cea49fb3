#include "cpu/mamba1_scan/mamba1_scan.h"

#include "bindings/tensors.h"
#include "torch_binding.h"

namespace packfree {
namespace {

// The tensor itself if channels or tokens lie side by side in it, else a contiguous copy; [B, D, T].
Tensor OneAxisInner(const Tensor& tensor) {
  const bool channels = tensor.size(1) <= 1 || tensor.stride(1) == 1;
  const bool tokens = tensor.size(2) <= 1 || tensor.stride(2) == 1;
  return channels || tokens ? tensor : Contiguous(tensor);
}

// Strides for the kernels, which read a tensor along its channels where their stride is 1, else along its tokens. An
// axis of one element may have any stride.
ScanStrides StridesOf(const Tensor& tensor) {
  return {tensor.stride(0), tensor.size(1) <= 1 ? 1 : tensor.stride(1), tensor.stride(2)};
}

ScanInput InputOf(const char* op, const Tensor& tensor) {
  return {tensor.const_data_ptr(), DtypeOf(op, tensor), StridesOf(tensor)};
}

Tensor ToAccumulation(const Tensor& tensor, ScalarType acc) { return Contiguous(torch::stable::to(tensor, acc)); }
std::optional<Tensor> ToAccumulation(const std::optional<Tensor>& tensor, ScalarType acc) {
  if (!tensor.has_value()) return std::nullopt;
  return ToAccumulation(*tensor, acc);
}

// The arguments that both directions share. The tensors that own the memory live in it too.
struct ScanInputs {
  Tensor u, delta, A, B, C, cu_seqlens;
  std::optional<Tensor> D, z, delta_bias, initial_states;
  ScalarType acc;
  bool channels_last;
  ScanArgs args;

  ScanInputs(const char* op, const Tensor& u_in, const Tensor& delta_in, const Tensor& A_in, const Tensor& B_in,
             const Tensor& C_in, const std::optional<Tensor>& D_in, const std::optional<Tensor>& z_in,
             const std::optional<Tensor>& delta_bias_in, const Tensor& cu_seqlens_in,
             const std::optional<Tensor>& initial_in, bool softplus, bool channels_last_in)
      : u(u_in), delta(delta_in), A(A_in), B(B_in), C(C_in), cu_seqlens(cu_seqlens_in), acc(AccumulationType(u_in)),
        channels_last(channels_last_in), args{} {
    STD_TORCH_CHECK(u.dim() == 3, op, ": u must have shape [B, D, T]");
    args.channels = u.size(1);
    args.row_tokens = u.size(2);
    u = Stream(op, "u", u_in);
    delta = Stream(op, "delta", delta_in);
    if (z_in.has_value()) z = Stream(op, "z", *z_in);
    STD_TORCH_CHECK(A_in.dim() == 2 && A_in.size(0) == args.channels, op, ": A must have shape [D, N]");
    args.states = A_in.size(1);
    args.packing = CheckedPacking(op, cu_seqlens, u.size(0) * args.row_tokens);
    const PackingView& packing = args.packing;
    for (int64_t n = 0; n < packing.num_sequences; ++n) {
      STD_TORCH_CHECK(packing.length(n) == 0 ||
                          packing.bos(n) / args.row_tokens == (packing.eos(n) - 1) / args.row_tokens,
                      op, ": cu_seqlens must end a sequence where a row ends, got one from ", packing.bos(n), " to ",
                      packing.eos(n), " in rows of ", args.row_tokens);
    }
    for (const std::optional<Tensor>& vector : {D_in, delta_bias_in}) {
      STD_TORCH_CHECK(!vector.has_value() || (vector->dim() == 1 && vector->size(0) == args.channels), op,
                      ": D and delta_bias must have shape [D]");
    }
    STD_TORCH_CHECK(!initial_in.has_value() ||
                        (initial_in->dim() == 3 && initial_in->size(0) == packing.num_sequences &&
                         initial_in->size(1) == args.channels && initial_in->size(2) == args.states),
                    op, ": initial_states must have shape [sequences, D, N]");
    args.groups = B_in.dim() == 4 ? B_in.size(1) : C_in.dim() == 4 ? C_in.size(1) : 1;
    STD_TORCH_CHECK(args.groups >= 1 && args.channels % args.groups == 0, op,
                    ": the groups of B and C must divide the channels, got ", args.groups, " groups of ",
                    args.channels);
    A = ToAccumulation(A_in, acc);
    D = ToAccumulation(D_in, acc);
    delta_bias = ToAccumulation(delta_bias_in, acc);
    initial_states = ToAccumulation(initial_in, acc);
    args.B = Coefficients(op, "B", B_in, &B);
    args.C = Coefficients(op, "C", C_in, &C);
    args.softplus = softplus;
    args.u = InputOf(op, u);
    args.delta = InputOf(op, delta);
    if (z.has_value()) args.z = InputOf(op, *z);
    args.A = A.const_data_ptr();
    args.D = DataOrNull(D);
    args.delta_bias = DataOrNull(delta_bias);
    args.initial_state = DataOrNull(initial_states);
    args.is_double = acc == ScalarType::Double;
    args.tier = CheckedTier(op);
  }

  // Checks a tensor [B, D, T] and makes it readable.
  Tensor Stream(const char* op, const char* name, const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == u.size(0) && tensor.size(1) == args.channels &&
                        tensor.size(2) == args.row_tokens && tensor.is_cpu(),
                    op, ": ", name, " must be a CPU tensor with the shape of u");
    CheckDtype(op, name, tensor);
    return OneAxisInner(tensor);
  }

  // New outputs [B, T, D] with channels_last, else [B, D, T]. Tokens that no sequence owns are 0.
  Tensor NewStream(ScalarType dtype) const {
    const int64_t rows = u.size(0), channels = args.channels, tokens = args.row_tokens;
    return Cleared(channels_last ? NewTensor(u, {rows, tokens, channels}, dtype)
                                 : NewTensor(u, {rows, channels, tokens}, dtype));
  }
  ScanOutput OutputOf(const char* op, const Tensor& tensor) const {
    const int64_t outer = tensor.stride(0), middle = tensor.stride(1);
    const ScanStrides strides = channels_last ? ScanStrides{outer, 1, middle} : ScanStrides{outer, middle, 1};
    return {tensor.mutable_data_ptr(), DtypeOf(op, tensor), strides};
  }
  Tensor Cleared(Tensor tensor) const {
    if (args.packing.end() < args.packing.tokens) torch::stable::zero_(tensor);
    return tensor;
  }
  std::vector<int64_t> StateShape() const { return {args.packing.num_sequences, args.channels, args.states}; }

 private:
  void CheckDtype(const char* op, const char* name, const Tensor& tensor) const {
    DtypeOf(op, tensor);
    STD_TORCH_CHECK((tensor.scalar_type() == ScalarType::Double) == (acc == ScalarType::Double), op, ": ", name,
                    " must be float64 where u is, and only there");
  }
  ScanCoefficients Coefficients(const char* op, const char* name, const Tensor& given, Tensor* kept) const {
    if (given.dim() == 2) {
      STD_TORCH_CHECK(given.size(0) == args.channels && given.size(1) == args.states, op, ": ", name,
                      " must have shape [D, N] or [B, G, N, T]");
      *kept = ToAccumulation(given, acc);
      return {kept->const_data_ptr(), true, DtypeOf(op, *kept), 0, 0, 0, 0};
    }
    STD_TORCH_CHECK(given.dim() == 4 && given.size(0) == u.size(0) && given.size(1) == args.groups &&
                        given.size(2) == args.states && given.size(3) == args.row_tokens && given.is_cpu(),
                    op, ": ", name, " must be a CPU tensor with shape [D, N] or [B, G, N, T]");
    CheckDtype(op, name, given);
    // The kernels read along the states where their stride is 1, else along the tokens.
    const bool states = given.size(2) <= 1 || given.stride(2) == 1;
    const bool tokens = given.size(3) <= 1 || given.stride(3) == 1;
    *kept = states || tokens ? given : Contiguous(given);
    const int64_t state = kept->size(2) <= 1 ? 1 : kept->stride(2);
    return {kept->const_data_ptr(), false, DtypeOf(op, *kept), kept->stride(0), kept->stride(1), state,
            kept->stride(3)};
  }
};

std::tuple<Tensor, Tensor> mamba1_scan_fwd(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                           const Tensor& C, const std::optional<Tensor>& D,
                                           const std::optional<Tensor>& z, const std::optional<Tensor>& delta_bias,
                                           const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
                                           bool delta_softplus, bool channels_last, bool want_states) {
  const char* op = "mamba1_scan_fwd";
  const ScanInputs inputs(op, u, delta, A, B, C, D, z, delta_bias, cu_seqlens, initial_states, delta_softplus,
                          channels_last);
  Tensor y = inputs.NewStream(u.scalar_type());
  Tensor final_states = want_states ? NewTensor(u, inputs.StateShape(), inputs.acc) : AbsentTensor(u, inputs.acc);
  ScanForwardArgs args{};
  static_cast<ScanArgs&>(args) = inputs.args;
  args.y = inputs.OutputOf(op, y);
  args.final_state = DataOrNull(final_states);
  mamba1_scan_fwd_cpu(args);
  return {y, final_states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mamba1_scan_bwd(
    const Tensor& dy, const std::optional<Tensor>& dfinal_states, const Tensor& u, const Tensor& delta,
    const Tensor& A, const Tensor& B, const Tensor& C, const std::optional<Tensor>& D, const std::optional<Tensor>& z,
    const std::optional<Tensor>& delta_bias, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
    bool delta_softplus, bool channels_last) {
  const char* op = "mamba1_scan_bwd";
  const ScanInputs inputs(op, u, delta, A, B, C, D, z, delta_bias, cu_seqlens, initial_states, delta_softplus,
                          channels_last);
  const ScalarType acc = inputs.acc;
  STD_TORCH_CHECK(dy.dim() == 3 && dy.scalar_type() == u.scalar_type(), op, ": dy must have the dtype of u");
  const Tensor dy_read = inputs.Stream(op, "dy", channels_last ? torch::stable::transpose(dy, 1, 2) : dy);
  const std::vector<int64_t> state_shape = inputs.StateShape();
  STD_TORCH_CHECK(!dfinal_states.has_value() ||
                      (dfinal_states->dim() == 3 && dfinal_states->size(0) == state_shape[0] &&
                       dfinal_states->size(1) == state_shape[1] && dfinal_states->size(2) == state_shape[2]),
                  op, ": dfinal_states must have shape [sequences, D, N]");
  const std::optional<Tensor> dfinal_read = ToAccumulation(dfinal_states, acc);
  const ScanArgs& in = inputs.args;
  const int64_t rows = u.size(0);

  // dB and dC: [D, N] where fixed, else [B, T, G, N].
  const auto coefficient_gradient = [&](const ScanCoefficients& coefficients, const Tensor& tensor) {
    if (coefficients.fixed) return NewTensor(u, {in.channels, in.states}, acc);
    return inputs.Cleared(NewTensor(u, {rows, in.row_tokens, in.groups, in.states}, tensor.scalar_type()));
  };
  const auto token_partials = [&](const ScanCoefficients& coefficients) {
    if (coefficients.fixed) return AbsentTensor(u, acc);
    return NewTensor(u, {ScanChannelBlocks(in), in.packing.tokens, in.states}, acc);
  };
  const auto vector_gradient = [&](const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? NewTensor(u, {in.channels}, acc) : AbsentTensor(u, acc);
  };
  Tensor du = inputs.NewStream(u.scalar_type());
  Tensor ddelta = inputs.NewStream(delta.scalar_type());
  Tensor dA = NewTensor(u, {in.channels, in.states}, acc);
  Tensor dB = coefficient_gradient(in.B, B);
  Tensor dC = coefficient_gradient(in.C, C);
  Tensor dD = vector_gradient(D);
  Tensor dz = z.has_value() ? inputs.NewStream(z->scalar_type()) : AbsentTensor(u, u.scalar_type());
  Tensor ddelta_bias = vector_gradient(delta_bias);
  Tensor dinitial = initial_states.has_value() ? NewTensor(u, state_shape, acc) : AbsentTensor(u, acc);
  const Tensor parameters = NewTensor(u, {ScanGroups(in.packing), ScanParameterRows(in), in.channels}, acc);
  const Tensor dB_partials = token_partials(in.B), dC_partials = token_partials(in.C);

  ScanBackwardArgs args{};
  static_cast<ScanArgs&>(args) = in;
  args.dy = InputOf(op, dy_read);
  args.dfinal_state = DataOrNull(dfinal_read);
  args.du = inputs.OutputOf(op, du);
  args.ddelta = inputs.OutputOf(op, ddelta);
  if (z.has_value()) args.dz = inputs.OutputOf(op, dz);
  args.dinitial_state = DataOrNull(dinitial);
  args.dA = DataOrNull(dA);
  args.dB = DataOrNull(dB);
  args.dC = DataOrNull(dC);
  args.dD = DataOrNull(dD);
  args.ddelta_bias = DataOrNull(ddelta_bias);
  args.parameter_partials = DataOrNull(parameters);
  args.dB_partials = DataOrNull(dB_partials);
  args.dC_partials = DataOrNull(dC_partials);
  mamba1_scan_bwd_cpu(args);
  return {du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial};
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
