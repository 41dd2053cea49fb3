// What every binding of a CUDA kernel needs. In CUDA variants only.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "bindings/tensors.h"

namespace packfree {

// One call on the current stream of a tensor's device, which is the current device meanwhile.
class CudaCall {
 public:
  CudaCall(const char* op, const Tensor& tensor) : op_(op), guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }
  void Check(const char* error) const {
    PACKFREE_CHECK(error == nullptr, op_, ": launch failed: ", error == nullptr ? "" : error);
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

inline void CheckNoDouble(const char* op, const char* argument, const Tensor& tensor) {
  PACKFREE_CHECK(tensor.scalar_type() != ScalarType::Double, op, ": ", argument,
                 " must be float32, bfloat16 or float16 on a GPU, got float64; convert it with .float(), or compute "
                 "on CPU tensors, where float64 is served");
}

// Boundaries whose values nobody may look at: the kernels stay inside the tensors whatever they are.
inline PackingView DevicePacking(const char* op, const Tensor& cu_seqlens, const Tensor& like, int64_t tokens) {
  PACKFREE_CHECK(cu_seqlens.scalar_type() == ScalarType::Int && cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1 &&
                     cu_seqlens.is_contiguous() && cu_seqlens.device() == like.device(),
                 op, ": cu_seqlens must be a contiguous int32 tensor [N + 1] on the device of the tokens");
  PACKFREE_CHECK(tokens < std::numeric_limits<int32_t>::max(), op, ": offsets are int32, got ", tokens, " tokens");
  return {static_cast<const int32_t*>(cu_seqlens.const_data_ptr()), cu_seqlens.size(0) - 1, tokens};
}

// Scratch of a kernel: the sequence of each token, or floats.
inline Tensor NewOwners(const Tensor& like, int64_t tokens) { return NewTensor(like, {tokens}, ScalarType::Int); }
inline int32_t* OwnersOf(Tensor& owners) { return static_cast<int32_t*>(owners.mutable_data_ptr()); }
inline float* FloatsOf(const Tensor& tensor) { return static_cast<float*>(DataOrNull(tensor)); }

}  // namespace packfree
