// In CUDA variants only: build.toml lists it with the CUDA kernels.
#include "bindings/packing.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/packing/packing.h"

namespace packfree {
namespace {

using torch::stable::accelerator::DeviceGuard;

void* CurrentStream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

void CheckLaunch(const char* op, const char* error) {
  STD_TORCH_CHECK(error == nullptr, op, ": launch failed: ", error == nullptr ? "" : error);
}

Tensor FromValues(const char* op, const Tensor& values, BoundaryRule rule) {
  const DeviceGuard guard(values.get_device_index());
  const BoundarySource source = CheckedSource(op, values, rule);
  Tensor offsets = NewOffsets(values, source.tokens + 1);
  static_assert(sizeof(BoundaryCount) == 2 * sizeof(int32_t));
  Tensor counts = NewOffsets(values, source.tiles() * 2);
  CheckLaunch(op, boundaries_cuda(source, static_cast<BoundaryCount*>(counts.mutable_data_ptr()),
                                  static_cast<int32_t*>(offsets.mutable_data_ptr()), CurrentStream(values)));
  return offsets;
}

Tensor FromOffsets(const char* op, const Tensor& values, int64_t tokens) {
  const DeviceGuard guard(values.get_device_index());
  const bool wide = values.scalar_type() == ScalarType::Long;
  Tensor offsets = NewOffsets(values, values.size(0));
  CheckLaunch(op, bound_offsets_cuda(values.const_data_ptr(), wide, values.size(0), tokens,
                                     static_cast<int32_t*>(offsets.mutable_data_ptr()), CurrentStream(values)));
  return offsets;
}

}  // namespace

void implement_packing_cuda(OpLibrary& ops) { PackingOps<FromValues, FromOffsets>::Implement(ops); }

}  // namespace packfree
