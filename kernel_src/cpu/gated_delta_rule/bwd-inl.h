// Backward stages of the gated delta rule, as delta_rule/items-inl.h calls them. Included once per tier, after
// chunk-inl.h. Gradients of tiles carry d_ before the tile's name.

// Lower tiles of one value head: read = (q . k) decay, mix = (k . k) decay below the diagonal, and
// system[i, j] = beta_i mix[i, j]. Unlike the forward's, none of their columns carries beta_j.
template <class Acc>
inline void WeighPairsBackward(const DeltaPlan& plan, int64_t c, const GatedBackwardTiles<Acc>& tiles) {
  const GatedChunkTiles<Acc>& chunk = tiles.chunk;
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    const Vec<Acc> beta = Set<Acc>(chunk.beta[i]);
    for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
      const Vec<Acc> decay = Load<Acc>(chunk.decay + row + j);
      const Vec<Acc> mix = Load<Acc>(chunk.kk + row + j) * decay;
      Store(chunk.read + row + j, Load<Acc>(chunk.qk + row + j) * decay);
      Store(tiles.mix + row + j, mix);
      Store(chunk.system + row + j, beta * mix);
    }
    tiles.mix[row + i] = 0;
  }
}

// Takes the gradients of read and mix in tiles.pairs apart: adds those of q . k and k . k to the group's sums, and
// leaves the gradient of each pair's exponent in the upper half of tiles.pairs.
template <class Acc>
inline void SplitPairGradients(const DeltaPlan& plan, int64_t c, const GatedBackwardTiles<Acc>& tiles) {
  const GatedChunkTiles<Acc>& chunk = tiles.chunk;
  Acc* d_read = tiles.pairs;
  const Acc* d_mix = tiles.pairs + c * plan.ldc;
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    const Acc diagonal = tiles.d_kk[row + i];
    for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
      const Vec<Acc> decay = Load<Acc>(chunk.decay + row + j);
      const Vec<Acc> by_read = Load<Acc>(d_read + row + j);
      const Vec<Acc> by_mix = Load<Acc>(d_mix + row + j);
      Store(tiles.d_qk + row + j, MulAdd(by_read, decay, Load<Acc>(tiles.d_qk + row + j)));
      Store(tiles.d_kk + row + j, MulAdd(by_mix, decay, Load<Acc>(tiles.d_kk + row + j)));
      Store(d_read + row + j,
            MulAdd(by_read, Load<Acc>(chunk.read + row + j), by_mix * Load<Acc>(tiles.mix + row + j)));
    }
    tiles.d_kk[row + i] = diagonal;
  }
}

// The whole rule, as delta_rule/items-inl.h takes it.
template <class Elem, class Acc>
struct GatedRule : GatedForwardStages<Elem, Acc> {
  // One chunk of one value head. `state_transposed`, null for 0, and `corrections` are what the recomputation kept. The
  // gradient of the state after the chunk, d_after or null for 0, becomes that of the state before it, d_before, unless
  // that is null. Both are the same memory.
  static void BackwardHead(const GatedDeltaRuleBackward& args, const DeltaPlan& plan, int64_t begin, int64_t c,
                           int64_t hv, const GatedBackwardTiles<Acc>& tiles, const Acc* state_transposed,
                           Acc* corrections, const Acc* d_after, Acc* d_before) {
    const DeltaInputs& in = args.in;
    const GatedChunkTiles<Acc>& chunk = tiles.chunk;
    const int64_t K = plan.key_dim, V = plan.value_dim, ldk = plan.ldk, ldv = plan.ldv, ldc = plan.ldc;
    const int64_t pair_k = plan.pair_k, pair_v = plan.pair_v;
    const int64_t token = begin * in.value_heads + hv;  // of [T, HV]
    Acc* d_o = chunk.value_rows;                        // [c, V]
    Acc* d_v = chunk.value_rows + ldv;                  // [c, V]: gradient of beta corrections, then -dv
    const Acc* q_rows = chunk.rows;
    const Acc* k_rows = chunk.rows + ldk;
    GatedRule::PrepareHead(in, plan, begin, c, hv, ChunkRows::kQueriesAndKeys, chunk);
    const Acc* to_end = chunk.decay + (c - 1) * ldc;
    const Acc over_chunk = chunk.from_start[c - 1];
    WeighPairsBackward<Acc>(plan, c, tiles);
    LoadTile<Acc>(c, V, static_cast<const Elem*>(args.dout) + token * V, in.value_heads * V, d_o, pair_v);

    // d(beta corrections) = to_end k d_after + read^T d_o, then back through the solve.
    if (d_after != nullptr) {
      Multiply<Into::kOverwrite>(c, V, K, k_rows, pair_k, 1, d_after, ldv, d_v, pair_v);
      for (int64_t i = 0; i < c; ++i) ScaleRow<Acc>(V, to_end[i], d_v + i * pair_v);
      MultiplyLowerTransposed<Into::kAdd>(c, V, chunk.read, ldc, d_o, pair_v, d_v, pair_v);
    } else {
      MultiplyLowerTransposed<Into::kOverwrite>(c, V, chunk.read, ldc, d_o, pair_v, d_v, pair_v);
    }
    CorrectionGradients<Elem, Acc>(args, plan, c, token, tiles, d_o, d_v, corrections);
    SplitPairGradients<Acc>(plan, c, tiles);

    // Through the states: dq_i += from_start_i S d_o_i, dk_i -= from_start_i S dv_i,
    // dk_j += to_end_j d_after corrections_j.
    Acc* d_q = tiles.d_rows;
    Acc* d_k = tiles.d_rows + ldk;
    for (int64_t i = 0; i < kChunk; ++i) tiles.d_from_start[i] = tiles.d_to_end[i] = 0;
    if (state_transposed != nullptr) {
      Multiply<Into::kOverwrite>(2 * c, K, V, d_o, ldv, 1, state_transposed, ldk, tiles.from_state, ldk);
      for (int64_t i = 0; i < c; ++i) {
        const Acc* q_part = tiles.from_state + i * pair_k;
        const Acc* k_part = q_part + ldk;
        const Acc start = chunk.from_start[i];
        tiles.d_from_start[i] =
            start * (RowDot<Acc>(K, q_rows + i * pair_k, q_part) + RowDot<Acc>(K, k_rows + i * pair_k, k_part));
        AddScaledRow<Acc>(K, start, q_part, d_q + i * pair_k);
        AddScaledRow<Acc>(K, start, k_part, d_k + i * pair_k);
      }
    }
    Acc kept = 0;
    if (d_after != nullptr) {
      LoadTileTransposed<Acc>(K, V, d_after, ldv, tiles.d_state_transposed, ldk);
      Multiply<Into::kOverwrite>(c, K, V, corrections, ldv, 1, tiles.d_state_transposed, ldk, tiles.to_state, ldk);
      for (int64_t i = 0; i < c; ++i) {
        const Acc* end_part = tiles.to_state + i * ldk;
        tiles.d_to_end[i] = to_end[i] * RowDot<Acc>(K, k_rows + i * pair_k, end_part);
        AddScaledRow<Acc>(K, to_end[i], end_part, d_k + i * pair_k);
      }
      for (int64_t r = 0; r < V && state_transposed != nullptr; ++r) {
        kept += RowDot<Acc>(K, state_transposed + r * ldk, tiles.d_state_transposed + r * ldk);
      }
    }
    GatherDecayGradients<Acc>(c, tiles.pairs, ldc, tiles.d_from_start, tiles.d_to_end, over_chunk * kept,
                              chunk.exponents, static_cast<Acc*>(args.dg) + token, in.value_heads);
    if (d_before == nullptr) return;

    // d_before = over_chunk d_after + sum over i of from_start_i (q_i d_o_i^T - k_i dv_i^T), from the last token back,
    // q and k in turn: each partial sum is then the gradient of the state at some token, not far larger than the
    // result.
    for (int64_t i = 0; i < c; ++i) {
      ScaleRow<Acc>(V, chunk.from_start[i], d_o + i * pair_v);
      ScaleRow<Acc>(V, chunk.from_start[i], d_v + i * pair_v);
    }
    for (int64_t r = 0; r < K; ++r) ScaleRow<Acc>(V, over_chunk, d_before + r * ldv);
    const int64_t last = 2 * c - 1;
    Multiply<Into::kAdd>(K, V, 2 * c, chunk.rows + last * ldk, 1, -ldk, chunk.value_rows + last * ldv, -ldv, d_before,
                         ldv);
  }

  static void ClearKeyProductGradients(const DeltaPlan& plan, int64_t c, const GatedBackwardTiles<Acc>& tiles) {
    ClearTile<Acc>(c, c, tiles.d_qk, plan.ldc);
    ClearTile<Acc>(c, c, tiles.d_kk, plan.ldc);
  }

  // What the group's summed gradients of q . k and k . k give to the rows of q and k.
  static void KeyProductGradients(const DeltaPlan& plan, int64_t c, const GatedBackwardTiles<Acc>& tiles) {
    const int64_t K = plan.key_dim, pair = plan.pair_k, ldc = plan.ldc;
    const Acc* q_rows = tiles.chunk.rows;
    const Acc* k_rows = tiles.chunk.rows + plan.ldk;
    Acc* d_q = tiles.d_rows;
    Acc* d_k = tiles.d_rows + plan.ldk;
    MultiplyLower<Into::kAdd>(c, K, tiles.d_qk, ldc, k_rows, pair, d_q, pair);
    MultiplyLowerTransposed<Into::kAdd>(c, K, tiles.d_qk, ldc, q_rows, pair, d_k, pair);
    MultiplyLower<Into::kAdd>(c, K, tiles.d_kk, ldc, k_rows, pair, d_k, pair);
    MultiplyLowerTransposed<Into::kAdd>(c, K, tiles.d_kk, ldc, k_rows, pair, d_k, pair);
  }
};
