// Stages of Kimi delta attention that both directions share, as delta_rule/items-inl.h calls them. Included once per
// tier, after chunked/*-inl.h and gate-inl.h. Letters as in the README: c tokens of the chunk, S the state before it.
// Every decay is a product of the decays of exactly the tokens it spans: no quotient, no difference of sums. (Products
// inside a sub-block are as exact as exponentials of sums there, measured, and cost less.)

// out = a * b over a padded row.
template <class Acc>
PACKFREE_INLINE void MultiplyRow(int64_t columns, const Acc* a, const Acc* b, Acc* out) {
  for (int64_t x = 0; x < columns; x += kLanes<Acc>) Store(out + x, Load<Acc>(a + x) * Load<Acc>(b + x));
}
PACKFREE_INLINE int64_t SubBlocksOf(int64_t c) { return (c + kSubBlock - 1) / kSubBlock; }

// Decays inside the sub-blocks, inner and next of plan.h, from those of the tokens in tiles.step.
template <class Acc>
inline void SubBlockDecays(const DeltaPlan& plan, int64_t c, const KdaChunkTiles<Acc>& tiles) {
  const int64_t ld = plan.ldk;
  for (int64_t first = 0; first < c; first += kSubBlock) {
    const bool last = first + kSubBlock >= c;
    const int64_t end = last ? c : first + kSubBlock;
    for (int64_t x = 0; x < plan.key_dim; x += kLanes<Acc>) {
      const Acc* step = tiles.step + x;
      Vec<Acc> decay = Set<Acc>(1);
      Store(tiles.inner + first * ld + x, decay);
      for (int64_t i = first + 1; i < end; ++i) {
        decay = decay * Load<Acc>(step + i * ld);
        Store(tiles.inner + i * ld + x, decay);
      }
      // The next mark is the first token of the next sub-block, in the last sub-block its last token.
      decay = last ? Set<Acc>(1) : Load<Acc>(step + end * ld);
      Store(tiles.next + (end - 1) * ld + x, decay);
      for (int64_t j = end - 2; j >= first; --j) {
        decay = decay * Load<Acc>(step + (j + 1) * ld);
        Store(tiles.next + j * ld + x, decay);
      }
    }
  }
}

// Decays between sub-blocks: to_mark and from_start of plan.h.
template <class Acc>
inline void ChunkDecays(const DeltaPlan& plan, int64_t c, const KdaChunkTiles<Acc>& tiles) {
  const int64_t K = plan.key_dim, ld = plan.ldk, row_bytes = PadColumns<Acc>(K) * sizeof(Acc);
  for (int64_t first = 0; first < c; first += kSubBlock) {
    const int64_t end = first + kSubBlock < c ? first + kSubBlock : c, mark = first / kSubBlock + 1;
    const Acc* over = tiles.next + first * ld;  // from this sub-block's first token to the mark after it
    // What leads to that mark leads through the one before it, which is this first token.
    const Acc* before = tiles.to_mark + MarkRow(mark - 1) * ld;
    Acc* now = tiles.to_mark + MarkRow(mark) * ld;
    for (int64_t j = 0; j < first; ++j) MultiplyRow<Acc>(K, before + j * ld, over, now + j * ld);
    __builtin_memcpy(now + first * ld, over, (end - first - 1) * ld * sizeof(Acc) + row_bytes);
    // From the chunk's start to the first token, then on inside the sub-block.
    Acc* start = tiles.from_start + first * ld;
    if (first == 0) {
      __builtin_memcpy(start, tiles.step, row_bytes);
    } else {
      MultiplyRow<Acc>(K, start - kSubBlock * ld, over - kSubBlock * ld, start);
    }
    for (int64_t i = first + 1; i < end; ++i) {
      MultiplyRow<Acc>(K, start, tiles.inner + i * ld, tiles.from_start + i * ld);
    }
  }
}

// Rows of k, and of q if it is wanted, decayed: inner_rows, start_rows, mark_rows.
template <class Acc>
inline void DecayRows(const DeltaPlan& plan, int64_t c, ChunkRows which, const KdaChunkTiles<Acc>& tiles) {
  const int64_t K = plan.key_dim, ld = plan.ldk;
  for (int64_t side = which == ChunkRows::kQueriesAndKeys ? 0 : 1; side < 2; ++side) {
    for (int64_t i = 0; i < c; ++i) {
      const int64_t at = (2 * i + side) * ld;
      MultiplyRow<Acc>(K, tiles.rows + at, tiles.inner + i * ld, tiles.inner_rows + at);
      MultiplyRow<Acc>(K, tiles.rows + at, tiles.from_start + i * ld, tiles.start_rows + at);
    }
  }
  for (int64_t mark = 1; mark <= SubBlocksOf(c); ++mark) {
    const int64_t count = mark * kSubBlock < c ? mark * kSubBlock : c;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = (MarkRow(mark) + j) * ld;
      MultiplyRow<Acc>(K, tiles.rows + (2 * j + 1) * ld, tiles.to_mark + at, tiles.mark_rows + at);
    }
  }
}

// Pairs inside one sub-block of `count` tokens: q, k (rows `pair` apart) and step at its first token, `running`
// holding its keys transposed.
// Lane j of a row of `running` is key j decayed to the present token i; it starts to decay once i has passed it.
template <class Acc, ChunkRows kWhich>
inline void PairsInSubBlock(int64_t key_dim, int64_t count, const Acc* q, const Acc* k, int64_t pair, const Acc* step,
                            int64_t ldk, Acc* running, Acc* read, Acc* mix, int64_t ldc) {
  constexpr int L = kLanes<Acc>;
  constexpr int kRegisters = static_cast<int>(kSubBlock) / L;
  using Lane = typename VecTraits<Acc>::IntLane;
  Lane numbers[kSubBlock];
  for (int j = 0; j < kSubBlock; ++j) numbers[j] = j;
  for (int64_t i = 0; i < count; ++i) {
    IntVec<Acc> lane[kRegisters], begun[kRegisters];
    // Two sums a register, of even and odd channels: their multiply-adds do not wait for one another.
    Vec<Acc> by_q[2][kRegisters], by_k[2][kRegisters];
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) {
      __builtin_memcpy(&lane[m], numbers + m * L, sizeof(lane[m]));
      begun[m] = lane[m] < static_cast<Lane>(i);
      by_q[0][m] = by_q[1][m] = by_k[0][m] = by_k[1][m] = Zero<Acc>();
    }
    const Acc* q_row = q + i * pair;
    const Acc* k_row = k + i * pair;
    const Acc* step_row = step + i * ldk;
    for (int64_t x = 0; x < key_dim; x += 2) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        if (x + odd >= key_dim) break;
        const Vec<Acc> decay = Set<Acc>(step_row[x + odd]);
        const Vec<Acc> k_value = Set<Acc>(k_row[x + odd]);
        Acc* at = running + (x + odd) * kSubBlock;
#pragma GCC unroll 8
        for (int m = 0; m < kRegisters; ++m) {
          Vec<Acc> key = Load<Acc>(at + m * L);
          key = Select(begun[m], key * decay, key);
          Store(at + m * L, key);
          if constexpr (kWhich == ChunkRows::kQueriesAndKeys)
            by_q[odd][m] = MulAdd(Set<Acc>(q_row[x + odd]), key, by_q[odd][m]);
          by_k[odd][m] = MulAdd(k_value, key, by_k[odd][m]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) {
      if constexpr (kWhich == ChunkRows::kQueriesAndKeys) {
        Store(read + i * ldc + m * L, Select(lane[m] <= static_cast<Lane>(i), by_q[0][m] + by_q[1][m], Zero<Acc>()));
      }
      Store(mix + i * ldc + m * L, Select(begun[m], by_k[0][m] + by_k[1][m], Zero<Acc>()));
    }
  }
}

// tiles.mix and, for queries, tiles.read.
template <class Acc>
inline void DecayedPairs(const DeltaPlan& plan, int64_t c, ChunkRows which, const KdaChunkTiles<Acc>& tiles) {
  const int64_t K = plan.key_dim, ldk = plan.ldk, pair = plan.pair_k, ldc = plan.ldc;
  for (int64_t first = 0; first < c; first += kSubBlock) {
    const int64_t count = c - first < kSubBlock ? c - first : kSubBlock;
    Acc* read = tiles.read + first * ldc;
    Acc* mix = tiles.mix + first * ldc;
    if (first > 0) {
      const Acc* keys = tiles.mark_rows + MarkRow(first / kSubBlock) * ldk;
      LoadTileTransposed<Acc>(first, K, keys, ldk, tiles.transposed, ldc);
      const Acc* inner = tiles.inner_rows + first * pair;
      if (which == ChunkRows::kQueriesAndKeys)
        Multiply<Into::kOverwrite>(count, first, K, inner, pair, 1, tiles.transposed, ldc, read, ldc);
      Multiply<Into::kOverwrite>(count, first, K, inner + ldk, pair, 1, tiles.transposed, ldc, mix, ldc);
    }
    if (count < kSubBlock) ClearTile<Acc>(K, kSubBlock, tiles.running, kSubBlock);
    LoadTile<Acc>(K, count, tiles.k_transposed + first, ldc, tiles.running, kSubBlock);
    const Acc* q = tiles.rows + first * pair;
    const Acc* step = tiles.step + first * ldk;
    if (which == ChunkRows::kQueriesAndKeys) {
      PairsInSubBlock<Acc, ChunkRows::kQueriesAndKeys>(K, count, q, q + ldk, pair, step, ldk, tiles.running,
                                                       read + first, mix + first, ldc);
    } else {
      PairsInSubBlock<Acc, ChunkRows::kKeys>(K, count, q, q + ldk, pair, step, ldk, tiles.running, read + first,
                                             mix + first, ldc);
    }
  }
}

// One decay for each row of the state, which q and k carry before they read it.
template <class Acc>
struct KdaDecay {
  Gate<Acc> gate;
  int64_t key_dim;
  int64_t ldk;
  const Acc* g;  // [T, HV, K]

  KdaDecay(const KdaInputs& in, const DeltaPlan& plan, int64_t hv)
      : gate(in, hv), key_dim(plan.key_dim), ldk(plan.ldk), g(static_cast<const Acc*>(in.g)) {}
  StepDecay<Acc> Step(int64_t token, const DeltaStepTiles<Acc>& tiles) const {
    LoadDecays<Acc>(gate, 1, key_dim, g + token * key_dim, 0, tiles.decay, ldk);
    MultiplyRow<Acc>(key_dim, tiles.q, tiles.decay, tiles.q_read);
    MultiplyRow<Acc>(key_dim, tiles.k, tiles.decay, tiles.k_read);
    return {tiles.decay, 1, Acc(1), tiles.q_read, tiles.k_read};
  }
};

// What delta_rule/items-inl.h asks of a rule, but for its backward stages.
template <class Elem, class Acc>
struct KdaForwardStages {
  using Element = Elem;
  using Accumulation = Acc;
  using Inputs = KdaInputs;
  using Forward = KdaForward;
  using Backward = KdaBackward;
  using ChunkTiles = KdaChunkTiles<Acc>;
  using BackwardTiles = KdaBackwardTiles<Acc>;
  using Decay = KdaDecay<Acc>;

  // Products of q and k are weighed by decays per channel, so each value head makes its own: nothing for a key head.
  static void KeyProducts(const DeltaPlan&, int64_t, ChunkRows, const KdaChunkTiles<Acc>&) {}

  // Decays, decayed rows, pairs, beta.
  static void PrepareHead(const KdaInputs& in, const DeltaPlan& plan, int64_t begin, int64_t c, int64_t hv,
                          ChunkRows which, const KdaChunkTiles<Acc>& tiles) {
    const int64_t token = begin * in.value_heads + hv;  // of [T, HV]
    LoadDecays<Acc>(Gate<Acc>(in, hv), c, plan.key_dim, static_cast<const Acc*>(in.g) + token * plan.key_dim,
                    in.value_heads * plan.key_dim, tiles.step, plan.ldk);
    SubBlockDecays<Acc>(plan, c, tiles);
    ChunkDecays<Acc>(plan, c, tiles);
    DecayRows<Acc>(plan, c, which, tiles);
    DecayedPairs<Acc>(plan, c, which, tiles);
    LoadColumn<Acc>(c, static_cast<const Acc*>(in.beta) + token, in.value_heads, tiles.beta);
  }

  // system[i, j] = mix[i, j] beta_j: the system of corrections at beta = 1. For queries read[i, j] *= beta_j.
  static void WeighPairs(const DeltaPlan& plan, int64_t c, ChunkRows which, const KdaChunkTiles<Acc>& tiles) {
    for (int64_t i = 0; i < c; ++i) {
      const int64_t row = i * plan.ldc;
      for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
        const Vec<Acc> beta = Load<Acc>(tiles.beta + j);
        Store(tiles.system + row + j, Load<Acc>(tiles.mix + row + j) * beta);
        if (which == ChunkRows::kQueriesAndKeys) Store(tiles.read + row + j, Load<Acc>(tiles.read + row + j) * beta);
      }
    }
  }

  // Rows that carry their decays read the state as it is.
  static const Acc* StateRows(const KdaChunkTiles<Acc>& tiles) { return tiles.start_rows; }

  static const Acc* StateFactors(const KdaChunkTiles<Acc>&) { return nullptr; }

  // S = decay over the chunk, row by row, times S, + sum over j of (k_j decayed to the end) (beta_j corrections_j)^T.
  // Rows of `corrections` lie `stride` apart and are scaled on the way.
  static void AdvanceState(const DeltaPlan& plan, int64_t c, const KdaChunkTiles<Acc>& tiles, Acc* corrections,
                           int64_t stride, Acc* state) {
    for (int64_t j = 0; j < c; ++j) ScaleRow<Acc>(plan.value_dim, tiles.beta[j], corrections + j * stride);
    const Acc* over_chunk = tiles.from_start + (c - 1) * plan.ldk;
    for (int64_t r = 0; r < plan.key_dim; ++r) ScaleRow<Acc>(plan.value_dim, over_chunk[r], state + r * plan.ldv);
    const Acc* to_end = tiles.mark_rows + MarkRow(SubBlocksOf(c)) * plan.ldk;
    Multiply<Into::kAdd>(plan.key_dim, plan.value_dim, c, to_end, 1, plan.ldk, corrections, stride, state, plan.ldv);
  }
};
