// Tiles of the ops that run a linear recurrence chunk by chunk.
#pragma once

#include <algorithm>
#include <cstdint>

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

// Tokens [begin, begin + count) of the pack: chunk `index` of sequence n.
struct Chunk {
  int64_t begin;
  int64_t count;

  Chunk(const PackingView& packing, int64_t n, int64_t index) : begin(packing.bos(n) + index * kChunk) {
    count = std::min(kChunk, packing.eos(n) - begin);
  }
};
inline int64_t ChunksOf(int64_t length) { return (length + kChunk - 1) / kChunk; }

// How a backward pass walks a sequence: segments of chunks, the last first. What it keeps of each chunk
// (`chunk_bytes`) is held for one segment at a time, and one state per segment. A sequence whose chunks all fit into
// about kSegmentBytes is one segment and is recomputed once, a longer one twice; memory grows with the root of the
// length. An empty sequence is one empty segment.
struct SegmentPlan {
  static constexpr int64_t kSegmentBytes = int64_t{8} << 20;
  int64_t chunks;  // of the sequence
  int64_t per_segment;
  int64_t segments;

  SegmentPlan(int64_t chunk_bytes, int64_t length) : chunks(ChunksOf(length)) {
    const int64_t least = std::max<int64_t>(1, chunks);
    per_segment = std::max<int64_t>(1, kSegmentBytes / chunk_bytes);
    while (per_segment * per_segment < least) ++per_segment;
    per_segment = std::min(per_segment, least);
    segments = (least + per_segment - 1) / per_segment;
  }
  // First chunk of a segment, and the one behind its last.
  int64_t first(int64_t segment) const { return segment * per_segment; }
  int64_t last(int64_t segment) const { return std::min(chunks, (segment + 1) * per_segment); }
};

}  // namespace packfree
