// Blocks of CUDA threads on a host. A fiber stands for each CUDA thread: it has a stack of its own and gives way at
// barriers, so that a block runs in the same order every time and without the system's scheduler. To the thread
// sanitizer every fiber is a thread of its own, in order with others only where barriers put it: it sees races that
// this order hides, those between the blocks of a launch too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace cuda_host {

struct Index {
  unsigned x, y = 0, z = 0;
};

class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  // Gives way to other fibers until all threads have come; aborts if some never will.
  void Wait();
  unsigned round() const { return round_; }

 private:
  int threads_, arrived_ = 0;
  unsigned round_ = 0;
  char order_[2] = {};  // what the sanitizer knows rounds by; two, because the next begins before all have left one
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
  std::vector<Warp> warps;

 private:
  std::mutex mutex_;  // tells the sanitizer that the memory is made before it is used
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

extern Lane* lane;
inline Index& ThreadIndex() { return lane->thread; }
inline Index& BlockIndex() { return lane->block->index; }
inline Index& BlockExtent() { return lane->block->threads; }
inline Index& GridExtent() { return lane->block->grid; }

// Runs body on every thread of every block.
void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body);

}  // namespace cuda_host
