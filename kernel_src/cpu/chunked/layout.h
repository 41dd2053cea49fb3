// Tiles and work of the ops that run a linear recurrence chunk by chunk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "common/packing.h"

namespace packfree {

// Tokens of a chunk. Chunks are counted from a sequence's first token; its last one is shorter.
constexpr int64_t kChunk = 64;

// Rows that the triangular helpers take at once: what lies above the diagonal is skipped in steps of this many columns.
constexpr int64_t kTriangleBlock = 16;

// Leading dimension of a scratch tile: whole registers of every tier, and an odd number of 64-byte lines for float, so
// that a strip of columns spreads over all sets of the first-level cache (a 128 x 128 state at stride 128 uses half).
inline int64_t TileStride(int64_t columns) {
  const int64_t blocks = (columns + 15) / 16;
  return (blocks | 1) * 16;
}

// One recurrence to run: a sequence and a head.
struct SequenceHead {
  int64_t sequence;
  int64_t head;
};

// Every (sequence, head) whose sequence has at least `least` tokens, the longest first so that threads end together.
inline std::vector<SequenceHead> LongestFirst(const PackingView& packing, int64_t heads, int64_t least) {
  std::vector<int64_t> order;
  for (int64_t n = 0; n < packing.num_sequences; ++n) {
    if (packing.length(n) >= least) order.push_back(n);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return packing.length(a) > packing.length(b); });
  std::vector<SequenceHead> work;
  work.reserve(order.size() * heads);
  for (const int64_t n : order) {
    for (int64_t h = 0; h < heads; ++h) work.push_back({n, h});
  }
  return work;
}

// How a backward pass walks a sequence: segments of chunks, the last first. What it keeps of each chunk
// (`chunk_bytes`) is held for one segment at a time, and one state per segment. A sequence whose chunks all fit into
// about kSegmentBytes is one segment and is recomputed once, a longer one twice; memory grows with the root of the
// length.
struct SegmentPlan {
  static constexpr int64_t kSegmentBytes = int64_t{8} << 20;
  int64_t chunks;      // of the sequence
  int64_t per_segment;
  int64_t segments;

  SegmentPlan(int64_t chunk_bytes, int64_t length) : chunks(std::max<int64_t>(1, (length + kChunk - 1) / kChunk)) {
    per_segment = std::max<int64_t>(1, kSegmentBytes / chunk_bytes);
    while (per_segment * per_segment < chunks) ++per_segment;
    per_segment = std::min(per_segment, chunks);
    segments = (chunks + per_segment - 1) / per_segment;
  }
};

// Sets the rows of tokens after the last boundary to 0; a row has `row_bytes`.
inline void ClearPadding(const PackingView& packing, void* tensor, int64_t row_bytes) {
  const int64_t end = packing.end();
  if (end < packing.tokens) {
    std::memset(static_cast<char*>(tensor) + end * row_bytes, 0, (packing.tokens - end) * row_bytes);
  }
}

inline int64_t LongestSequence(const PackingView& packing) {
  int64_t longest = 0;
  for (int64_t n = 0; n < packing.num_sequences; ++n) longest = std::max(longest, packing.length(n));
  return longest;
}

// Hands out pieces of one buffer in order; without a buffer it only counts.
template <class Acc>
class Pieces {
 public:
  explicit Pieces(Acc* buffer) : buffer_(buffer) {}
  Acc* Take(int64_t elements) {
    Acc* piece = buffer_ == nullptr ? nullptr : buffer_ + used_;
    used_ += elements;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  Acc* buffer_;
  int64_t used_ = 0;
};

// Scratch memory for the work items of one call: as many buffers as items run at once, each `bytes` long, aligned to a
// cache line, contents unspecified.
class ScratchPool {
 public:
  explicit ScratchPool(int64_t bytes) : bytes_((static_cast<size_t>(bytes) + 63) / 64 * 64) {}
  ~ScratchPool() {
    for (void* buffer : free_) std::free(buffer);
  }
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  // A buffer for the lifetime of the lease.
  class Lease {
   public:
    explicit Lease(ScratchPool* pool) : pool_(pool), buffer_(pool->Take()) {}
    ~Lease() { pool_->Give(buffer_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    void* get() const { return buffer_; }

   private:
    ScratchPool* pool_;
    void* buffer_;
  };

 private:
  void* Take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        void* buffer = free_.back();
        free_.pop_back();
        return buffer;
      }
    }
    void* buffer = std::aligned_alloc(64, bytes_ == 0 ? 64 : bytes_);
    if (buffer == nullptr) throw std::bad_alloc();
    return buffer;
  }
  void Give(void* buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(buffer);
  }

  size_t bytes_;
  std::mutex mutex_;
  std::vector<void*> free_;
};

}  // namespace packfree
