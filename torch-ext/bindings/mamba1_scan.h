// What the selective scan's ops check and allocate, alike on every device.
#pragma once

#include "bindings/tensors.h"
#include "common/mamba1_scan.h"
#include "torch_binding.h"

namespace packfree {

// The tensor itself if channels or tokens lie side by side in it, else a contiguous copy; [B, D, T].
inline Tensor OneAxisInner(const Tensor& tensor) {
  const bool channels = tensor.size(1) <= 1 || tensor.stride(1) == 1;
  const bool tokens = tensor.size(2) <= 1 || tensor.stride(2) == 1;
  return channels || tokens ? tensor : Contiguous(tensor);
}

// Strides for the kernels, which read a tensor along its channels where their stride is 1, else along its tokens. An
// axis of one element may have any stride.
inline ScanStrides ScanStridesOf(const Tensor& tensor) {
  return {tensor.stride(0), tensor.size(1) <= 1 ? 1 : tensor.stride(1), tensor.stride(2)};
}

inline ScanInput ScanInputOf(const char* op, const Tensor& tensor) {
  return {tensor.const_data_ptr(), DtypeOf(op, tensor), ScanStridesOf(tensor)};
}

// The arguments that both directions share. The tensors that own the memory live in it too.
struct ScanInputs {
  const char* op;
  Tensor u, delta, A, B, C;
  std::optional<Tensor> D, z, delta_bias, initial_states;
  ScalarType acc;
  bool channels_last;
  ScanArgs args;

  ScanInputs(const char* op_, const Tensor& u_in, const Tensor& delta_in, const Tensor& A_in, const Tensor& B_in,
             const Tensor& C_in, const std::optional<Tensor>& D_in, const std::optional<Tensor>& z_in,
             const std::optional<Tensor>& delta_bias_in, const std::optional<Tensor>& initial_in, bool softplus,
             bool channels_last_in)
      : op(op_),
        u(u_in),
        delta(delta_in),
        A(A_in),
        B(B_in),
        C(C_in),
        acc(AccumulationType(u_in)),
        channels_last(channels_last_in),
        args{} {
    PACKFREE_CHECK(u.dim() == 3, op, ": u must have shape [B, D, T]");
    args.channels = u.size(1);
    args.row_tokens = u.size(2);
    u = Stream("u", u_in);
    delta = Stream("delta", delta_in);
    if (z_in.has_value()) z = Stream("z", *z_in);
    PACKFREE_CHECK(A_in.dim() == 2 && A_in.size(0) == args.channels, op, ": A must have shape [D, N]");
    args.states = A_in.size(1);
    for (const std::optional<Tensor>& vector : {D_in, delta_bias_in}) {
      PACKFREE_CHECK(!vector.has_value() || (vector->dim() == 1 && vector->size(0) == args.channels), op,
                     ": D and delta_bias must have shape [D]");
    }
    args.groups = B_in.dim() == 4 ? B_in.size(1) : C_in.dim() == 4 ? C_in.size(1) : 1;
    PACKFREE_CHECK(args.groups >= 1 && args.channels % args.groups == 0, op,
                   ": the groups of B and C must divide the channels, got ", args.groups, " groups of ", args.channels);
    A = ToAccumulation(A_in, acc);
    D = ToAccumulation(D_in, acc);
    delta_bias = ToAccumulation(delta_bias_in, acc);
    initial_states = ToAccumulation(initial_in, acc);
    args.B = Coefficients("B", B_in, &B);
    args.C = Coefficients("C", C_in, &C);
    args.softplus = softplus;
    args.u = ScanInputOf(op, u);
    args.delta = ScanInputOf(op, delta);
    if (z.has_value()) args.z = ScanInputOf(op, *z);
    args.A = A.const_data_ptr();
    args.D = DataOrNull(D);
    args.delta_bias = DataOrNull(delta_bias);
    args.initial_state = DataOrNull(initial_states);
    args.is_double = acc == ScalarType::Double;
  }

  // Checks a tensor [B, D, T] and makes it readable.
  Tensor Stream(const char* name, const Tensor& tensor) const {
    PACKFREE_CHECK(tensor.dim() == 3 && tensor.size(0) == u.size(0) && tensor.size(1) == args.channels &&
                       tensor.size(2) == args.row_tokens && tensor.device() == u.device(),
                   op, ": ", name, " must have the shape and device of u");
    CheckDtype(name, tensor);
    return OneAxisInner(tensor);
  }

  int64_t tokens() const { return u.size(0) * args.row_tokens; }
  // The boundaries, whose number must fit the initial states.
  void SetPacking(const PackingView& packing) {
    args.packing = packing;
    if (initial_states.has_value()) CheckStates("initial_states", *initial_states);
  }
  void CheckStates(const char* name, const Tensor& given) const {
    const std::vector<int64_t> shape = StateShape();
    PACKFREE_CHECK(
        given.dim() == 3 && given.size(0) == shape[0] && given.size(1) == shape[1] && given.size(2) == shape[2], op,
        ": ", name, " must have shape [sequences, D, N]");
  }

  // New outputs [B, T, D] with channels_last, else [B, D, T].
  Tensor NewStream(ScalarType dtype) const {
    const int64_t rows = u.size(0), channels = args.channels, tokens = args.row_tokens;
    return channels_last ? NewTensor(u, {rows, tokens, channels}, dtype)
                         : NewTensor(u, {rows, channels, tokens}, dtype);
  }
  ScanOutput OutputOf(const Tensor& tensor) const {
    const int64_t outer = tensor.stride(0), middle = tensor.stride(1);
    const ScanStrides strides = channels_last ? ScanStrides{outer, 1, middle} : ScanStrides{outer, middle, 1};
    return {tensor.mutable_data_ptr(), DtypeOf(op, tensor), strides};
  }
  std::vector<int64_t> StateShape() const { return {args.packing.num_sequences, args.channels, args.states}; }

 private:
  void CheckDtype(const char* name, const Tensor& tensor) const {
    DtypeOf(op, tensor);
    PACKFREE_CHECK((tensor.scalar_type() == ScalarType::Double) == (acc == ScalarType::Double), op, ": ", name,
                   " must be float64 where u is, and only there");
  }
  ScanCoefficients Coefficients(const char* name, const Tensor& given, Tensor* kept) const {
    if (given.dim() == 2) {
      PACKFREE_CHECK(given.size(0) == args.channels && given.size(1) == args.states, op, ": ", name,
                     " must have shape [D, N] or [B, G, N, T]");
      *kept = ToAccumulation(given, acc);
      return {kept->const_data_ptr(), true, DtypeOf(op, *kept), 0, 0, 0, 0};
    }
    PACKFREE_CHECK(given.dim() == 4 && given.size(0) == u.size(0) && given.size(1) == args.groups &&
                       given.size(2) == args.states && given.size(3) == args.row_tokens && given.device() == u.device(),
                   op, ": ", name, " must have shape [D, N] or [B, G, N, T] and the device of u");
    CheckDtype(name, given);
    // The kernels read along the states where their stride is 1, else along the tokens.
    const bool states = given.size(2) <= 1 || given.stride(2) == 1;
    const bool tokens = given.size(3) <= 1 || given.stride(3) == 1;
    *kept = states || tokens ? given : Contiguous(given);
    const int64_t state = kept->size(2) <= 1 ? 1 : kept->stride(2);
    return {kept->const_data_ptr(), false, DtypeOf(op, *kept), kept->stride(0),
            kept->stride(1),        state, kept->stride(3)};
  }
};

// Outputs of the forward and the arguments that name them.
struct ScanForward {
  Tensor y, final_states;
  ScanForwardArgs args;

  ScanForward(const ScanInputs& inputs, bool want_states)
      : y(inputs.NewStream(inputs.u.scalar_type())),
        final_states(want_states ? NewTensor(inputs.u, inputs.StateShape(), inputs.acc)
                                 : AbsentTensor(inputs.u, inputs.acc)),
        args{inputs.args, inputs.OutputOf(y), DataOrNull(final_states)} {}
};

// The same of the backward; `groups` and `channel_blocks` are the first extents of the partial sums whose memory the
// kernel is given.
struct ScanBackward {
  Tensor dy, du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial, parameters, dB_partials, dC_partials;
  std::optional<Tensor> dfinal;
  ScanBackwardArgs args;

  ScanBackward(const ScanInputs& inputs, const Tensor& dy_in, const std::optional<Tensor>& dfinal_states,
               int64_t groups, int64_t channel_blocks)
      : dy(dy_in), args{} {
    const ScanArgs& in = inputs.args;
    const Tensor& u = inputs.u;
    const ScalarType acc = inputs.acc;
    PACKFREE_CHECK(dy.dim() == 3 && dy.scalar_type() == u.scalar_type(), inputs.op, ": dy must have the dtype of u");
    dy = inputs.Stream("dy", inputs.channels_last ? torch::stable::transpose(dy, 1, 2) : dy);
    if (dfinal_states.has_value()) inputs.CheckStates("dfinal_states", *dfinal_states);
    dfinal = ToAccumulation(dfinal_states, acc);

    // dB and dC: [D, N] where fixed, else [B, T, G, N].
    const auto coefficient_gradient = [&](const ScanCoefficients& coefficients, const Tensor& tensor) {
      if (coefficients.fixed) return NewTensor(u, {in.channels, in.states}, acc);
      return NewTensor(u, {u.size(0), in.row_tokens, in.groups, in.states}, tensor.scalar_type());
    };
    const auto token_partials = [&](const ScanCoefficients& coefficients) {
      if (coefficients.fixed) return AbsentTensor(u, acc);
      return NewTensor(u, {channel_blocks, in.packing.tokens, in.states}, acc);
    };
    const auto vector_gradient = [&](const std::optional<Tensor>& tensor) {
      return tensor.has_value() ? NewTensor(u, {in.channels}, acc) : AbsentTensor(u, acc);
    };
    du = inputs.NewStream(u.scalar_type());
    ddelta = inputs.NewStream(inputs.delta.scalar_type());
    dA = NewTensor(u, {in.channels, in.states}, acc);
    dB = coefficient_gradient(in.B, inputs.B);
    dC = coefficient_gradient(in.C, inputs.C);
    dD = vector_gradient(inputs.D);
    dz = inputs.z.has_value() ? inputs.NewStream(inputs.z->scalar_type()) : AbsentTensor(u, u.scalar_type());
    ddelta_bias = vector_gradient(inputs.delta_bias);
    const bool initial = inputs.initial_states.has_value();
    dinitial = initial ? NewTensor(u, inputs.StateShape(), acc) : AbsentTensor(u, acc);
    parameters = NewTensor(u, {groups, ScanParameterRows(in), in.channels}, acc);
    dB_partials = token_partials(in.B);
    dC_partials = token_partials(in.C);

    static_cast<ScanArgs&>(args) = in;
    args.dy = ScanInputOf(inputs.op, dy);
    args.dfinal_state = DataOrNull(dfinal);
    args.du = inputs.OutputOf(du);
    args.ddelta = inputs.OutputOf(ddelta);
    if (inputs.z.has_value()) args.dz = inputs.OutputOf(dz);
    args.dinitial_state = DataOrNull(dinitial);
    args.dA = DataOrNull(dA);
    args.dB = DataOrNull(dB);
    args.dC = DataOrNull(dC);
    args.dD = DataOrNull(dD);
    args.ddelta_bias = DataOrNull(ddelta_bias);
    args.parameter_partials = DataOrNull(parameters);
    args.dB_partials = DataOrNull(dB_partials);
    args.dC_partials = DataOrNull(dC_partials);
  }
};

// What mamba1_scan_bwd returns.
using ScanGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
inline ScanGradients GradientsOf(const ScanBackward& out) {
  return {out.du, out.ddelta, out.dA, out.dB, out.dC, out.dD, out.dz, out.ddelta_bias, out.dinitial};
}

}  // namespace packfree
