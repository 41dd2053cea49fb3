// Work items and scratch memory of Mamba-2's scan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/chunked/layout.h"
#include "cpu/mamba2_scan/mamba2_scan.h"
#include "cpu/scratch.h"

namespace packfree {

// Heads of a group that one work item runs: they share C B^T, and where a group has more heads its items share the
// threads. A constant, because dB and dC are summed over an item's heads first: their bits must not depend on threads.
constexpr int64_t kHeadBlock = 4;

// Sizes that all tiles of one call share, in elements of Acc.
struct Mamba2ScanPlan {
  int64_t group;             // heads of a group
  int64_t block;             // heads of an item, at most
  int64_t group_blocks;      // items of a group
  int64_t blocks;            // items of a sequence
  int64_t head_dim;          // P
  int64_t state_dim;         // S
  int64_t ldp;               // row of a tile with P columns
  int64_t lds;               // row of a tile with S columns
  int64_t ldc;               // row of a tile with kChunk columns
  int64_t state;             // a state transposed: [S, ldp]
  int64_t state_transposed;  // a state as the caller has it: [P, lds]
  int64_t kept;              // what the backward pass keeps of a chunk

  explicit Mamba2ScanPlan(const Mamba2ScanInputs& in)
      : group(in.heads / in.groups),
        block(std::min(group, kHeadBlock)),
        group_blocks((group + block - 1) / block),
        blocks(in.groups * group_blocks),
        head_dim(in.head_dim),
        state_dim(in.state_dim),
        ldp(TileStride(in.head_dim)),
        lds(TileStride(in.state_dim)),
        ldc(TileStride(kChunk)),
        state(in.state_dim * ldp),
        state_transposed(in.head_dim * lds),
        kept(block * state_transposed) {}
};

// The heads of an item.
struct HeadBlock {
  int64_t group;
  int64_t first;
  int64_t count;

  HeadBlock(const Mamba2ScanPlan& plan, int64_t index)
      : group(index / plan.group_blocks),
        first(group * plan.group + index % plan.group_blocks * plan.block),
        count(std::min(plan.block, (group + 1) * plan.group - first)) {}
};

// What one chunk of c tokens needs in both directions. Lower tiles are those of chunked/triangular-inl.h.
template <class Acc>
struct Mamba2ChunkTiles {
  Acc* b_rows;        // [kChunk, lds]
  Acc* c_rows;        // [kChunk, lds]
  Acc* b_transposed;  // [S, ldc]
  Acc* cb;            // [kChunk, ldc] lower: C_i . B_j
  Acc* decay;         // [kChunk, ldc] lower: decay from j to i
  Acc* read;          // [kChunk, ldc] lower: how much of x_j token i reads
  Acc* from_start;    // [kChunk]: decay from the chunk's start
  Acc* step;          // [kChunk]: step sizes, 0 behind the last token
  Acc* log_decay;     // [kChunk]
  Acc* exponents;     // [kChunk]
  Acc* x_rows;        // [kChunk, ldp]
  Acc* y_rows;        // [kChunk, ldp]

  Mamba2ChunkTiles(const Mamba2ScanPlan& plan, Pieces<Acc>& pieces)
      : b_rows(pieces.Take(kChunk * plan.lds)),
        c_rows(pieces.Take(kChunk * plan.lds)),
        b_transposed(pieces.Take(plan.state_dim * plan.ldc)),
        cb(pieces.Take(kChunk * plan.ldc)),
        decay(pieces.Take(kChunk * plan.ldc)),
        read(pieces.Take(kChunk * plan.ldc)),
        from_start(pieces.Take(kChunk)),
        step(pieces.Take(kChunk)),
        log_decay(pieces.Take(kChunk)),
        exponents(pieces.Take(kChunk)),
        x_rows(pieces.Take(kChunk * plan.ldp)),
        y_rows(pieces.Take(kChunk * plan.ldp)) {}
};

template <class Acc>
struct Mamba2ForwardTiles {
  Mamba2ChunkTiles<Acc> chunk;
  Acc* states;  // [block, S, ldp]: running states

  Mamba2ForwardTiles(const Mamba2ScanPlan& plan, Pieces<Acc>& pieces)
      : chunk(plan, pieces), states(pieces.Take(plan.block * plan.state)) {}
};

template <class Acc>
struct Mamba2BackwardTiles {
  SegmentPlan segments;
  Mamba2ChunkTiles<Acc> chunk;
  Acc* running;             // [block, P, lds]: states of the recomputation
  Acc* checkpoints;         // [segments, block, P, lds]: states at the segments' starts
  Acc* kept;                // [per_segment, block, P, lds]: states at the chunks' starts
  Acc* state;               // [S, ldp]: a kept state transposed
  Acc* d_states;            // [block, S, ldp]
  Acc* d_state_transposed;  // [P, lds]
  Acc* x_transposed;        // [P, ldc]
  Acc* pairs;               // [kChunk, ldc] lower: gradients of `read`, then of the exponents of `decay`
  Acc* d_cb;                // [kChunk, ldc] lower, summed over the item's heads
  Acc* d_b;                 // [kChunk, lds], summed over the item's heads
  Acc* d_c;                 // [kChunk, lds], summed over the item's heads
  Acc* part;                // [kChunk, lds]: what reaches C through the state before the chunk
  Acc* d_x;                 // [kChunk, ldp]
  Acc* from_end;            // [kChunk, ldp]: what reaches x through the state after the chunk
  Acc* d_from_start;        // [kChunk]: gradients of the exponents
  Acc* d_to_end;            // [kChunk]
  Acc* d_step;              // [kChunk]
  Acc* d_log_decay;         // [kChunk]

  Mamba2BackwardTiles(const Mamba2ScanPlan& plan, int64_t length, Pieces<Acc>& pieces)
      : segments(plan.kept * static_cast<int64_t>(sizeof(Acc)), length),
        chunk(plan, pieces),
        running(pieces.Take(plan.block * plan.state_transposed)),
        checkpoints(pieces.Take(segments.segments * plan.block * plan.state_transposed)),
        kept(pieces.Take(segments.per_segment * plan.kept)),
        state(pieces.Take(plan.state)),
        d_states(pieces.Take(plan.block * plan.state)),
        d_state_transposed(pieces.Take(plan.state_transposed)),
        x_transposed(pieces.Take(plan.head_dim * plan.ldc)),
        pairs(pieces.Take(kChunk * plan.ldc)),
        d_cb(pieces.Take(kChunk * plan.ldc)),
        d_b(pieces.Take(kChunk * plan.lds)),
        d_c(pieces.Take(kChunk * plan.lds)),
        part(pieces.Take(kChunk * plan.lds)),
        d_x(pieces.Take(kChunk * plan.ldp)),
        from_end(pieces.Take(kChunk * plan.ldp)),
        d_from_start(pieces.Take(kChunk)),
        d_to_end(pieces.Take(kChunk)),
        d_step(pieces.Take(kChunk)),
        d_log_decay(pieces.Take(kChunk)) {}
};

// Where a backward item adds what other items add to as well: sums of one sequence for gradients of parameters, sums of
// one item for dB and dC. Each is reduced in a fixed order afterwards.
struct Mamba2ScanPartials {
  double* da;        // [sequences with tokens, H]
  double* ddt_bias;  // [sequences with tokens, H]
  double* dd;        // [sequences with tokens, H, P] or null
  void* db;          // Acc [blocks, T, S], or null where a group is one item and writes its result
  void* dc;          // the same
};

}  // namespace packfree
