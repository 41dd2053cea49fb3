// One token of Mamba's recurrence for each of B sequences, on a GPU.
#pragma once

#include "common/mamba2_scan.h"

namespace packfree {

// Every pointer is to memory of the current device, Acc is float, and nothing waits for the stream. Returns null, or
// the text of the launch's error.
const char* SelectiveStateUpdateCuda(const SelectiveStateUpdate& args, void* stream);

}  // namespace packfree
