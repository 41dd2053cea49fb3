// Declarations of what bindings/<op>.cpp registers, made from op_list.h.
#pragma once

#include <torch/csrc/stable/library.h>

namespace packfree {

using OpLibrary = torch::stable::detail::StableLibrary;

#define PACKFREE_OP(name)                \
  void define_##name(OpLibrary& ops);    \
  void implement_##name##_cpu(OpLibrary& ops);
#include "op_list.h"
#undef PACKFREE_OP

// The boundary conversions, which every op family shares: bindings/packing.cpp, and packing_cuda.cpp in CUDA variants.
void define_packing(OpLibrary& ops);
void implement_packing_cpu(OpLibrary& ops);
void implement_packing_cuda(OpLibrary& ops);

}  // namespace packfree
