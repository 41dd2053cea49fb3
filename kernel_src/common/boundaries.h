// Offsets of packed sequences from positions, labels or offsets, without a look at the result: the work of one block of
// threads. A GPU runs it with a thread a lane (cuda/packing/), a CPU runs the same text one thread after another
// (cpu/packing.h). What starts a sequence is written once, in Marks; packing.py states the same rules in torch.
#pragma once

#include <cstdint>

#include "common/device.h"

namespace packfree {

constexpr int kBoundaryThreads = 256;
constexpr int kBoundaryItems = 8;  // neighbouring tokens of one thread
constexpr int64_t kBoundaryTile = int64_t{kBoundaryThreads} * kBoundaryItems;

enum class BoundaryRule {
  kSteps,   // positions: a sequence starts where one is not its predecessor plus one
  kFalls,   // temporal positions, which may stand still or jump inside a sample: only where one falls
  kLabels,  // seq_idx: where the label changes; neighbouring negative labels are one stretch of padding
};

// B rows of T positions or labels, read as one row of B * T tokens.
struct BoundarySource {
  const void* values;  // [B, T], int64 if wide, else int32
  bool wide;
  BoundaryRule rule;
  int64_t length;  // T
  int64_t tokens;  // B * T
  bool clip;       // end at the number of live tokens: labels of one row, whose negative tail is padding
  int64_t tiles() const { return tokens == 0 ? 1 : (tokens + kBoundaryTile - 1) / kBoundaryTile; }
};

// Counts of a stretch of tokens.
struct BoundaryCount {
  int32_t starts;
  int32_t live;
};

template <class Int>
struct Marks {
  const Int* values;
  int64_t length;
  BoundaryRule rule;

  PACKFREE_DEVICE bool starts(int64_t i) const {
    if (i % length == 0) return true;
    const Int before = values[i - 1], here = values[i];
    if (rule == BoundaryRule::kFalls) return here < before;
    if (rule == BoundaryRule::kLabels) return here != before && !(here < 0 && before < 0);
    // Unsigned, because the difference of two arbitrary integers may not fit.
    return static_cast<uint64_t>(here) - static_cast<uint64_t>(before) != 1;
  }
  PACKFREE_DEVICE bool live(int64_t i) const { return rule != BoundaryRule::kLabels || values[i] >= 0; }
};

// Memory that the threads of a block share.
struct BoundaryScratch {
  BoundaryCount sums[kBoundaryThreads];
  int32_t before[kBoundaryThreads];
  int32_t ranks[2][kBoundaryThreads];
};

// A Block has an index, and ForEachThread(step), which runs step(thread) for all its threads and returns when every
// thread is done: on a GPU a barrier.

// Calls visit(i) for each token i of one thread.
template <class Visit>
PACKFREE_DEVICE void ForOwnTokens(int64_t block, int thread, int64_t tokens, const Visit& visit) {
  const int64_t begin = block * kBoundaryTile + int64_t{thread} * kBoundaryItems;
  for (int64_t i = begin; i < begin + kBoundaryItems && i < tokens; ++i) visit(i);
}

// sums[0] and before[0] become the totals over all threads.
template <class Block>
PACKFREE_DEVICE void Total(const Block& block, BoundaryScratch& scratch) {
  for (int half = kBoundaryThreads / 2; half > 0; half /= 2) {
    block.ForEachThread([&](int thread) {
      if (thread >= half) return;
      scratch.sums[thread].starts += scratch.sums[thread + half].starts;
      scratch.sums[thread].live += scratch.sums[thread + half].live;
      scratch.before[thread] += scratch.before[thread + half];
    });
  }
}

// First pass: counts[block] for the tile of this block.
template <class Block, class Int>
PACKFREE_DEVICE void CountBoundaries(const Block& block, const Marks<Int>& marks, int64_t tokens, BoundaryCount* counts,
                                     BoundaryScratch& scratch) {
  block.ForEachThread([&](int thread) {
    BoundaryCount own{0, 0};
    ForOwnTokens(block.index, thread, tokens, [&](int64_t i) {
      own.starts += marks.starts(i);
      own.live += marks.live(i);
    });
    scratch.sums[thread] = own;
    scratch.before[thread] = 0;
  });
  Total(block, scratch);
  block.ForEachThread([&](int thread) {
    if (thread == 0) counts[block.index] = scratch.sums[0];
  });
}

// Second pass: offsets [tokens + 1] gets the starts in order, at the place that the counts before them give, and behind
// them the end in every entry (empty sequences). Each entry has one writer.
template <class Block, class Int>
PACKFREE_DEVICE void PlaceBoundaries(const Block& block, const Marks<Int>& marks, int64_t tokens, int64_t tiles,
                                     bool clip, const BoundaryCount* counts, int32_t* offsets,
                                     BoundaryScratch& scratch) {
  // Every block adds up all counts for itself: a few thousand numbers even for millions of tokens, and no third pass.
  block.ForEachThread([&](int thread) {
    BoundaryCount all{0, 0};
    int32_t before = 0;
    for (int64_t tile = thread; tile < tiles; tile += kBoundaryThreads) {
      all.starts += counts[tile].starts;
      all.live += counts[tile].live;
      if (tile < block.index) before += counts[tile].starts;
    }
    scratch.sums[thread] = all;
    scratch.before[thread] = before;
    int32_t own = 0;
    ForOwnTokens(block.index, thread, tokens, [&](int64_t i) { own += marks.starts(i); });
    scratch.ranks[0][thread] = own;
  });
  Total(block, scratch);
  // ranks become running sums: after a step each covers twice as many threads to its left.
  int from = 0;
  for (int reach = 1; reach < kBoundaryThreads; reach *= 2) {
    block.ForEachThread([&](int thread) {
      const int32_t left = thread >= reach ? scratch.ranks[from][thread - reach] : 0;
      scratch.ranks[1 - from][thread] = scratch.ranks[from][thread] + left;
    });
    from = 1 - from;
  }
  const int32_t end = clip ? scratch.sums[0].live : static_cast<int32_t>(tokens);
  block.ForEachThread([&](int thread) {
    int64_t rank = scratch.before[0] + (thread > 0 ? scratch.ranks[from][thread - 1] : 0);
    ForOwnTokens(block.index, thread, tokens, [&](int64_t i) {
      if (marks.starts(i)) offsets[rank++] = i < end ? static_cast<int32_t>(i) : end;
      if (i >= scratch.sums[0].starts) offsets[i] = end;
    });
    if (block.index == 0 && thread == 0) offsets[tokens] = end;
  });
}

// Offset number `n` of a row, bounded before it is narrowed, so that it does not point outside the row whatever a
// caller passed; and the first is 0, or the tokens before it would belong to no sequence. Which values are right is
// checked where they may be read.
template <class Int>
PACKFREE_DEVICE int32_t BoundedOffset(Int value, int64_t n, int64_t tokens) {
  if (n == 0) return 0;
  return static_cast<int32_t>(value < 0 ? 0 : (value > tokens ? tokens : value));
}

}  // namespace packfree
