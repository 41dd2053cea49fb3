// Blocks of CUDA threads on a host. Built with CUDA_HOST_THREADS, every CUDA thread is a thread of the operating system
// and the blocks of a launch run side by side, for the thread sanitizer to watch. Else they are fibers, which take
// turns at the barriers: the same order every time and a hundred times faster.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#ifdef CUDA_HOST_THREADS
#include <barrier>
#include <deque>
#endif

namespace cuda_host {

struct Index {
  unsigned x, y = 0, z = 0;
};

class Barrier {
 public:
  explicit Barrier(int threads)
#ifdef CUDA_HOST_THREADS
      : barrier_(threads) {
  }
  void Wait() { barrier_.arrive_and_wait(); }

 private:
  std::barrier<> barrier_;
#else
      : threads_(threads) {
  }
  // Runs other fibers until all threads have come; aborts if some never will.
  void Wait();
  unsigned round() const { return round_; }

 private:
  int threads_, arrived_ = 0;
  unsigned round_ = 0;
#endif
};

struct Warp {
  explicit Warp(int threads) : barrier(threads) {}
  Barrier barrier;
  uint64_t slots[32];  // what lanes give each other
};

class Block {
 public:
  Block(unsigned number, unsigned blocks, unsigned count);
  ~Block();
  // The block's shared memory, of exactly this size and with NaN in every float.
  void* Shared(size_t bytes);

  Index index, grid, threads;
  Barrier all;
#ifdef CUDA_HOST_THREADS
  std::deque<Warp> warps;  // std::barrier does not move
#else
  std::vector<Warp> warps;
#endif

 private:
  std::mutex mutex_;
  char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
};

// The CUDA thread that runs.
struct Lane {
  Index thread;
  Block* block;
  int64_t barriers = 0;  // that it has come to
};

// Faults on purpose, to see them found.
struct Faults {
  int64_t skipped_barrier = -1;  // this __syncthreads of every thread does nothing
  size_t short_shared = 0;       // bytes that shared memory lacks at its end
};
extern Faults faults;

extern thread_local Lane* lane;
inline Index& ThreadIndex() { return lane->thread; }
inline Index& BlockIndex() { return lane->block->index; }
inline Index& BlockExtent() { return lane->block->threads; }
inline Index& GridExtent() { return lane->block->grid; }

// Runs body on every thread of every block.
void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body);

}  // namespace cuda_host
