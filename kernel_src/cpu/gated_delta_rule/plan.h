// Scratch memory of the chunked kernels, and how the backward pass cuts long sequences.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/chunked/layout.h"
#include "cpu/gated_delta_rule/gated_delta_rule.h"

namespace packfree {

// Sizes that all tiles of one call share, in elements of Acc.
struct GatedDeltaRulePlan {
  int64_t group;         // G: value heads that read one key head
  int64_t key_dim;       // K
  int64_t value_dim;     // V
  int64_t ldk;           // row of a tile with K columns
  int64_t ldv;           // row of a tile with V columns
  int64_t ldc;           // row of a tile with kChunk columns
  int64_t pair_k;        // from token to token where two rows of K columns belong to each: 2 ldk
  int64_t pair_v;        // the same with V columns: 2 ldv
  int64_t state;         // a state: [K, ldv]
  int64_t state_turned;  // a state transposed: [V, ldk]
  int64_t values;        // [kChunk, ldv]
  int64_t kept;          // what the backward pass keeps of a chunk

  explicit GatedDeltaRulePlan(const GatedDeltaRuleInputs& in)
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

// What one chunk of c tokens needs in both directions. Lower tiles are those of chunked/triangular-inl.h.
template <class Acc>
struct ChunkTiles {
  Acc* rows;         // [kChunk, 2, ldk]: q and k of each token, normalised and scaled
  Acc* k_turned;     // [K, ldc]: the rows of k transposed
  Acc* qk;           // [kChunk, ldc] lower: q_i . k_j
  Acc* kk;           // [kChunk, ldc] lower: k_i . k_j
  Acc* decay;        // [kChunk, ldc] lower: decay from j to i
  Acc* system;       // [kChunk, ldc] lower: I + it maps corrections to what they are made of
  Acc* read;         // [kChunk, ldc] lower: how much of correction j token i reads
  Acc* from_start;   // [kChunk]: decay from the chunk's start
  Acc* exponents;    // [kChunk]
  Acc* q_inverse;    // [kChunk]: inverse norms of the rows
  Acc* k_inverse;    // [kChunk]
  Acc* value_rows;   // [kChunk, 2, ldv]: what belongs to q and to k of each token
  Acc* states;       // [G, K, ldv]: running states

  ChunkTiles(const GatedDeltaRulePlan& plan, Pieces<Acc>& pieces)
      : rows(pieces.Take(2 * kChunk * plan.ldk)),
        k_turned(pieces.Take(plan.key_dim * plan.ldc)),
        qk(pieces.Take(kChunk * plan.ldc)),
        kk(pieces.Take(kChunk * plan.ldc)),
        decay(pieces.Take(kChunk * plan.ldc)),
        system(pieces.Take(kChunk * plan.ldc)),
        read(pieces.Take(kChunk * plan.ldc)),
        from_start(pieces.Take(kChunk)),
        exponents(pieces.Take(kChunk)),
        q_inverse(pieces.Take(kChunk)),
        k_inverse(pieces.Take(kChunk)),
        value_rows(pieces.Take(2 * plan.values)),
        states(pieces.Take(plan.group * plan.state)) {}
};

template <class Acc>
struct BackwardTiles {
  ChunkTiles<Acc> chunk;
  Acc* checkpoints;     // [segments, G, K, ldv]: states at the segments' starts
  Acc* states_turned;   // [per_segment, G, V, ldk]: states at the chunks' starts
  Acc* corrections;     // [per_segment, G, kChunk, ldv]: what each token would write at beta = 1
  Acc* d_states;        // [G, K, ldv]
  Acc* d_state_turned;  // [V, ldk]
  Acc* turned;          // [V, ldc]: corrections times beta, transposed
  Acc* mix;             // [kChunk, ldc] lower: k_i . k_j times decay, 0 on the diagonal
  Acc* pairs;           // [2 * kChunk, ldc] lower: gradients of `read` and `mix`
  Acc* d_qk;            // [kChunk, ldc] lower, summed over the group
  Acc* d_kk;            // [kChunk, ldc] lower, summed over the group
  Acc* d_rows;          // [kChunk, 2, ldk]: gradients of `rows`
  Acc* from_state;      // [kChunk, 2, ldk]: what reaches q and k through the state before the chunk
  Acc* to_state;        // [kChunk, ldk]: what reaches k through the state after it
  Acc* d_from_start;    // [kChunk]: gradients of the exponents
  Acc* d_to_end;        // [kChunk]

  BackwardTiles(const GatedDeltaRulePlan& plan, const SegmentPlan& segments, Pieces<Acc>& pieces)
      : chunk(plan, pieces),
        checkpoints(pieces.Take(segments.segments * plan.group * plan.state)),
        states_turned(pieces.Take(segments.per_segment * plan.group * plan.state_turned)),
        corrections(pieces.Take(segments.per_segment * plan.group * plan.values)),
        d_states(pieces.Take(plan.group * plan.state)),
        d_state_turned(pieces.Take(plan.state_turned)),
        turned(pieces.Take(plan.value_dim * plan.ldc)),
        mix(pieces.Take(kChunk * plan.ldc)),
        pairs(pieces.Take(2 * kChunk * plan.ldc)),
        d_qk(pieces.Take(kChunk * plan.ldc)),
        d_kk(pieces.Take(kChunk * plan.ldc)),
        d_rows(pieces.Take(2 * kChunk * plan.ldk)),
        from_state(pieces.Take(2 * kChunk * plan.ldk)),
        to_state(pieces.Take(kChunk * plan.ldk)),
        d_from_start(pieces.Take(kChunk)),
        d_to_end(pieces.Take(kChunk)) {}
};

// Bytes that one work item needs.
template <class Acc>
int64_t ForwardScratchBytes(const GatedDeltaRulePlan& plan) {
  Pieces<Acc> pieces(nullptr);
  ChunkTiles<Acc>(plan, pieces);
  return pieces.used() * static_cast<int64_t>(sizeof(Acc));
}
template <class Acc>
int64_t BackwardScratchBytes(const GatedDeltaRulePlan& plan, int64_t length) {
  Pieces<Acc> pieces(nullptr);
  BackwardTiles<Acc>(plan, SegmentPlan(plan.kept * static_cast<int64_t>(sizeof(Acc)), length), pieces);
  return pieces.used() * static_cast<int64_t>(sizeof(Acc));
}

}  // namespace packfree
