// The boundary conversions of common/boundaries.h on a CPU: blocks and threads one after another.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/boundaries.h"

namespace packfree {

struct SerialBlock {
  int64_t index;

  template <class Step>
  void ForEachThread(const Step& step) const {
    for (int thread = 0; thread < kBoundaryThreads; ++thread) step(thread);
  }
};

template <class Int>
void BoundariesCpu(const BoundarySource& source, int32_t* offsets) {
  const Marks<Int> marks{static_cast<const Int*>(source.values), source.length, source.rule};
  const int64_t tiles = source.tiles();
  std::vector<BoundaryCount> counts(tiles);
  const auto scratch = std::make_unique<BoundaryScratch>();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    CountBoundaries(SerialBlock{tile}, marks, source.tokens, counts.data(), *scratch);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    PlaceBoundaries(SerialBlock{tile}, marks, source.tokens, tiles, source.clip, counts.data(), offsets, *scratch);
  }
}

// offsets [N + 1] from values [N + 1].
template <class Int>
void BoundOffsetsCpu(const Int* values, int64_t size, int64_t tokens, int32_t* offsets) {
  for (int64_t n = 0; n < size; ++n) offsets[n] = BoundedOffset(values[n], n, tokens);
}

}  // namespace packfree
