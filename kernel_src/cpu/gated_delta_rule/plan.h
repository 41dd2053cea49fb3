// Scratch memory of the gated delta rule beside what the delta rules share.
#pragma once

#include "cpu/delta_rule/plan.h"

namespace packfree {

template <class Acc>
struct GatedChunkTiles : DeltaChunkTiles<Acc> {
  Acc* qk;          // [kChunk, ldc] lower: q_i . k_j
  Acc* kk;          // [kChunk, ldc] lower: k_i . k_j
  Acc* decay;       // [kChunk, ldc] lower: decay from j to i
  Acc* from_start;  // [kChunk]: decay from the chunk's start
  Acc* exponents;   // [kChunk]

  GatedChunkTiles(const DeltaPlan& plan, Pieces<Acc>& pieces)
      : DeltaChunkTiles<Acc>(plan, pieces),
        qk(pieces.Take(kChunk * plan.ldc)),
        kk(pieces.Take(kChunk * plan.ldc)),
        decay(pieces.Take(kChunk * plan.ldc)),
        from_start(pieces.Take(kChunk)),
        exponents(pieces.Take(kChunk)) {}
};

template <class Acc>
struct GatedBackwardTiles : DeltaBackwardTiles<Acc, GatedChunkTiles> {
  Acc* mix;           // [kChunk, ldc] lower: k_i . k_j times decay, 0 on the diagonal
  Acc* d_qk;          // [kChunk, ldc] lower, summed over the group
  Acc* d_kk;          // [kChunk, ldc] lower, summed over the group
  Acc* from_state;    // [2 * kChunk, ldk]: what reaches q and k through the state before the chunk
  Acc* to_state;      // [kChunk, ldk]: what reaches k through the state after it
  Acc* d_from_start;  // [kChunk]: gradients of the exponents
  Acc* d_to_end;      // [kChunk]

  GatedBackwardTiles(const DeltaPlan& plan, int64_t length, Pieces<Acc>& pieces)
      : DeltaBackwardTiles<Acc, GatedChunkTiles>(plan, length, pieces),
        mix(pieces.Take(kChunk * plan.ldc)),
        d_qk(pieces.Take(kChunk * plan.ldc)),
        d_kk(pieces.Take(kChunk * plan.ldc)),
        from_state(pieces.Take(2 * kChunk * plan.ldk)),
        to_state(pieces.Take(kChunk * plan.ldk)),
        d_from_start(pieces.Take(kChunk)),
        d_to_end(pieces.Take(kChunk)) {}
};

}  // namespace packfree
