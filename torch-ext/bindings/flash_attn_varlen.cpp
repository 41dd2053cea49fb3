#include "cpu/flash_attn_varlen/flash_attn_varlen.h"

#include <algorithm>

#include "bindings/tensors.h"
#include "torch_binding.h"

namespace packfree {

namespace {

constexpr const char* kForward = "flash_attn_varlen_fwd";
constexpr const char* kBackward = "flash_attn_varlen_bwd";

// [tokens, heads, dim] with a contiguous last axis, copied only if it is not.
Tensor WithContiguousRows(const Tensor& tensor) {
  return tensor.dim() == 3 && (tensor.stride(2) == 1 || tensor.size(2) == 1) ? tensor : Contiguous(tensor);
}
HeadRows RowsOf(const Tensor& tensor) { return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)}; }

// Shapes and dtypes that memory safety needs; api.py words these errors for users.
void FillArgs(const char* op, AttentionArgs* args, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const std::optional<Tensor>& s_aux,
              const std::optional<Tensor>& seed, double dropout_p, double softmax_scale, int64_t window_left,
              int64_t window_right, double softcap, const std::optional<Tensor>& visible_keys) {
  PACKFREE_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, op, ": q, k and v must have 3 dimensions");
  PACKFREE_CHECK(q.is_cpu() && k.is_cpu() && v.is_cpu(), op, ": q, k and v must be CPU tensors");
  args->dtype = DtypeOf(op, q);
  PACKFREE_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
                 ": q, k and v must have one dtype");
  args->H = q.size(1);
  args->HK = k.size(1);
  args->K = q.size(2);
  args->V = v.size(2);
  PACKFREE_CHECK(k.size(2) == args->K && v.size(0) == k.size(0) && v.size(1) == args->HK, op,
                 ": k must be [Tk, HK, K] and v [Tk, HK, V]");
  PACKFREE_CHECK(args->HK > 0 && args->H > 0 && args->H % args->HK == 0, op,
                 ": the query heads must be a multiple of the key heads, got ", args->H, " and ", args->HK);
  PACKFREE_CHECK(args->K >= 1 && args->K <= 512 && args->V >= 1 && args->V <= 512, op,
                 ": head dims must lie in 1 .. 512, got ", args->K, " and ", args->V);
  args->queries = CheckedPacking(op, cu_seqlens_q, q.size(0));
  args->keys = CheckedPacking(op, cu_seqlens_k, k.size(0));
  PACKFREE_CHECK(args->queries.num_sequences == args->keys.num_sequences, op,
                 ": cu_seqlens_q and cu_seqlens_k must list the same number of sequences");
  args->q = RowsOf(q);
  args->k = RowsOf(k);
  args->v = RowsOf(v);
  if (s_aux.has_value()) {
    PACKFREE_CHECK(s_aux->dim() == 1 && s_aux->size(0) == args->H && s_aux->is_contiguous() && s_aux->is_cpu() &&
                       s_aux->scalar_type() == AccumulationType(q),
                   op, ": s_aux must be [H] in the accumulation dtype");
  }
  args->s_aux = DataOrNull(s_aux);
  PACKFREE_CHECK(dropout_p >= 0 && dropout_p < 1, op, ": dropout_p must lie in [0, 1), got ", dropout_p);
  PACKFREE_CHECK(dropout_p == 0 || (seed.has_value() && seed->is_cpu() && seed->numel() == 1 &&
                                    seed->scalar_type() == ScalarType::Long),
                 op, ": dropout needs an int64 seed");
  args->dropout_p = dropout_p;
  args->dropout_seed = dropout_p == 0 ? 0 : *static_cast<const uint64_t*>(seed->const_data_ptr());
  PACKFREE_CHECK(softcap >= 0, op, ": softcap must not be negative, got ", softcap);
  args->softmax_scale = softmax_scale;
  args->softcap = softcap;
  args->window_left = window_left < 0 ? -1 : std::min(window_left, kWidestWindow);
  args->window_right = window_right < 0 ? -1 : std::min(window_right, kWidestWindow);
  if (visible_keys.has_value()) {
    PACKFREE_CHECK(visible_keys->dim() == 2 && visible_keys->size(0) == q.size(0) && visible_keys->size(1) == 2 &&
                       visible_keys->is_contiguous() && visible_keys->is_cpu() &&
                       visible_keys->scalar_type() == ScalarType::Int,
                   op, ": visible_keys must be [Tq, 2] in int32");
    PACKFREE_CHECK(window_left < 0 && window_right < 0, op, ": visible_keys and a window exclude each other");
  }
  args->visible_keys = static_cast<const int32_t*>(DataOrNull(visible_keys));
}

std::tuple<Tensor, Tensor> Forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                   std::optional<Tensor> s_aux, std::optional<Tensor> seed, double dropout_p,
                                   double softmax_scale, int64_t window_left, int64_t window_right, double softcap,
                                   std::optional<Tensor> visible_keys) {
  AttentionForwardArgs args;
  q = WithContiguousRows(q);
  k = WithContiguousRows(k);
  v = WithContiguousRows(v);
  FillArgs(kForward, &args, q, k, v, cu_seqlens_q, cu_seqlens_k, s_aux, seed, dropout_p, softmax_scale, window_left,
           window_right, softcap, visible_keys);
  Tensor out = NewTensor(q, {q.size(0), args.H, args.V}, q.scalar_type());
  Tensor lse = NewTensor(q, {args.H, q.size(0)}, AccumulationType(q));
  args.out = out.mutable_data_ptr();
  args.lse = lse.mutable_data_ptr();
  FlashAttnVarlenForwardCpu(CheckedTier(kForward, kBestTier), args);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> Backward(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k,
                                                    Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q,
                                                    Tensor cu_seqlens_k, std::optional<Tensor> s_aux,
                                                    std::optional<Tensor> seed, double dropout_p, double softmax_scale,
                                                    int64_t window_left, int64_t window_right, double softcap,
                                                    std::optional<Tensor> visible_keys) {
  AttentionBackwardArgs args;
  q = WithContiguousRows(q);
  k = WithContiguousRows(k);
  v = WithContiguousRows(v);
  dout = WithContiguousRows(dout);
  out = WithContiguousRows(out);
  lse = Contiguous(lse);
  dlse = Contiguous(dlse);
  FillArgs(kBackward, &args, q, k, v, cu_seqlens_q, cu_seqlens_k, s_aux, seed, dropout_p, softmax_scale, window_left,
           window_right, softcap, visible_keys);
  for (const Tensor* tensor : {&dout, &out}) {
    PACKFREE_CHECK(tensor->dim() == 3 && tensor->size(0) == q.size(0) && tensor->size(1) == args.H &&
                       tensor->size(2) == args.V && tensor->scalar_type() == q.scalar_type() && tensor->is_cpu(),
                   kBackward, ": dout and out must be [Tq, H, V] in q's dtype");
  }
  for (const Tensor* tensor : {&lse, dlse.has_value() ? &*dlse : &lse}) {
    PACKFREE_CHECK(tensor->dim() == 2 && tensor->size(0) == args.H && tensor->size(1) == q.size(0) &&
                       tensor->scalar_type() == AccumulationType(q) && tensor->is_cpu(),
                   kBackward, ": lse and dlse must be [H, Tq] in the accumulation dtype");
  }
  args.dout = RowsOf(dout);
  args.out = RowsOf(out);
  args.lse = lse.const_data_ptr();
  args.dlse = DataOrNull(dlse);
  Tensor dq = NewTensor(q, {q.size(0), args.H, args.K}, q.scalar_type());
  Tensor dk = NewTensor(q, {k.size(0), args.HK, args.K}, q.scalar_type());
  Tensor dv = NewTensor(q, {k.size(0), args.HK, args.V}, q.scalar_type());
  Tensor ds_aux =
      s_aux.has_value() ? NewTensor(q, {args.H}, AccumulationType(q)) : AbsentTensor(q, AccumulationType(q));
  args.dq = dq.mutable_data_ptr();
  args.dk = dk.mutable_data_ptr();
  args.dv = dv.mutable_data_ptr();
  args.ds_aux = DataOrNull(ds_aux);
  FlashAttnVarlenBackwardCpu(CheckedTier(kBackward, kBestTier), args);
  return {dq, dk, dv, ds_aux};
}

}  // namespace

void define_flash_attn_varlen(OpLibrary& ops) {
  ops.def(
      "flash_attn_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? s_aux, "
      "Tensor? seed, float dropout_p, float softmax_scale, int window_left, int window_right, float softcap, "
      "Tensor? visible_keys=None) -> (Tensor out, Tensor lse)");
  ops.def(
      "flash_attn_varlen_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? s_aux, Tensor? seed, float dropout_p, float softmax_scale, "
      "int window_left, int window_right, float softcap, Tensor? visible_keys=None) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor ds_aux)");
}

void implement_flash_attn_varlen_cpu(OpLibrary& ops) {
  ops.impl("flash_attn_varlen_fwd", TORCH_BOX(&Forward));
  ops.impl("flash_attn_varlen_bwd", TORCH_BOX(&Backward));
}

}  // namespace packfree
