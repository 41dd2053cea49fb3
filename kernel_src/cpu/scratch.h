// Scratch memory of work items: cut into tiles by each item, kept for the next one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "common/dtypes.h"

namespace packfree {

// Hands out pieces of one buffer in order, each of whole cache lines; without a buffer it only counts.
template <class Acc>
class Pieces {
 public:
  explicit Pieces(Acc* buffer) : buffer_(buffer) {}
  Acc* Take(int64_t elements) {
    Acc* piece = buffer_ == nullptr ? nullptr : buffer_ + used_;
    used_ += (elements + 15) / 16 * 16;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  Acc* buffer_;
  int64_t used_ = 0;
};

// Bytes that Tiles<Acc>(sizes..., pieces) takes for tensors of `dtype`.
template <template <class> class Tiles, class... Sizes>
int64_t ScratchBytes(Dtype dtype, const Sizes&... sizes) {
  if (dtype == Dtype::kFloat64) {
    Pieces<double> pieces(nullptr);
    Tiles<double>(sizes..., pieces);
    return pieces.used() * static_cast<int64_t>(sizeof(double));
  }
  Pieces<float> pieces(nullptr);
  Tiles<float>(sizes..., pieces);
  return pieces.used() * static_cast<int64_t>(sizeof(float));
}

// Buffers for the work items of one call: as many as items run at once, each `bytes` long, aligned to a cache line,
// contents unspecified.
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
