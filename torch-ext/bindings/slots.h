// Rows of a cache that a decode step continues, named by the caller.
#pragma once

#include <vector>

#include "bindings/tensors.h"

namespace packfree {

// On a CPU, where looking costs nothing: the `batch` slots name different rows below `rows`. Any number of negative
// ones are padding slots, which the kernels leave out.
inline void CheckSlots(const char* op, const char* argument, const char* cache, const int64_t* slots, int64_t batch,
                       int64_t rows) {
  if (slots == nullptr) return;
  std::vector<bool> taken(static_cast<size_t>(rows), false);
  for (int64_t b = 0; b < batch; ++b) {
    if (slots[b] < 0) continue;
    PACKFREE_CHECK(slots[b] < rows && !taken[slots[b]], op, ": ", argument, " must name different rows of ", cache,
                   ", or -1 for padding, got ", slots[b], " at index ", b);
    taken[slots[b]] = true;
  }
}

}  // namespace packfree
