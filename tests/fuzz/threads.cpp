// What kernel_src/cpu/parallel.h asks of torch, on plain threads: the thread sanitizer understands those, and the
// fuzzer needs no torch to run.
#include <torch/csrc/stable/c/shim.h>

#include <atomic>
#include <thread>
#include <vector>

#include "memory.h"

extern "C" {

AOTITorchError torch_get_num_threads(uint32_t* count) {
  *count = static_cast<uint32_t>(packfree::fuzz::Threads());
  return 0;
}

// One thread for each index; they begin together, so that a fast one does not take all the work before the others.
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  if (end - begin <= 1) {
    if (begin < end) body(begin, end, context);
    return 0;
  }
  std::atomic<int64_t> missing{end - begin};
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; ++i) {
    threads.emplace_back([&missing, body, context, i] {
      missing.fetch_sub(1, std::memory_order_relaxed);
      while (missing.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
      body(i, i + 1, context);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // extern "C"
