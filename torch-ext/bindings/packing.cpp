#include "bindings/packing.h"

#include "cpu/packing.h"

namespace packfree {
namespace {

Tensor FromValues(const char* op, const Tensor& values, BoundaryRule rule) {
  const BoundarySource source = CheckedSource(op, values, rule);
  Tensor offsets = NewOffsets(values, source.tokens + 1);
  int32_t* out = static_cast<int32_t*>(offsets.mutable_data_ptr());
  source.wide ? BoundariesCpu<int64_t>(source, out) : BoundariesCpu<int32_t>(source, out);
  return offsets;
}

Tensor FromOffsets(const char*, const Tensor& values, int64_t tokens) {
  Tensor offsets = NewOffsets(values, values.size(0));
  int32_t* out = static_cast<int32_t*>(offsets.mutable_data_ptr());
  if (values.scalar_type() == ScalarType::Long) {
    BoundOffsetsCpu(static_cast<const int64_t*>(values.const_data_ptr()), values.size(0), tokens, out);
  } else {
    BoundOffsetsCpu(static_cast<const int32_t*>(values.const_data_ptr()), values.size(0), tokens, out);
  }
  return offsets;
}

}  // namespace

void define_packing(OpLibrary& ops) {
  ops.def("packing_from_positions(Tensor positions, bool only_falls) -> Tensor");
  ops.def("packing_from_labels(Tensor seq_idx) -> Tensor");
  ops.def("packing_from_offsets(Tensor cu_seqlens, int tokens) -> Tensor");
}

void implement_packing_cpu(OpLibrary& ops) { PackingOps<FromValues, FromOffsets>::Implement(ops); }

}  // namespace packfree
