// The CUDA bindings on a host: they register for CPU tensors, and the kernels run by engine.h. tests/harness/cuda.py
// builds it, once in CUDA's words and once in HIP's, and defines the ops in HOST_NAMESPACE.
#include "bindings/causal_conv1d_cuda.cpp"
#include "bindings/mamba1_scan_cuda.cpp"
#include "bindings/packing_cuda.cpp"
#include "bindings/mamba2_scan_cuda.cpp"
#include "engine.h"

// A host has no streams, and no device to make current.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) { return *stream = nullptr, 0; }
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) { return *guard = nullptr, 0; }
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
}

extern "C" __attribute__((visibility("default"))) void cuda_host_set_wave(unsigned lanes) {
  cuda_host::wave_lanes = lanes;
}

#define IMPLEMENT(name) STABLE_TORCH_LIBRARY_IMPL(name, CPU, ops)
IMPLEMENT(HOST_NAMESPACE) {
  packfree::implement_packing_cuda(ops);
  packfree::implement_causal_conv1d_cuda(ops);
  packfree::implement_mamba1_scan_cuda(ops);
  packfree::implement_mamba2_scan_cuda(ops);
}
