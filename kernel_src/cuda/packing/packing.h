// Boundary conversions on a GPU. Every pointer is to memory of the current device; nothing waits for the stream.
// The functions return null, or the text of the launch's error.
#pragma once

#include "common/boundaries.h"

namespace packfree {

// offsets [tokens + 1] from positions or labels; counts [source.tiles()] is scratch.
const char* BoundariesCuda(const BoundarySource& source, BoundaryCount* counts, int32_t* offsets, void* stream);

// offsets [N + 1] from values [N + 1] (int64 if wide, else int32), each brought into [0, tokens].
const char* BoundOffsetsCuda(const void* values, bool wide, int64_t size, int64_t tokens, int32_t* offsets,
                             void* stream);

}  // namespace packfree
