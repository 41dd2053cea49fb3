// Mamba-1's selective scan over packed sequences, on a GPU. Every pointer is to memory of the current device, Acc is
// float, and nothing waits for the stream. The functions return null, or the text of the launch's error.
#pragma once

#include "common/mamba1_scan.h"

namespace packfree {

// Extents of ScanBackwardArgs's partial sums.
int64_t ScanTiles(int64_t tokens);
int64_t ScanColumns(const ScanArgs& args);

// Floats of scratch that the functions below want.
int64_t ScanForwardScratch(const ScanArgs& args);
int64_t ScanBackwardScratch(const ScanArgs& args);

// Tokens that no sequence owns get 0.
const char* Mamba1ScanForwardCuda(const ScanForwardArgs& args, float* scratch, void* stream);
const char* Mamba1ScanBackwardCuda(const ScanBackwardArgs& args, float* scratch, void* stream);

}  // namespace packfree
