// A device guard that does nothing, for CUDA tensors without storage in a torch without CUDA: indexing asks for one.
#include <c10/core/impl/DeviceGuardImplInterface.h>

C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
