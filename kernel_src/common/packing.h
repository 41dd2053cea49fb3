// View of the boundaries of packed sequences.
#pragma once

#include <cstdint>

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

}  // namespace packfree
