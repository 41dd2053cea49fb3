// Sizes, scratch memory and entry points that the delta rules share.
#pragma once

#include <cstdint>

#include "common/dtypes.h"
#include "cpu/delta_rule/inputs.h"
#include "cpu/chunked/layout.h"
#include "cpu/work.h"
#include "cpu/scratch.h"

namespace packfree {

// The kernels of one tier and dtype: one sequence n and one key head h with its value heads, or in `recurrent` one
// value head.
template <class Forward, class Backward>
struct DeltaKernels {
  void (*forward)(const Forward& args, int64_t n, int64_t h, void* scratch);
  void (*backward)(const Backward& args, int64_t n, int64_t h, void* scratch);
  void (*recurrent)(const Forward& args, int64_t n, int64_t hv, void* scratch);
};

// The rows of a chunk that a stage is for: a pass that only carries the state on has no use for q.
enum class ChunkRows { kKeys, kQueriesAndKeys };

// Sizes that all tiles of one call share, in elements of Acc.
struct DeltaPlan {
  int64_t group;             // G: value heads that read one key head
  int64_t key_dim;           // K
  int64_t value_dim;         // V
  int64_t ldk;               // row of a tile with K columns
  int64_t ldv;               // row of a tile with V columns
  int64_t ldc;               // row of a tile with kChunk columns
  int64_t pair_k;            // from row to row of q, or of k, where the two lie in turn: 2 ldk
  int64_t pair_v;            // the same in tiles with V columns: 2 ldv
  int64_t state;             // a state: [K, ldv]
  int64_t state_transposed;  // a state transposed: [V, ldk]
  int64_t values;            // [kChunk, ldv]
  int64_t kept;              // what the backward pass keeps of a chunk

  explicit DeltaPlan(const DeltaInputs& in)
      : group(in.value_heads / in.key_heads),
        key_dim(in.key_dim),
        value_dim(in.value_dim),
        ldk(TileStride(in.key_dim)),
        ldv(TileStride(in.value_dim)),
        ldc(TileStride(kChunk)),
        pair_k(2 * ldk),
        pair_v(2 * ldv),
        state(in.key_dim * ldv),
        state_transposed(in.value_dim * ldk),
        values(kChunk * ldv),
        kept(group * (state_transposed + values)) {}
};

// What one chunk of c tokens needs in both directions, whatever the decay. Lower tiles are those of triangular-inl.h.
// Tiles of 2 * kChunk rows hold the rows of q and k in turn (q_0, k_0, q_1, ...), or what belongs to them, so that a
// product over all of them sums in the order of the recurrence.
template <class Acc>
struct DeltaChunkTiles {
  Acc* rows;          // [2 * kChunk, ldk]: q and k, normalised and scaled
  Acc* k_transposed;  // [K, ldc]: the rows of k transposed
  Acc* read;          // [kChunk, ldc] lower: how much of correction j token i reads
  Acc* system;        // [kChunk, ldc] strictly lower: (I + system) corrections = what they are solved from
  Acc* beta;          // [kChunk]
  Acc* q_inverse;     // [kChunk]: inverse norms of the rows
  Acc* k_inverse;     // [kChunk]
  Acc* value_rows;    // [2 * kChunk, ldv]: what belongs to q and k of each token
  Acc* states;        // [G, K, ldv]: running states

  DeltaChunkTiles(const DeltaPlan& plan, Pieces<Acc>& pieces)
      : rows(pieces.Take(2 * kChunk * plan.ldk)),
        k_transposed(pieces.Take(plan.key_dim * plan.ldc)),
        read(pieces.Take(kChunk * plan.ldc)),
        system(pieces.Take(kChunk * plan.ldc)),
        beta(pieces.Take(kChunk)),
        q_inverse(pieces.Take(kChunk)),
        k_inverse(pieces.Take(kChunk)),
        value_rows(pieces.Take(2 * plan.values)),
        states(pieces.Take(plan.group * plan.state)) {}
};

// The same for the backward pass of a sequence of `length` tokens. ChunkTiles are those of the op.
template <class Acc, template <class> class ChunkTiles>
struct DeltaBackwardTiles {
  SegmentPlan segments;
  ChunkTiles<Acc> chunk;
  Acc* checkpoints;         // [segments, G, K, ldv]: states at the segments' starts
  Acc* states_transposed;   // [per_segment, G, V, ldk]: states at the chunks' starts
  Acc* corrections;         // [per_segment, G, kChunk, ldv]: what each token would write at beta = 1
  Acc* d_states;            // [G, K, ldv]
  Acc* d_state_transposed;  // [V, ldk]
  Acc* transposed;          // [V, ldc]: corrections times beta, transposed
  Acc* pairs;               // [2 * kChunk, ldc] two lower tiles: gradients of `read`, from row c on of `mix`
  Acc* d_rows;              // [2 * kChunk, ldk]: gradients of `rows`, summed over the group

  DeltaBackwardTiles(const DeltaPlan& plan, int64_t length, Pieces<Acc>& pieces)
      : segments(plan.kept * static_cast<int64_t>(sizeof(Acc)), length),
        chunk(plan, pieces),
        checkpoints(pieces.Take(segments.segments * plan.group * plan.state)),
        states_transposed(pieces.Take(segments.per_segment * plan.group * plan.state_transposed)),
        corrections(pieces.Take(segments.per_segment * plan.group * plan.values)),
        d_states(pieces.Take(plan.group * plan.state)),
        d_state_transposed(pieces.Take(plan.state_transposed)),
        transposed(pieces.Take(plan.value_dim * plan.ldc)),
        pairs(pieces.Take(2 * kChunk * plan.ldc)),
        d_rows(pieces.Take(2 * kChunk * plan.ldk)) {}
};

// What the token-by-token forward needs of one value head.
template <class Acc>
struct DeltaStepTiles {
  Acc* q;       // [K]
  Acc* k;       // [K]
  Acc* q_read;  // [K]: q as it reads the state before the token
  Acc* k_read;  // [K]
  Acc* decay;   // [K]
  Acc* v;       // [V]
  Acc* o;       // [V]
  Acc* state;   // [K, ldv]

  DeltaStepTiles(const DeltaPlan& plan, Pieces<Acc>& pieces)
      : q(pieces.Take(plan.ldk)),
        k(pieces.Take(plan.ldk)),
        q_read(pieces.Take(plan.ldk)),
        k_read(pieces.Take(plan.ldk)),
        decay(pieces.Take(plan.ldk)),
        v(pieces.Take(plan.ldv)),
        o(pieces.Take(plan.ldv)),
        state(pieces.Take(plan.state)) {}
};

// Sequences chunk by chunk.
template <template <class> class ChunkTiles, class Kernels, class Forward>
void RunDeltaForward(const Kernels& kernels, const Forward& args) {
  const DeltaInputs& in = args.in;
  ClearPadding(in.packing, args.out, in.value_heads * in.value_dim * ElementBytes(in.dtype));
  ForEachSequenceHead(in.packing, in.key_heads, args.final_state, ScratchBytes<ChunkTiles>(in.dtype, DeltaPlan(in)),
                      [&](int64_t n, int64_t h, void* scratch) { kernels.forward(args, n, h, scratch); });
}

// `decay_row` is the number of decays of a token.
template <template <class> class BackwardTiles, class Kernels, class Backward>
void RunDeltaBackward(const Kernels& kernels, const Backward& args, int64_t decay_row) {
  const DeltaInputs& in = args.in;
  const int64_t key_row = in.key_heads * in.key_dim * ElementBytes(in.dtype);
  ClearPadding(in.packing, args.dq, key_row);
  ClearPadding(in.packing, args.dk, key_row);
  ClearPadding(in.packing, args.dv, in.value_heads * in.value_dim * ElementBytes(in.dtype));
  ClearPadding(in.packing, args.dg, decay_row * AccBytes(in.dtype));
  ClearPadding(in.packing, args.dbeta, in.value_heads * AccBytes(in.dtype));
  ForEachSequenceHead(in.packing, in.key_heads, args.dinitial_state,
                      ScratchBytes<BackwardTiles>(in.dtype, DeltaPlan(in), LongestSequence(in.packing)),
                      [&](int64_t n, int64_t h, void* scratch) { kernels.backward(args, n, h, scratch); });
}

// The same as RunDeltaForward, token by token: faster for sequences of a few tokens.
template <class Kernels, class Forward>
void RunDeltaRecurrent(const Kernels& kernels, const Forward& args) {
  const DeltaInputs& in = args.in;
  ClearPadding(in.packing, args.out, in.value_heads * in.value_dim * ElementBytes(in.dtype));
  ForEachSequenceHead(in.packing, in.value_heads, args.final_state,
                      ScratchBytes<DeltaStepTiles>(in.dtype, DeltaPlan(in)),
                      [&](int64_t n, int64_t hv, void* scratch) { kernels.recurrent(args, n, hv, scratch); });
}

}  // namespace packfree
