// In CUDA variants only: build.toml lists it with the CUDA kernels.
#include "bindings/cuda.h"
#include "bindings/packing.h"
#include "cuda/packing/packing.h"

namespace packfree {
namespace {

Tensor FromValues(const char* op, const Tensor& values, BoundaryRule rule) {
  const CudaCall call(op, values);
  const BoundarySource source = CheckedSource(op, values, rule);
  Tensor offsets = NewOffsets(values, source.tokens + 1);
  static_assert(sizeof(BoundaryCount) == 2 * sizeof(int32_t));
  Tensor counts = NewOffsets(values, source.tiles() * 2);
  call.Check(BoundariesCuda(source, static_cast<BoundaryCount*>(counts.mutable_data_ptr()),
                            static_cast<int32_t*>(offsets.mutable_data_ptr()), call.stream()));
  return offsets;
}

Tensor FromOffsets(const char* op, const Tensor& values, int64_t tokens) {
  const CudaCall call(op, values);
  const bool wide = values.scalar_type() == ScalarType::Long;
  Tensor offsets = NewOffsets(values, values.size(0));
  call.Check(BoundOffsetsCuda(values.const_data_ptr(), wide, values.size(0), tokens,
                              static_cast<int32_t*>(offsets.mutable_data_ptr()), call.stream()));
  return offsets;
}

}  // namespace

void implement_packing_cuda(OpLibrary& ops) { PackingOps<FromValues, FromOffsets>::Implement(ops); }

}  // namespace packfree
