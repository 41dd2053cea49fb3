// The CUDA bindings on a host: they register for CPU tensors, and the kernels run by engine.h. tests/harness/cuda.py
// builds it and defines the ops.
#include "bindings/causal_conv1d_cuda.cpp"
#include "bindings/mamba1_scan_cuda.cpp"
#include "bindings/packing_cuda.cpp"
#include "bindings/mamba2_scan_cuda.cpp"

// A host has no streams, and no device to make current.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) { return *guard = nullptr, 0; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
}

STABLE_TORCH_LIBRARY_IMPL(packfree_cuda_host, CPU, ops) {
  packfree::implement_packing_cuda(ops);
  packfree::implement_causal_conv1d_cuda(ops);
  packfree::implement_mamba1_scan_cuda(ops);
  packfree::implement_mamba2_scan_cuda(ops);
}
