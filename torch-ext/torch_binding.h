// Declarations of what bindings/<op>.cpp registers, made from op_list.h.
#pragma once

#include <torch/csrc/stable/library.h>

namespace packfree {

using OpLibrary = torch::stable::detail::StableLibrary;

#define PACKFREE_OP(name)             \
  void define_##name(OpLibrary& ops); \
  void implement_##name##_cpu(OpLibrary& ops);
#include "op_list.h"
#undef PACKFREE_OP

// The boundary conversions, which every op family shares: bindings/packing.cpp.
void define_packing(OpLibrary& ops);
void implement_packing_cpu(OpLibrary& ops);

// Ops with a kernel in CUDA C++, in CUDA variants: bindings/<name>_cuda.cpp. All others are Triton's (_devices.py).
void implement_packing_cuda(OpLibrary& ops);
void implement_causal_conv1d_cuda(OpLibrary& ops);
void implement_mamba1_scan_cuda(OpLibrary& ops);
void implement_mamba2_scan_cuda(OpLibrary& ops);

}  // namespace packfree
