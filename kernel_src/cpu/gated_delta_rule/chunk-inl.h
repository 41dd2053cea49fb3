// Stages of a chunk that the forward pass and the recomputation of the backward pass share. Included once per tier,
// after simd/*-inl.h and chunked/*-inl.h. Letters as in the README: c tokens of the chunk, S the state before it.

// Loads q (if `with_q`) and k of tokens [begin, begin + c) of key head h, and their products.
template <class Elem, class Acc>
inline void LoadChunk(const GatedDeltaRuleInputs& in, const GatedDeltaRulePlan& plan, int64_t begin, int64_t c,
                      int64_t h, bool with_q, const ChunkTiles<Acc>& tiles) {
  const Elem* k = static_cast<const Elem*>(in.k) + begin * in.k_token + h * in.k_head;
  Acc* k_rows = tiles.rows + plan.ldk;
  LoadRows<Acc>(c, plan.key_dim, k, in.k_token, in.l2norm, Acc(1), k_rows, plan.pair_k, tiles.k_inverse);
  LoadTileTransposed<Acc>(c, plan.key_dim, k_rows, plan.pair_k, tiles.k_turned, plan.ldc);
  MultiplyToLower<Into::kOverwrite>(c, plan.key_dim, k_rows, plan.pair_k, tiles.k_turned, plan.ldc, tiles.kk,
                                    plan.ldc);
  if (!with_q) return;
  const Elem* q = static_cast<const Elem*>(in.q) + begin * in.q_token + h * in.q_head;
  LoadRows<Acc>(c, plan.key_dim, q, in.q_token, in.l2norm, static_cast<Acc>(in.scale), tiles.rows, plan.pair_k,
                tiles.q_inverse);
  MultiplyToLower<Into::kOverwrite>(c, plan.key_dim, tiles.rows, plan.pair_k, tiles.k_turned, plan.ldc, tiles.qk,
                                    plan.ldc);
}

// tiles.system[i, j] = (k_i . k_j) decay_ij beta_j, and with `with_q` tiles.read[i, j] = (q_i . k_j) decay_ij beta_j.
template <class Acc>
inline void WeighPairs(const GatedDeltaRulePlan& plan, int64_t c, const Acc* beta_row, bool with_q,
                       const ChunkTiles<Acc>& tiles) {
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
      const Vec<Acc> weight = Load<Acc>(tiles.decay + row + j) * Load<Acc>(beta_row + j);
      Store(tiles.system + row + j, Load<Acc>(tiles.kk + row + j) * weight);
      if (with_q) Store(tiles.read + row + j, Load<Acc>(tiles.qk + row + j) * weight);
    }
  }
}

// S = decay_over_chunk S + sum over j of decay_to_end_j beta_j k_j corrections_j^T. `corrections` is scaled on the way.
template <class Acc>
inline void AdvanceState(const GatedDeltaRulePlan& plan, int64_t c, const Acc* beta_row, const ChunkTiles<Acc>& tiles,
                         Acc* corrections, int64_t stride, Acc* state) {
  const Acc* to_end = tiles.decay + (c - 1) * plan.ldc;
  for (int64_t j = 0; j < c; ++j) {
    ScaleRow<Acc>(plan.value_dim, to_end[j] * beta_row[j], corrections + j * stride);
  }
  const Acc over_chunk = tiles.from_start[c - 1];
  for (int64_t r = 0; r < plan.key_dim; ++r) ScaleRow<Acc>(plan.value_dim, over_chunk, state + r * plan.ldv);
  Multiply<Into::kAdd>(plan.key_dim, plan.value_dim, c, tiles.rows + plan.ldk, 1, plan.pair_k, corrections, stride,
                       state, plan.ldv);
}
