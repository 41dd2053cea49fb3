#include "bindings/tensors.h"
#include "cpu/causal_conv1d/causal_conv1d.h"
#include "torch_binding.h"

namespace packfree {
namespace {

// x comes with its contiguous axis last: [B, T, D] with channels_last, else [B, D, T]. Outputs have the same order.
ConvStrides StridesOf(const Tensor& tensor, bool channels_last) {
  if (channels_last) return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
  return {tensor.stride(0), tensor.stride(2), tensor.stride(1)};
}

// The tensor itself if its last axis has stride 1, else a contiguous copy.
Tensor InnerContiguous(const Tensor& tensor) {
  return tensor.size(2) <= 1 || tensor.stride(2) == 1 ? tensor : Contiguous(tensor);
}

Tensor ToAccumulation(const Tensor& tensor, ScalarType acc) {
  return Contiguous(torch::stable::to(tensor, acc));
}
std::optional<Tensor> ToAccumulation(const std::optional<Tensor>& tensor, ScalarType acc) {
  if (!tensor.has_value()) return std::nullopt;
  return ToAccumulation(*tensor, acc);
}

// The arguments that both directions share. The tensors that own the memory live in it too.
struct ConvInputs {
  Tensor x, weight, cu_seqlens;
  std::optional<Tensor> bias, initial_states;
  ConvArgs args;

  ConvInputs(const char* op, const Tensor& x_in, const Tensor& weight_in, const std::optional<Tensor>& bias_in,
             const Tensor& cu_seqlens_in, const std::optional<Tensor>& initial_in, bool silu, bool channels_last)
      : x(InnerContiguous(x_in)), weight(weight_in), cu_seqlens(cu_seqlens_in), args{} {
    STD_TORCH_CHECK(x.dim() == 3, op, ": x must have 3 dimensions");
    const int64_t channels = x.size(channels_last ? 2 : 1), row_tokens = x.size(channels_last ? 1 : 2);
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == channels, op, ": weight must have shape [D, W]");
    const int64_t width = weight.size(1);
    STD_TORCH_CHECK(width >= kConvMinWidth && width <= kConvMaxWidth, op, ": weight must have width ", kConvMinWidth,
                    " to ", kConvMaxWidth, ", got ", width);
    STD_TORCH_CHECK(!bias_in.has_value() || (bias_in->dim() == 1 && bias_in->size(0) == channels), op,
                    ": bias must have shape [D]");
    const PackingView packing = CheckedPacking(op, cu_seqlens, x.size(0) * row_tokens);
    for (int64_t n = 0; n < packing.num_sequences; ++n) {
      STD_TORCH_CHECK(packing.length(n) == 0 || packing.bos(n) / row_tokens == (packing.eos(n) - 1) / row_tokens, op,
                      ": cu_seqlens must end a sequence where a row ends, got one from ", packing.bos(n), " to ",
                      packing.eos(n), " in rows of ", row_tokens);
    }
    STD_TORCH_CHECK(!initial_in.has_value() ||
                        (initial_in->dim() == 3 && initial_in->size(0) == packing.num_sequences &&
                         initial_in->size(1) == channels && initial_in->size(2) == width - 1),
                    op, ": initial_states must have shape [N, D, W - 1]");
    const ScalarType acc = AccumulationType(x);
    // The kernels read W rows of D weights.
    weight = ToAccumulation(torch::stable::transpose(weight, 0, 1), acc);
    bias = ToAccumulation(bias_in, acc);
    initial_states = ToAccumulation(initial_in, acc);
    args.packing = packing;
    args.row_tokens = row_tokens;
    args.channels = channels;
    args.width = static_cast<int>(width);
    args.silu = silu;
    args.channels_last = channels_last;
    args.x = x.const_data_ptr();
    args.x_strides = StridesOf(x, channels_last);
    args.weight = weight.const_data_ptr();
    args.bias = DataOrNull(bias);
    args.initial_state = DataOrNull(initial_states);
    args.dtype = DtypeOf(op, x);
    args.tier = CheckedTier(op);
  }

  // A new tensor in x's axis order. Tokens that no sequence owns are 0.
  Tensor NewLikeX() const {
    Tensor tensor = NewTensor(x, {x.size(0), x.size(1), x.size(2)}, x.scalar_type());
    if (args.packing.end() < args.packing.tokens) torch::stable::zero_(tensor);
    return tensor;
  }
  std::vector<int64_t> StateShape() const { return {args.packing.num_sequences, args.channels, args.width - 1}; }
};

std::tuple<Tensor, Tensor> causal_conv1d_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                             const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states,
                                             bool silu, bool channels_last, bool want_states) {
  const ConvInputs inputs("causal_conv1d_fwd", x, weight, bias, cu_seqlens, initial_states, silu, channels_last);
  Tensor y = inputs.NewLikeX();
  Tensor final_states = want_states ? NewTensor(x, inputs.StateShape(), x.scalar_type())
                                    : AbsentTensor(x, x.scalar_type());
  ConvForwardArgs args{inputs.args, y.mutable_data_ptr(), StridesOf(y, channels_last), DataOrNull(final_states)};
  causal_conv1d_fwd_cpu(args);
  return {y, final_states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_bwd(
    const Tensor& dy, const std::optional<Tensor>& dfinal_states, const Tensor& x, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& cu_seqlens, const std::optional<Tensor>& initial_states, bool silu,
    bool channels_last) {
  const char* op = "causal_conv1d_bwd";
  const ConvInputs inputs(op, x, weight, bias, cu_seqlens, initial_states, silu, channels_last);
  STD_TORCH_CHECK(dy.dim() == 3 && dy.size(0) == x.size(0) && dy.size(1) == x.size(1) && dy.size(2) == x.size(2) &&
                      dy.scalar_type() == x.scalar_type(),
                  op, ": dy must have the shape and dtype of x");
  const ScalarType acc = AccumulationType(x);
  const std::vector<int64_t> state_shape = inputs.StateShape();
  STD_TORCH_CHECK(!dfinal_states.has_value() ||
                      (dfinal_states->dim() == 3 && dfinal_states->size(0) == state_shape[0] &&
                       dfinal_states->size(1) == state_shape[1] && dfinal_states->size(2) == state_shape[2]),
                  op, ": dfinal_states must have shape [N, D, W - 1]");
  const Tensor dy_read = InnerContiguous(dy);
  const std::optional<Tensor> dfinal_read = ToAccumulation(dfinal_states, acc);
  Tensor dx = inputs.NewLikeX();
  Tensor dinitial = initial_states.has_value() ? NewTensor(x, state_shape, acc) : AbsentTensor(x, acc);
  const int64_t groups = ConvGroups(inputs.args.packing, channels_last);
  Tensor partials = NewTensor(x, {groups, inputs.args.width + 1, inputs.args.channels}, acc);

  ConvBackwardArgs args{};
  static_cast<ConvArgs&>(args) = inputs.args;
  args.dy = dy_read.const_data_ptr();
  args.dy_strides = StridesOf(dy_read, channels_last);
  args.dfinal_state = DataOrNull(dfinal_read);
  args.dx = dx.mutable_data_ptr();
  args.dx_strides = StridesOf(dx, channels_last);
  args.dinitial_state = DataOrNull(dinitial);
  args.partials = partials.mutable_data_ptr();
  causal_conv1d_bwd_cpu(args);

  // Few rows, summed in order: [W + 1, D].
  Tensor dweight = NewTensor(x, {inputs.args.channels, inputs.args.width}, acc);
  Tensor dbias = bias.has_value() ? NewTensor(x, {inputs.args.channels}, acc) : AbsentTensor(x, acc);
  causal_conv1d_reduce_cpu(args, groups, dweight.mutable_data_ptr(), DataOrNull(dbias));
  return {dx, dweight, dbias, dinitial};
}

Tensor causal_conv1d_update(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& cache_seqlens,
                            const std::optional<Tensor>& conv_state_indices, bool silu) {
  const char* op = "causal_conv1d_update";
  STD_TORCH_CHECK(x.dim() == 3 && conv_state.dim() == 3 && weight.dim() == 2, op,
                  ": x [B, D, T], conv_state [R, D, L] and weight [D, W] must have 3, 3 and 2 dimensions");
  const int64_t batch = x.size(0), channels = x.size(1), width = weight.size(1), rows = conv_state.size(0);
  STD_TORCH_CHECK(width >= kConvMinWidth && width <= kConvMaxWidth, op, ": weight must have width ", kConvMinWidth,
                  " to ", kConvMaxWidth, ", got ", width);
  STD_TORCH_CHECK(weight.size(0) == channels && conv_state.size(1) == channels && conv_state.size(2) >= width - 1 &&
                      conv_state.scalar_type() == x.scalar_type() && conv_state.is_cpu(),
                  op, ": conv_state must have shape [R, D, L >= W - 1] and the dtype of x");
  STD_TORCH_CHECK(!bias.has_value() || (bias->dim() == 1 && bias->size(0) == channels), op, ": bias must have shape [D]");
  std::optional<Tensor> seen, indices;
  if (cache_seqlens.has_value()) seen = Contiguous(torch::stable::to(*cache_seqlens, ScalarType::Long));
  if (conv_state_indices.has_value()) indices = Contiguous(torch::stable::to(*conv_state_indices, ScalarType::Long));
  STD_TORCH_CHECK(!seen.has_value() || (seen->dim() == 1 && seen->size(0) == batch), op,
                  ": cache_seqlens must have shape [B]");
  STD_TORCH_CHECK(indices.has_value() ? indices->dim() == 1 && indices->size(0) == batch : rows == batch, op,
                  ": conv_state must have one row for each row of x, or conv_state_indices [B] must name them");
  const int64_t* row_of = static_cast<const int64_t*>(DataOrNull(indices));
  const int64_t* seen_of = static_cast<const int64_t*>(DataOrNull(seen));
  std::vector<bool> taken(rows, false);
  for (int64_t b = 0; b < batch; ++b) {
    if (row_of != nullptr) {
      STD_TORCH_CHECK(row_of[b] >= 0 && row_of[b] < rows && !taken[row_of[b]], op,
                      ": conv_state_indices must name different rows of conv_state, got ", row_of[b], " at index ", b);
      taken[row_of[b]] = true;
    }
    STD_TORCH_CHECK(seen_of == nullptr || seen_of[b] >= 0, op, ": cache_seqlens must not be negative, got ",
                    seen_of == nullptr ? 0 : seen_of[b], " at index ", b);
  }
  const ScalarType acc = AccumulationType(x);
  const Tensor taps = ToAccumulation(torch::stable::transpose(weight, 0, 1), acc);
  const std::optional<Tensor> offset = ToAccumulation(bias, acc);
  Tensor y = NewTensor(x, {batch, channels, x.size(2)}, x.scalar_type());
  ConvUpdateArgs args{};
  args.batch = batch;
  args.channels = channels;
  args.tokens = x.size(2);
  args.width = static_cast<int>(width);
  args.state_length = conv_state.size(2);
  args.silu = silu;
  args.x = x.const_data_ptr();
  args.x_strides = StridesOf(x, false);
  args.state = conv_state.mutable_data_ptr();
  args.state_strides = StridesOf(conv_state, false);
  args.state_rows = row_of;
  args.cache_seqlens = seen_of;
  args.weight = taps.const_data_ptr();
  args.bias = DataOrNull(offset);
  args.y = y.mutable_data_ptr();
  args.dtype = DtypeOf(op, x);
  args.tier = CheckedTier(op);
  causal_conv1d_update_cpu(args);
  return y;
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
