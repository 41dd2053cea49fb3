#include "torch_binding.h"

#include <string>

#include "bindings/tiers.h"
#include "registration.h"

namespace {

// Name of the CPU tier that would serve a call now, or an error text that starts with "error:".
std::string cpu_tier() {
  packfree::Tier tier = packfree::Tier::kScalar;
  if (packfree::SelectTier(&tier)) return packfree::TierName(tier);
  return "error: " + packfree::TierRefusal();
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("cpu_tier() -> str");
  packfree::define_packing(ops);
#define PACKFREE_OP(name) packfree::define_##name(ops);
#include "op_list.h"
#undef PACKFREE_OP
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("cpu_tier", TORCH_BOX(&cpu_tier));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  packfree::implement_packing_cpu(ops);
#define PACKFREE_OP(name) packfree::implement_##name##_cpu(ops);
#include "op_list.h"
#undef PACKFREE_OP
}

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  packfree::implement_packing_cuda(ops);
  packfree::implement_causal_conv1d_cuda(ops);
  packfree::implement_mamba1_scan_cuda(ops);
  packfree::implement_mamba2_scan_cuda(ops);
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
