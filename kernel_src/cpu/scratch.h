// Scratch memory of work items: cut into tiles by each item, kept for the next one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
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

// Memory of one call, aligned to a cache line, contents unspecified.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : data_(std::aligned_alloc(64, (static_cast<size_t>(bytes == 0 ? 1 : bytes) + 63) / 64 * 64)) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* get() const { return data_; }

 private:
  void* data_;
};

// Buffers for the work items of one call: as many as items run at once, each `bytes` long, aligned to a cache line,
// contents unspecified.
class ScratchPool {
 public:
  explicit ScratchPool(int64_t bytes) : bytes_(bytes) {}
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  // A buffer for the lifetime of the lease.
  class Lease {
   public:
    explicit Lease(ScratchPool* pool) : pool_(pool), buffer_(pool->Take()) {}
    ~Lease() { pool_->Give(std::move(buffer_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    void* get() const { return buffer_->get(); }

   private:
    ScratchPool* pool_;
    std::unique_ptr<Buffer> buffer_;
  };

 private:
  std::unique_ptr<Buffer> Take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        std::unique_ptr<Buffer> buffer = std::move(free_.back());
        free_.pop_back();
        return buffer;
      }
    }
    return std::make_unique<Buffer>(bytes_);
  }
  void Give(std::unique_ptr<Buffer> buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(buffer));
  }

  int64_t bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Buffer>> free_;
};

}  // namespace packfree
