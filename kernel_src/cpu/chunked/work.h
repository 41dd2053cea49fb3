// Work of the ops that run a linear recurrence chunk by chunk: one item for each sequence and head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/packing.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace packfree {

// One recurrence to run: a sequence and a head, or a block of heads.
struct SequenceHead {
  int64_t sequence;
  int64_t head;
};

// Every (sequence, head), the longest sequence first so that threads end together; empty ones if `with_empty`.
inline std::vector<SequenceHead> LongestFirst(const PackingView& packing, int64_t heads, bool with_empty) {
  std::vector<int64_t> order;
  for (int64_t n = 0; n < packing.num_sequences; ++n) {
    if (with_empty || packing.length(n) > 0) order.push_back(n);
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

// Calls run(sequence, head, scratch) for every sequence and head, `scratch` holding `scratch_bytes`. An empty sequence
// has work only where `states`, the states or their gradients that each sequence gives, are asked for.
template <class Run>
void ForEachSequenceHead(const PackingView& packing, int64_t heads, const void* states, int64_t scratch_bytes,
                         const Run& run) {
  const std::vector<SequenceHead> work = LongestFirst(packing, heads, states != nullptr);
  ScratchPool pool(scratch_bytes);
  ParallelForEach(static_cast<int64_t>(work.size()), [&](int64_t item) {
    const ScratchPool::Lease scratch(&pool);
    run(work[item].sequence, work[item].head, scratch.get());
  });
}

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

}  // namespace packfree
