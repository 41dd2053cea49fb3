// The one place where CPU work is spread over threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>

namespace packfree {

// Calls body(item) once for every item in [0, items), on the threads of the torch pool. Items are handed out one at a
// time in rising order, so put the longest first where they differ. Which thread runs an item is not defined: an item
// must own what it writes, and its arithmetic must not depend on the thread.
template <class Body>
void ParallelForEach(int64_t items, const Body& body) {
  if (items <= 0) return;
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t workers = threads < items ? threads : items;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t item = next.fetch_add(1); item < items; item = next.fetch_add(1)) body(item);
  });
}

}  // namespace packfree
