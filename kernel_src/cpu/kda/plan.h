// Scratch memory of Kimi delta attention beside what the delta rules share.
#pragma once

#include <cstdint>

#include "cpu/delta_rule/plan.h"

namespace packfree {

// Tokens of a sub-block: decays inside one are multiplied token by token, decays between two go through the first token
// of the later one. Equal to kTriangleBlock, so that a sub-block's row of pairs is a row of blocks of a lower tile.
constexpr int64_t kSubBlock = kTriangleBlock;
constexpr int64_t kSubBlocks = kChunk / kSubBlock;

// A mark is a place decays lead to: mark b is the first token of sub-block b, and in a chunk of B sub-blocks mark B is
// the last token of all. Mark b looks back at the tokens of the b sub-blocks before it; its rows start here.
constexpr int64_t MarkRow(int64_t mark) { return kSubBlock * mark * (mark - 1) / 2; }
constexpr int64_t kMarkRows = MarkRow(kSubBlocks + 1);

// All decays are per key channel. Tiles of 2 * kChunk rows hold what belongs to q and k in turn.
template <class Acc>
struct KdaChunkTiles : DeltaChunkTiles<Acc> {
  Acc* step;        // [kChunk, ldk]: decay of each token
  Acc* next;        // [kChunk, ldk]: decay from a token to the next mark
  Acc* inner;       // [kChunk, ldk]: decay from the first token of a token's sub-block to it
  Acc* from_start;  // [kChunk, ldk]: decay from the chunk's start, its first token included
  Acc* to_mark;     // [kMarkRows, ldk]: decay from each token to each mark after it
  Acc* inner_rows;  // [2 * kChunk, ldk]: rows times inner
  Acc* start_rows;  // [2 * kChunk, ldk]: rows times from_start
  Acc* mark_rows;   // [kMarkRows, ldk]: rows of k times to_mark
  Acc* transposed;  // [K, ldc]: mark_rows of one mark transposed
  Acc* running;     // [K, kSubBlock]: keys of a sub-block, decayed to the present token, transposed
  Acc* mix;         // [kChunk, ldc] lower: k_i . k_j decayed from j to i, 0 on the diagonal

  KdaChunkTiles(const DeltaPlan& plan, Pieces<Acc>& pieces)
      : DeltaChunkTiles<Acc>(plan, pieces),
        step(pieces.Take(kChunk * plan.ldk)),
        next(pieces.Take(kChunk * plan.ldk)),
        inner(pieces.Take(kChunk * plan.ldk)),
        from_start(pieces.Take(kChunk * plan.ldk)),
        to_mark(pieces.Take(kMarkRows * plan.ldk)),
        inner_rows(pieces.Take(2 * kChunk * plan.ldk)),
        start_rows(pieces.Take(2 * kChunk * plan.ldk)),
        mark_rows(pieces.Take(kMarkRows * plan.ldk)),
        transposed(pieces.Take(plan.key_dim * plan.ldc)),
        running(pieces.Take(plan.key_dim * kSubBlock)),
        mix(pieces.Take(kChunk * plan.ldc)) {}
};

template <class Acc>
struct KdaBackwardTiles : DeltaBackwardTiles<Acc, KdaChunkTiles> {
  Acc* d_parts;  // [2 * kChunk, ldk]: gradients of decayed rows
  Acc* d_decay;  // [kChunk, ldk]: gradients of the log-decays

  KdaBackwardTiles(const DeltaPlan& plan, int64_t length, Pieces<Acc>& pieces)
      : DeltaBackwardTiles<Acc, KdaChunkTiles>(plan, length, pieces),
        d_parts(pieces.Take(2 * kChunk * plan.ldk)),
        d_decay(pieces.Take(kChunk * plan.ldk)) {}
};

}  // namespace packfree
