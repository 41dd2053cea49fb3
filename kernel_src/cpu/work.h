// How ops cut their work into items, and put together what items give: shared so that no sum depends on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/packing.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace packfree {

// The sequence that a token before the end belongs to.
inline int64_t SequenceOf(const PackingView& packing, int64_t token) {
  return std::upper_bound(packing.cu_seqlens, packing.cu_seqlens + packing.num_sequences, token) - packing.cu_seqlens -
         1;
}

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

// The same for `heads` rows of one number a token: a tensor [heads, tokens].
inline void ClearPaddingOfHeads(const PackingView& packing, int64_t heads, void* tensor, int64_t bytes) {
  for (int64_t head = 0; head < heads; ++head) {
    ClearPadding(packing, static_cast<char*>(tensor) + head * packing.tokens * bytes, bytes);
  }
}

// The same for rows of `row_tokens` tokens: a tensor [B, T, D] in any order in which channels or tokens lie side by
// side, given by its strides in elements.
inline void ClearPaddingOfRows(const PackingView& packing, int64_t row_tokens, int64_t channels, void* tensor,
                               int64_t row_stride, int64_t token_stride, int64_t channel_stride, int64_t bytes) {
  for (int64_t token = packing.end(); token < packing.tokens; token += row_tokens - token % row_tokens) {
    const int64_t first = token % row_tokens;
    char* row = static_cast<char*>(tensor) + token / row_tokens * row_stride * bytes;
    if (token_stride == 1) {
      for (int64_t c = 0; c < channels; ++c) {
        std::memset(row + (c * channel_stride + first) * bytes, 0, (row_tokens - first) * bytes);
      }
    } else {
      for (int64_t t = first; t < row_tokens; ++t) std::memset(row + t * token_stride * bytes, 0, channels * bytes);
    }
  }
}

// Neighbours [first, last) that make one work item.
struct Stretch {
  int64_t first;
  int64_t last;
  int64_t tokens;
};

// Cuts `count` neighbours, of tokens_of(i) tokens each, into stretches: one goes on until it has `least` tokens.
template <class TokensOf>
std::vector<Stretch> CutNeighbours(int64_t count, int64_t least, const TokensOf& tokens_of) {
  std::vector<Stretch> stretches;
  for (int64_t i = 0; i < count; ++i) {
    if (stretches.empty() || stretches.back().tokens >= least) stretches.push_back({i, i, 0});
    stretches.back().last = i + 1;
    stretches.back().tokens += tokens_of(i);
  }
  return stretches;
}

// target[c, r] = sum over the parts, in their order, of parts[part, r, c], where a part begins `stride` elements after
// the one before it and has rows of `columns`. The total is kept in double. Null targets are not wanted.
template <class Part, class Acc>
void SumParts(const Part* parts, int64_t count, int64_t stride, int64_t rows, int64_t columns, Acc* target) {
  if (target == nullptr) return;
  constexpr int64_t kColumns = 128;
  ParallelForEach((columns + kColumns - 1) / kColumns, [&](int64_t item) {
    const int64_t first = item * kColumns, width = std::min(kColumns, columns - first);
    for (int64_t row = 0; row < rows; ++row) {
      double sum[kColumns] = {};
      for (int64_t part = 0; part < count; ++part) {
        const Part* terms = parts + part * stride + row * columns + first;
        for (int64_t c = 0; c < width; ++c) sum[c] += terms[c];
      }
      for (int64_t c = 0; c < width; ++c) target[(first + c) * rows + row] = static_cast<Acc>(sum[c]);
    }
  });
}

inline int64_t LongestSequence(const PackingView& packing) {
  int64_t longest = 0;
  for (int64_t n = 0; n < packing.num_sequences; ++n) longest = std::max(longest, packing.length(n));
  return longest;
}

}  // namespace packfree
