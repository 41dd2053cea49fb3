// What the causal convolution's ops check, allocate and register, alike on every device.
#pragma once

#include "bindings/tensors.h"
#include "common/causal_conv1d.h"
#include "torch_binding.h"

namespace packfree {

// x comes with its contiguous axis last: [B, T, D] with channels_last, else [B, D, T]. Outputs have the same order.
inline ConvStrides ConvStridesOf(const Tensor& tensor, bool channels_last) {
  if (channels_last) return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  return {tensor.stride(0), tensor.stride(2), tensor.stride(1)};
}

inline void CheckConvWidth(const char* op, int64_t width) {
  PACKFREE_CHECK(width >= kConvMinWidth && width <= kConvMaxWidth, op, ": weight must have width ", kConvMinWidth,
                 " to ", kConvMaxWidth, ", got ", width);
}

// The arguments that both directions share. The tensors that own the memory live in it too.
struct ConvInputs {
  const char* op;
  Tensor x, weight;
  std::optional<Tensor> bias, initial_states;
  ConvArgs args;

  ConvInputs(const char* op_, const Tensor& x_in, const Tensor& weight_in, const std::optional<Tensor>& bias_in,
             const std::optional<Tensor>& initial_in, bool silu, bool channels_last)
      : op(op_), x(DenseRows(x_in)), weight(weight_in), args{} {
    PACKFREE_CHECK(x.dim() == 3, op, ": x must have 3 dimensions");
    const int64_t channels = x.size(channels_last ? 2 : 1);
    PACKFREE_CHECK(weight.dim() == 2 && weight.size(0) == channels, op, ": weight must have shape [D, W]");
    const int64_t width = weight.size(1);
    CheckConvWidth(op, width);
    PACKFREE_CHECK(!bias_in.has_value() || (bias_in->dim() == 1 && bias_in->size(0) == channels), op,
                   ": bias must have shape [D]");
    const ScalarType acc = AccumulationType(x);
    // The kernels read W rows of D weights.
    weight = ToAccumulation(torch::stable::transpose(weight, 0, 1), acc);
    bias = ToAccumulation(bias_in, acc);
    initial_states = ToAccumulation(initial_in, acc);
    args.row_tokens = x.size(channels_last ? 1 : 2);
    args.channels = channels;
    args.width = static_cast<int>(width);
    args.silu = silu;
    args.channels_last = channels_last;
    args.x = x.const_data_ptr();
    args.x_strides = ConvStridesOf(x, channels_last);
    args.weight = weight.const_data_ptr();
    args.bias = DataOrNull(bias);
    args.initial_state = DataOrNull(initial_states);
    args.dtype = DtypeOf(op, x);
  }

  int64_t tokens() const { return x.size(0) * args.row_tokens; }
  // The boundaries, whose number must fit the initial states.
  void SetPacking(const PackingView& packing) {
    args.packing = packing;
    if (initial_states.has_value()) CheckStates("initial_states", *initial_states);
  }
  void CheckStates(const char* name, const Tensor& states) const {
    const std::vector<int64_t> shape = StateShape();
    PACKFREE_CHECK(
        states.dim() == 3 && states.size(0) == shape[0] && states.size(1) == shape[1] && states.size(2) == shape[2], op,
        ": ", name, " must have shape [N, D, W - 1]");
  }

  // A new tensor in x's axis order.
  Tensor NewLikeX() const { return NewTensor(x, {x.size(0), x.size(1), x.size(2)}, x.scalar_type()); }
  std::vector<int64_t> StateShape() const { return {args.packing.num_sequences, args.channels, args.width - 1}; }
};

// Outputs of the forward and the arguments that name them.
struct ConvForward {
  Tensor y, final_states;
  ConvForwardArgs args;

  ConvForward(const ConvInputs& inputs, bool want_states)
      : y(inputs.NewLikeX()),
        final_states(want_states ? NewTensor(inputs.x, inputs.StateShape(), inputs.x.scalar_type())
                                 : AbsentTensor(inputs.x, inputs.x.scalar_type())),
        args{inputs.args, y.mutable_data_ptr(), ConvStridesOf(y, inputs.args.channels_last), DataOrNull(final_states)} {
  }
};

// The same of the backward; `groups` is the first extent of the partial sums whose memory the kernel is given.
struct ConvBackward {
  Tensor dy, dx, dweight, dbias, dinitial, partials;
  std::optional<Tensor> dfinal;
  ConvBackwardArgs args;

  ConvBackward(const ConvInputs& inputs, const Tensor& dy_in, const std::optional<Tensor>& dfinal_states,
               int64_t groups)
      : dy(DenseRows(dy_in)), args{} {
    const Tensor& x = inputs.x;
    const ScalarType acc = AccumulationType(x);
    PACKFREE_CHECK(dy.dim() == 3 && dy.size(0) == x.size(0) && dy.size(1) == x.size(1) && dy.size(2) == x.size(2) &&
                       dy.scalar_type() == x.scalar_type(),
                   inputs.op, ": dy must have the shape and dtype of x");
    if (dfinal_states.has_value()) inputs.CheckStates("dfinal_states", *dfinal_states);
    dfinal = ToAccumulation(dfinal_states, acc);
    const bool initial = inputs.initial_states.has_value();
    const int64_t channels = inputs.args.channels, width = inputs.args.width;
    dx = inputs.NewLikeX();
    dinitial = initial ? NewTensor(x, inputs.StateShape(), acc) : AbsentTensor(x, acc);
    partials = NewTensor(x, {groups, width + 1, channels}, acc);
    dweight = NewTensor(x, {channels, width}, acc);
    dbias = inputs.bias.has_value() ? NewTensor(x, {channels}, acc) : AbsentTensor(x, acc);
    static_cast<ConvArgs&>(args) = inputs.args;
    args.dy = dy.const_data_ptr();
    args.dy_strides = ConvStridesOf(dy, inputs.args.channels_last);
    args.dfinal_state = DataOrNull(dfinal);
    args.dx = dx.mutable_data_ptr();
    args.dx_strides = ConvStridesOf(dx, inputs.args.channels_last);
    args.dinitial_state = DataOrNull(dinitial);
    args.dweight = dweight.mutable_data_ptr();
    args.dbias = DataOrNull(dbias);
    args.partials = DataOrNull(partials);
  }
};

// The arguments of one decode step, checked as far as shapes go.
struct ConvUpdate {
  Tensor taps, y;
  std::optional<Tensor> offset, seen, indices;
  int64_t rows;  // of conv_state
  ConvUpdateArgs args;

  ConvUpdate(const char* op, const Tensor& x, const Tensor& conv_state, const Tensor& weight,
             const std::optional<Tensor>& bias, const std::optional<Tensor>& cache_seqlens,
             const std::optional<Tensor>& conv_state_indices, bool silu)
      : args{} {
    PACKFREE_CHECK(x.dim() == 3 && conv_state.dim() == 3 && weight.dim() == 2, op,
                   ": x [B, D, T], conv_state [R, D, L] and weight [D, W] must have 3, 3 and 2 dimensions");
    const int64_t batch = x.size(0), channels = x.size(1), width = weight.size(1);
    rows = conv_state.size(0);
    CheckConvWidth(op, width);
    PACKFREE_CHECK(weight.size(0) == channels && conv_state.size(1) == channels && conv_state.size(2) >= width - 1 &&
                       conv_state.scalar_type() == x.scalar_type() && conv_state.device() == x.device(),
                   op, ": conv_state must have shape [R, D, L >= W - 1] and the dtype and device of x");
    PACKFREE_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == channels), op,
                   ": bias must have shape [D]");
    seen = ToAccumulation(cache_seqlens, ScalarType::Long);
    indices = ToAccumulation(conv_state_indices, ScalarType::Long);
    PACKFREE_CHECK(!seen.has_value() || (seen->dim() == 1 && seen->size(0) == batch), op,
                   ": cache_seqlens must have shape [B]");
    PACKFREE_CHECK(indices.has_value() ? indices->dim() == 1 && indices->size(0) == batch : rows == batch, op,
                   ": conv_state must have one row for each row of x, or conv_state_indices [B] must name them");
    const ScalarType acc = AccumulationType(x);
    taps = ToAccumulation(torch::stable::transpose(weight, 0, 1), acc);
    offset = ToAccumulation(bias, acc);
    y = NewTensor(x, {batch, channels, x.size(2)}, x.scalar_type());
    args.batch = batch;
    args.channels = channels;
    args.tokens = x.size(2);
    args.width = static_cast<int>(width);
    args.state_length = conv_state.size(2);
    args.silu = silu;
    args.x = x.const_data_ptr();
    args.x_strides = ConvStridesOf(x, false);
    args.state = conv_state.mutable_data_ptr();
    args.state_strides = ConvStridesOf(conv_state, false);
    args.state_rows = static_cast<const int64_t*>(DataOrNull(indices));
    args.cache_seqlens = static_cast<const int64_t*>(DataOrNull(seen));
    args.weight = taps.const_data_ptr();
    args.bias = DataOrNull(offset);
    args.y = y.mutable_data_ptr();
    args.dtype = DtypeOf(op, x);
  }
};

}  // namespace packfree
