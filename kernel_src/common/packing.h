// View of the boundaries of packed sequences, and the list of work items cut from them.
#pragma once

#include <cstdint>
#include <vector>

namespace packfree {

// N sequences that lie one after the other in a row of `tokens` tokens.
// Sequence n owns tokens cu_seqlens[n] .. cu_seqlens[n + 1] - 1; tokens after the last offset are padding.
struct PackingView {
  const int32_t* cu_seqlens;  // [N + 1]
  int64_t num_sequences;      // N
  int64_t tokens;             // T

  int64_t bos(int64_t n) const { return cu_seqlens[n]; }
  int64_t eos(int64_t n) const { return cu_seqlens[n + 1]; }
  int64_t length(int64_t n) const { return eos(n) - bos(n); }
  int64_t end() const { return cu_seqlens[num_sequences]; }
};

// One block of a sequence: tokens [begin, end) counted from the sequence's first token. Blocks start at multiples of
// the block size there, so what a block computes does not depend on where its sequence lies in the pack.
struct SequenceBlock {
  int64_t sequence;
  int64_t begin;
  int64_t end;
};

// Every block of every sequence, in order. Empty sequences give none.
inline std::vector<SequenceBlock> SequenceBlocks(const PackingView& packing, int64_t block_size) {
  std::vector<SequenceBlock> blocks;
  for (int64_t n = 0; n < packing.num_sequences; ++n) {
    const int64_t length = packing.length(n);
    for (int64_t begin = 0; begin < length; begin += block_size) {
      const int64_t end = begin + block_size < length ? begin + block_size : length;
      blocks.push_back({n, begin, end});
    }
  }
  return blocks;
}

}  // namespace packfree
