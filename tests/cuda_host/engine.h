// Blocks of CUDA threads on a host. A fiber stands for each CUDA thread: it has a stack of its own and gives way at
// barriers and exchanges, so that a block runs in the same order every time and without the system's scheduler. To the
// thread sanitizer every fiber is a thread of its own, in order with others only where barriers put it: it sees races
// that this order hides, those between the blocks of a launch too.
//
// The kernels are compiled in CUDA's words (cuda/), where a warp is 32 lanes, and in HIP's: tools/maintainers/hip/ on
// hip/, where a wave is 64 lanes or 32. What lanes of a wave do between exchanges is in no order, which is less than a
// GPU promises.
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
  // Gives way to other fibers until all threads have come, all to the same call; aborts if some never will. A GPU of
  // AMD's counts waves that come, whichever barrier it is that they come to.
  void Wait();

 private:
  int threads_, arrived_ = 0;
  unsigned round_ = 0;
  const void* call_ = nullptr;
  char order_[2] = {};  // what the sanitizer knows rounds by; two, because the next begins before all have left one
};

// The lanes of a warp, or of a wave of an AMD GPU.
class Wave {
 public:
  explicit Wave(unsigned lanes) : waits_(lanes) {}

  // The value that lane `source` of the wave gives in the same call. Gives way until no other lane can move on; those
  // that have not come to this call then are not in it, and a NaN stands for what they would give. With `whole` every
  // lane must come, or the program aborts.
  uint64_t Exchange(uint64_t value, unsigned source, bool whole);

  // Lets the lanes that wait go on. False: none waits.
  bool Meet();

 private:
  struct Waiting {
    const void* call = nullptr;  // null: this lane does not wait
    uint64_t given, got;
    unsigned source;
    bool whole;
  };
  std::vector<Waiting> waits_;
  unsigned round_ = 0;
};

class Block {
 public:
  Block(unsigned number, unsigned blocks, unsigned count);
  ~Block();
  // The block's shared memory, of exactly this size and with NaN in every float.
  void* Shared(size_t bytes);

  Index index, grid, threads;
  Barrier all;
  std::vector<Wave> waves;

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

extern unsigned wave_lanes;  // of a wave: 32, or in HIP's words 64

extern Lane* lane;
inline Index& ThreadIndex() { return lane->thread; }
inline Index& BlockIndex() { return lane->block->index; }
inline Index& BlockExtent() { return lane->block->threads; }
inline Index& GridExtent() { return lane->block->grid; }
inline unsigned OwnLane() { return lane->thread.x % wave_lanes; }
inline Wave& OwnWave() { return lane->block->waves[lane->thread.x / wave_lanes]; }
// Of an exchange; aborts unless it is a power of two of lanes that a wave has.
unsigned WidthOf(int width);

// Runs body on every thread of every block.
void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body);

}  // namespace cuda_host
