// Backward pass of one sequence and one key head with its value heads. Included once per tier, after chunk-inl.h.
// Names of gradients carry d_ before the name of the tile they belong to.

// Runs the states over chunks [from, to) of the sequence. With `keep` it stores each chunk's state (transposed) and
// corrections, counted from `from`.
template <class Elem, class Acc>
inline void RecomputeChunks(const GatedDeltaRuleInputs& in, const GatedDeltaRulePlan& plan, int64_t n, int64_t h,
                            int64_t from, int64_t to, bool keep, const BackwardTiles<Acc>& tiles) {
  const ChunkTiles<Acc>& chunk = tiles.chunk;
  for (int64_t index = from; index < to; ++index) {
    const int64_t begin = in.packing.bos(n) + index * kChunk;
    const int64_t left = in.packing.eos(n) - begin;
    const int64_t c = left < kChunk ? left : kChunk;
    LoadChunk<Elem, Acc>(in, plan, begin, c, h, false, chunk);
    for (int64_t j = 0; j < plan.group; ++j) {
      const int64_t hv = h * plan.group + j;
      const Acc* g = static_cast<const Acc*>(in.g) + begin * in.value_heads + hv;
      const Acc* beta = static_cast<const Acc*>(in.beta) + begin * in.value_heads + hv;
      Acc* state = chunk.states + j * plan.state;
      Acc* rows = chunk.value_rows;
      ChunkDecay<Acc>(c, g, in.value_heads, chunk.decay, plan.ldc, chunk.from_start, chunk.exponents);
      LoadColumn<Acc>(c, beta, in.value_heads, chunk.exponents);
      WeighPairs<Acc>(plan, c, chunk.exponents, false, chunk);
      Multiply<Into::kOverwrite>(c, plan.value_dim, plan.key_dim, chunk.rows + plan.ldk, plan.pair_k, 1, state,
                                 plan.ldv, rows, plan.ldv);
      SolveCorrections<Elem, Acc>(in, plan, begin, c, hv, chunk.from_start, chunk.system, rows, plan.ldv);
      if (keep) {
        const int64_t slot = (index - from) * plan.group + j;
        LoadTileTransposed<Acc>(plan.key_dim, plan.value_dim, state, plan.ldv,
                                tiles.states_turned + slot * plan.state_turned, plan.ldk);
        LoadTile<Acc>(c, plan.value_dim, rows, plan.ldv, tiles.corrections + slot * plan.values, plan.ldv);
      }
      AdvanceState<Acc>(plan, c, chunk.exponents, chunk, rows, plan.ldv, state);
    }
  }
}

// Lower tiles of one value head: read = (q . k) decay, mix = (k . k) decay below the diagonal, and
// system[i, j] = beta_i mix[i, j]. Unlike the forward's, none of their columns carries beta_j.
template <class Acc>
inline void WeighPairsBackward(const GatedDeltaRulePlan& plan, int64_t c, const Acc* beta_row,
                               const BackwardTiles<Acc>& tiles) {
  const ChunkTiles<Acc>& chunk = tiles.chunk;
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    const Vec<Acc> beta = Set<Acc>(beta_row[i]);
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
inline void SplitPairGradients(const GatedDeltaRulePlan& plan, int64_t c, const BackwardTiles<Acc>& tiles) {
  const ChunkTiles<Acc>& chunk = tiles.chunk;
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

// One chunk of one value head. `state_turned` and `corrections` are what RecomputeChunks kept; d_state is the gradient
// of the state after the chunk and becomes that of the state before it.
template <class Elem, class Acc>
inline void BackwardChunk(const GatedDeltaRuleBackward& args, const GatedDeltaRulePlan& plan, int64_t begin, int64_t c,
                          int64_t hv, const BackwardTiles<Acc>& tiles, const Acc* state_turned, Acc* corrections,
                          Acc* d_state) {
  const GatedDeltaRuleInputs& in = args.in;
  const ChunkTiles<Acc>& chunk = tiles.chunk;
  const int64_t K = plan.key_dim, V = plan.value_dim, ldk = plan.ldk, ldv = plan.ldv, ldc = plan.ldc;
  const int64_t pair_k = plan.pair_k, pair_v = plan.pair_v;
  const int64_t token = begin * in.value_heads + hv;  // of [T, HV]
  const Acc* g = static_cast<const Acc*>(in.g) + token;
  const Acc* beta = static_cast<const Acc*>(in.beta) + token;
  Acc* d_o = chunk.value_rows;        // [c, V]
  Acc* d_v = chunk.value_rows + ldv;  // [c, V]: gradient of beta corrections, then -dv
  const Acc* q_rows = chunk.rows;
  const Acc* k_rows = chunk.rows + ldk;
  ChunkDecay<Acc>(c, g, in.value_heads, chunk.decay, ldc, chunk.from_start, chunk.exponents);
  const Acc* to_end = chunk.decay + (c - 1) * ldc;
  const Acc over_chunk = chunk.from_start[c - 1];
  LoadColumn<Acc>(c, beta, in.value_heads, chunk.exponents);
  WeighPairsBackward<Acc>(plan, c, chunk.exponents, tiles);
  LoadTile<Acc>(c, V, static_cast<const Elem*>(args.d_o) + token * V, in.value_heads * V, d_o, pair_v);

  // d(beta corrections) = to_end k d_state + read^T d_o, then back through the solve.
  Multiply<Into::kOverwrite>(c, V, K, k_rows, pair_k, 1, d_state, ldv, d_v, pair_v);
  for (int64_t i = 0; i < c; ++i) ScaleRow<Acc>(V, to_end[i], d_v + i * pair_v);
  MultiplyLowerTransposed<Into::kAdd>(c, V, chunk.read, ldc, d_o, pair_v, d_v, pair_v);
  CorrectionGradients<Elem, Acc>(args, plan, c, token, chunk.system, chunk.exponents, d_o, d_v, pair_v, corrections,
                                 tiles.turned, tiles.pairs);
  SplitPairGradients<Acc>(plan, c, tiles);

  // Through the states: dq_i += from_start_i S d_o_i, dk_i -= from_start_i S dv_i,
  // dk_j += to_end_j d_state corrections_j.
  LoadTileTransposed<Acc>(K, V, d_state, ldv, tiles.d_state_turned, ldk);
  Multiply<Into::kOverwrite>(2 * c, K, V, d_o, ldv, 1, state_turned, ldk, tiles.from_state, ldk);
  Multiply<Into::kOverwrite>(c, K, V, corrections, ldv, 1, tiles.d_state_turned, ldk, tiles.to_state, ldk);
  Acc* d_q = tiles.d_rows;
  Acc* d_k = tiles.d_rows + ldk;
  for (int64_t i = 0; i < c; ++i) {
    const Acc* q_part = tiles.from_state + i * pair_k;
    const Acc* k_part = q_part + ldk;
    const Acc* end_part = tiles.to_state + i * ldk;
    const Acc start = chunk.from_start[i];
    tiles.d_from_start[i] = start * (RowDot<Acc>(K, q_rows + i * pair_k, q_part) +
                                     RowDot<Acc>(K, k_rows + i * pair_k, k_part));
    tiles.d_to_end[i] = to_end[i] * RowDot<Acc>(K, k_rows + i * pair_k, end_part);
    AddScaledRow<Acc>(K, start, q_part, d_q + i * pair_k);
    AddScaledRow<Acc>(K, start, k_part, d_k + i * pair_k);
    AddScaledRow<Acc>(K, to_end[i], end_part, d_k + i * pair_k);
  }
  Acc kept = 0;
  for (int64_t r = 0; r < V; ++r) kept += RowDot<Acc>(K, state_turned + r * ldk, tiles.d_state_turned + r * ldk);
  GatherDecayGradients<Acc>(c, tiles.pairs, ldc, tiles.d_from_start, tiles.d_to_end, over_chunk * kept, chunk.exponents,
                            static_cast<Acc*>(args.dg) + token, in.value_heads);

  // d_state = over_chunk d_state + sum over i of from_start_i (q_i d_o_i^T - k_i dv_i^T), from the last token back, q
  // and k in turn: each partial sum is then the gradient of the state at some token, not far larger than the result.
  for (int64_t i = 0; i < c; ++i) {
    ScaleRow<Acc>(V, chunk.from_start[i], d_o + i * pair_v);
    ScaleRow<Acc>(V, chunk.from_start[i], d_v + i * pair_v);
  }
  for (int64_t r = 0; r < K; ++r) ScaleRow<Acc>(V, over_chunk, d_state + r * ldv);
  const int64_t last = 2 * c - 1;
  Multiply<Into::kAdd>(K, V, 2 * c, chunk.rows + last * ldk, 1, -ldk, chunk.value_rows + last * ldv, -ldv, d_state,
                       ldv);
}

// What the group's summed gradients of q . k and k . k give to q and k; then through scale and normalisation.
template <class Elem, class Acc>
inline void StoreKeyGradients(const GatedDeltaRuleBackward& args, const GatedDeltaRulePlan& plan, int64_t begin,
                              int64_t c, int64_t h, const BackwardTiles<Acc>& tiles) {
  const GatedDeltaRuleInputs& in = args.in;
  const ChunkTiles<Acc>& chunk = tiles.chunk;
  const int64_t K = plan.key_dim, ldk = plan.ldk, pair_k = plan.pair_k, ldc = plan.ldc;
  const Acc* q_rows = chunk.rows;
  const Acc* k_rows = chunk.rows + ldk;
  Acc* d_q = tiles.d_rows;
  Acc* d_k = tiles.d_rows + ldk;
  MultiplyLower<Into::kAdd>(c, K, tiles.d_qk, ldc, k_rows, pair_k, d_q, pair_k);
  MultiplyLowerTransposed<Into::kAdd>(c, K, tiles.d_qk, ldc, q_rows, pair_k, d_k, pair_k);
  MultiplyLower<Into::kAdd>(c, K, tiles.d_kk, ldc, k_rows, pair_k, d_k, pair_k);
  MultiplyLowerTransposed<Into::kAdd>(c, K, tiles.d_kk, ldc, k_rows, pair_k, d_k, pair_k);
  const int64_t row = (begin * in.key_heads + h) * K;
  StoreRowGradients<Acc>(c, K, static_cast<const Elem*>(in.q) + begin * in.q_token + h * in.q_head, in.q_token,
                         in.l2norm, static_cast<Acc>(in.scale), q_rows, pair_k, chunk.q_inverse, d_q,
                         static_cast<Elem*>(args.dq) + row, in.key_heads * K);
  StoreRowGradients<Acc>(c, K, static_cast<const Elem*>(in.k) + begin * in.k_token + h * in.k_head, in.k_token,
                         in.l2norm, Acc(1), k_rows, pair_k, chunk.k_inverse, d_k, static_cast<Elem*>(args.dk) + row,
                         in.key_heads * K);
}

template <class Elem, class Acc>
inline void BackwardUnit(const GatedDeltaRuleBackward& args, int64_t n, int64_t h, void* scratch) {
  const GatedDeltaRuleInputs& in = args.in;
  const GatedDeltaRulePlan plan(in);
  const SegmentPlan segments(plan.kept * static_cast<int64_t>(sizeof(Acc)), in.packing.length(n));
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const BackwardTiles<Acc> tiles(plan, segments, pieces);
  const int64_t first = n * in.value_heads + h * plan.group;
  const int64_t group_state = plan.group * plan.state;
  LoadStates<Acc>(plan, args.d_final_state, first, tiles.d_states);

  // States at the segments' starts.
  LoadStates<Acc>(plan, in.initial_state, first, tiles.chunk.states);
  for (int64_t s = 0; s < segments.segments; ++s) {
    __builtin_memcpy(tiles.checkpoints + s * group_state, tiles.chunk.states, group_state * sizeof(Acc));
    if (s + 1 == segments.segments) break;
    RecomputeChunks<Elem, Acc>(in, plan, n, h, s * segments.per_segment, (s + 1) * segments.per_segment, false, tiles);
  }

  const int64_t chunks = (in.packing.length(n) + kChunk - 1) / kChunk;  // 0 for an empty sequence
  for (int64_t s = segments.segments - 1; s >= 0; --s) {
    const int64_t from = s * segments.per_segment;
    const int64_t to = from + segments.per_segment < chunks ? from + segments.per_segment : chunks;
    __builtin_memcpy(tiles.chunk.states, tiles.checkpoints + s * group_state, group_state * sizeof(Acc));
    RecomputeChunks<Elem, Acc>(in, plan, n, h, from, to, true, tiles);
    for (int64_t index = to - 1; index >= from; --index) {
      const int64_t begin = in.packing.bos(n) + index * kChunk;
      const int64_t left = in.packing.eos(n) - begin;
      const int64_t c = left < kChunk ? left : kChunk;
      LoadChunk<Elem, Acc>(in, plan, begin, c, h, true, tiles.chunk);
      ClearTile<Acc>(2 * c, plan.key_dim, tiles.d_rows, plan.ldk);
      ClearTile<Acc>(c, c, tiles.d_qk, plan.ldc);
      ClearTile<Acc>(c, c, tiles.d_kk, plan.ldc);
      for (int64_t j = 0; j < plan.group; ++j) {
        const int64_t slot = (index - from) * plan.group + j;
        BackwardChunk<Elem, Acc>(args, plan, begin, c, h * plan.group + j, tiles,
                                 tiles.states_turned + slot * plan.state_turned,
                                 tiles.corrections + slot * plan.values, tiles.d_states + j * plan.state);
      }
      StoreKeyGradients<Elem, Acc>(args, plan, begin, c, h, tiles);
    }
  }
  StoreStates<Acc>(plan, tiles.d_states, first, args.d_initial_state);
}
