// The one place where CPU work is spread over threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>

namespace packfree {

// How many threads ParallelForEach uses at most: the number of scratch buffers it needs if each worker has its own.
inline int64_t ParallelWorkers(int64_t items) {
  const int64_t threads = static_cast<int64_t>(torch::stable::get_num_threads());
  return threads < items ? threads : items;
}

// Calls body(item), or body(item, worker) if it takes two, once for every item in [0, items), on the threads of the
// torch pool. Items are handed out one at a time in rising order, so put the longest first where they differ. Which
// thread runs an item is not defined: an item must own what it writes, and its arithmetic must not depend on the
// thread. Items that run at the same time have different workers in [0, ParallelWorkers(items)).
template <class Body>
void ParallelForEach(int64_t items, const Body& body) {
  if (items <= 0) return;
  const int64_t workers = ParallelWorkers(items);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    for (int64_t item = next.fetch_add(1); item < items; item = next.fetch_add(1)) {
      if constexpr (std::is_invocable_v<const Body&, int64_t, int64_t>) {
        body(item, worker);
      } else {
        body(item);
      }
    }
  });
}

// Waits until another item has stored `value` in the counter with a release. That item must have been handed out
// earlier, so it is running or done. Gives the core away after a while, for the case that threads outnumber cores.
inline void WaitFor(const int32_t* counter, int32_t value) {
  for (int spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != value; ++spins) {
    if (spins >= 1000) std::this_thread::yield();
  }
}

}  // namespace packfree
