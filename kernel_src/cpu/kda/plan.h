// Scratch memory of Kimi delta attention.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/chunked/layout.h"
#include "cpu/kda/kda.h"

namespace packfree {

// Tokens of a sub-block: decays inside one are multiplied token by token, decays between two go through the first token
// of the later one. Equal to kTriangleBlock, so that a sub-block's row of pairs is a row of blocks of a lower tile.
constexpr int64_t kSubBlock = kTriangleBlock;
constexpr int64_t kSubBlocks = kChunk / kSubBlock;

// A mark is a place decays lead to: mark b is the first token of sub-block b, and in a chunk of B sub-blocks mark B is
// the last token of all. Mark b looks back at the tokens of the b sub-blocks before it; its rows start here.
constexpr int64_t MarkRow(int64_t mark) { return kSubBlock * mark * (mark - 1) / 2; }
constexpr int64_t kMarkRows = MarkRow(kSubBlocks + 1);

// Sizes that all tiles of one call share, in elements of Acc.
struct KdaPlan {
  int64_t group;         // G: value heads that read one key head
  int64_t key_dim;       // K
  int64_t value_dim;     // V
  int64_t ldk;           // row of a tile with K columns
  int64_t ldv;           // row of a tile with V columns
  int64_t ldc;           // row of a tile with kChunk columns
  int64_t pair_k;        // from row to row of q, or of k, where the two lie in turn
  int64_t pair_v;        // the same in tiles with V columns
  int64_t state;         // a state: [K, ldv]
  int64_t state_turned;  // a state transposed: [V, ldk]
  int64_t values;        // [kChunk, ldv]
  int64_t kept;          // what the backward pass keeps of a chunk

  explicit KdaPlan(const KdaInputs& in)
      : group(in.value_heads / in.key_heads),
        key_dim(in.key_dim),
        value_dim(in.value_dim),
        ldk(TileStride(in.key_dim)),
        ldv(TileStride(in.value_dim)),
        ldc(TileStride(kChunk)),
        pair_k(2 * ldk),
        pair_v(2 * ldv),
        state(in.key_dim * ldv),
        state_turned(in.value_dim * ldk),
        values(kChunk * ldv),
        kept(group * (state_turned + values)) {}
};

// What one chunk of c tokens needs in both directions. Lower tiles are those of chunked/triangular-inl.h. Tiles of
// 2 * kChunk rows hold the rows of q and k in turn (q_0, k_0, q_1, ...), or what belongs to them, so that a product over
// all of them sums in the order of the recurrence. All decays are per key channel.
template <class Acc>
struct KdaChunkTiles {
  Acc* rows;         // [2 * kChunk, ldk]: q and k, normalised and scaled
  Acc* k_turned;     // [K, ldc]: the rows of k transposed
  Acc* step;         // [kChunk, ldk]: decay of each token
  Acc* next;         // [kChunk, ldk]: decay from a token to the next mark
  Acc* inner;        // [kChunk, ldk]: decay from the first token of a token's sub-block to it
  Acc* from_start;   // [kChunk, ldk]: decay from the chunk's start, its first token included
  Acc* to_mark;      // [kMarkRows, ldk]: decay from each token to each mark after it
  Acc* inner_rows;   // [2 * kChunk, ldk]: rows times inner
  Acc* start_rows;   // [2 * kChunk, ldk]: rows times from_start
  Acc* mark_rows;    // [kMarkRows, ldk]: rows of k times to_mark
  Acc* turned;       // [K, ldc]: mark_rows of one mark transposed
  Acc* running;      // [K, kSubBlock]: keys of a sub-block, decayed to the present token, transposed
  Acc* read;         // [kChunk, ldc] lower: q_i . k_j decayed from j to i
  Acc* mix;          // [kChunk, ldc] lower: k_i . k_j decayed from j to i, 0 on the diagonal
  Acc* system;       // [kChunk, ldc] lower: I + it maps corrections to what they are made of
  Acc* beta;         // [kChunk]
  Acc* q_inverse;    // [kChunk]: inverse norms of the rows
  Acc* k_inverse;    // [kChunk]
  Acc* value_rows;   // [2 * kChunk, ldv]
  Acc* states;       // [G, K, ldv]: running states

  KdaChunkTiles(const KdaPlan& plan, Pieces<Acc>& pieces)
      : rows(pieces.Take(2 * kChunk * plan.ldk)),
        k_turned(pieces.Take(plan.key_dim * plan.ldc)),
        step(pieces.Take(kChunk * plan.ldk)),
        next(pieces.Take(kChunk * plan.ldk)),
        inner(pieces.Take(kChunk * plan.ldk)),
        from_start(pieces.Take(kChunk * plan.ldk)),
        to_mark(pieces.Take(kMarkRows * plan.ldk)),
        inner_rows(pieces.Take(2 * kChunk * plan.ldk)),
        start_rows(pieces.Take(2 * kChunk * plan.ldk)),
        mark_rows(pieces.Take(kMarkRows * plan.ldk)),
        turned(pieces.Take(plan.key_dim * plan.ldc)),
        running(pieces.Take(plan.key_dim * kSubBlock)),
        read(pieces.Take(kChunk * plan.ldc)),
        mix(pieces.Take(kChunk * plan.ldc)),
        system(pieces.Take(kChunk * plan.ldc)),
        beta(pieces.Take(kChunk)),
        q_inverse(pieces.Take(kChunk)),
        k_inverse(pieces.Take(kChunk)),
        value_rows(pieces.Take(2 * plan.values)),
        states(pieces.Take(plan.group * plan.state)) {}
};

template <class Acc>
struct KdaBackwardTiles {
  KdaChunkTiles<Acc> chunk;
  Acc* checkpoints;     // [segments, G, K, ldv]: states at the segments' starts
  Acc* states_turned;   // [per_segment, G, V, ldk]: states at the chunks' starts
  Acc* corrections;     // [per_segment, G, kChunk, ldv]: what each token would write at beta = 1
  Acc* d_states;        // [G, K, ldv]
  Acc* d_state_turned;  // [V, ldk]
  Acc* turned;          // [V, ldc]: corrections times beta, transposed
  Acc* pairs;           // [2 * kChunk, ldc] two lower tiles: gradients of `read`, from row c on of `mix`
  Acc* d_rows;          // [2 * kChunk, ldk]: gradients of `rows`, summed over the group
  Acc* d_parts;         // [2 * kChunk, ldk]: gradients of decayed rows
  Acc* d_decay;         // [kChunk, ldk]: gradients of the log-decays

  KdaBackwardTiles(const KdaPlan& plan, const SegmentPlan& segments, Pieces<Acc>& pieces)
      : chunk(plan, pieces),
        checkpoints(pieces.Take(segments.segments * plan.group * plan.state)),
        states_turned(pieces.Take(segments.per_segment * plan.group * plan.state_turned)),
        corrections(pieces.Take(segments.per_segment * plan.group * plan.values)),
        d_states(pieces.Take(plan.group * plan.state)),
        d_state_turned(pieces.Take(plan.state_turned)),
        turned(pieces.Take(plan.value_dim * plan.ldc)),
        pairs(pieces.Take(2 * kChunk * plan.ldc)),
        d_rows(pieces.Take(2 * kChunk * plan.ldk)),
        d_parts(pieces.Take(2 * kChunk * plan.ldk)),
        d_decay(pieces.Take(kChunk * plan.ldk)) {}
};

// Bytes that one work item needs.
template <class Acc>
int64_t KdaForwardScratchBytes(const KdaPlan& plan) {
  Pieces<Acc> pieces(nullptr);
  KdaChunkTiles<Acc>(plan, pieces);
  return pieces.used() * static_cast<int64_t>(sizeof(Acc));
}
template <class Acc>
int64_t KdaBackwardScratchBytes(const KdaPlan& plan, int64_t length) {
  Pieces<Acc> pieces(nullptr);
  KdaBackwardTiles<Acc>(plan, SegmentPlan(plan.kept * static_cast<int64_t>(sizeof(Acc)), length), pieces);
  return pieces.used() * static_cast<int64_t>(sizeof(Acc));
}

}  // namespace packfree
