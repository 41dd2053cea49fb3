// Stages of the gated delta rule that both directions share, as delta_rule/items-inl.h calls them. Included once per
// tier, after chunked/*-inl.h. Letters as in the README: c tokens of the chunk, S the state before it.

// One decay for the whole state, which q and k read as it is.
template <class Acc>
struct GatedDecay {
  const Acc* g;  // [T, HV]

  GatedDecay(const DeltaInputs& in, const DeltaPlan&, int64_t) : g(static_cast<const Acc*>(in.g)) {}
  StepDecay<Acc> Step(int64_t token, const DeltaStepTiles<Acc>& tiles) const {
    *tiles.decay = ExpOne<Acc>(g[token]);
    return {tiles.decay, 0, *tiles.decay, tiles.q, tiles.k};
  }
};

// What delta_rule/items-inl.h asks of a rule, but for its backward stages.
template <class Elem, class Acc>
struct GatedForwardStages {
  using Element = Elem;
  using Accumulation = Acc;
  using Inputs = GatedDeltaRuleInputs;
  using Forward = GatedDeltaRuleForward;
  using Backward = GatedDeltaRuleBackward;
  using ChunkTiles = GatedChunkTiles<Acc>;
  using BackwardTiles = GatedBackwardTiles<Acc>;
  using Decay = GatedDecay<Acc>;

  // The products of k, and of q if it is wanted, with k; the decays come per value head.
  static void KeyProducts(const DeltaPlan& plan, int64_t c, ChunkRows which, const GatedChunkTiles<Acc>& tiles) {
    const int64_t K = plan.key_dim, ldk = plan.ldk, pair = plan.pair_k, ldc = plan.ldc;
    MultiplyToLower<Into::kOverwrite>(c, K, tiles.rows + ldk, pair, tiles.k_transposed, ldc, tiles.kk, ldc);
    if (which == ChunkRows::kQueriesAndKeys)
      MultiplyToLower<Into::kOverwrite>(c, K, tiles.rows, pair, tiles.k_transposed, ldc, tiles.qk, ldc);
  }

  static void PrepareHead(const DeltaInputs& in, const DeltaPlan& plan, int64_t begin, int64_t c, int64_t hv, ChunkRows,
                          const GatedChunkTiles<Acc>& tiles) {
    const int64_t token = begin * in.value_heads + hv;  // of [T, HV]
    ChunkDecay<Acc>(c, static_cast<const Acc*>(in.g) + token, in.value_heads, tiles.decay, plan.ldc, tiles.from_start,
                    tiles.exponents);
    LoadColumn<Acc>(c, static_cast<const Acc*>(in.beta) + token, in.value_heads, tiles.beta);
  }

  // system[i, j] = (k_i . k_j) decay_ij beta_j, and for queries read[i, j] = (q_i . k_j) decay_ij beta_j.
  static void WeighPairs(const DeltaPlan& plan, int64_t c, ChunkRows which, const GatedChunkTiles<Acc>& tiles) {
    for (int64_t i = 0; i < c; ++i) {
      const int64_t row = i * plan.ldc;
      for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
        const Vec<Acc> weight = Load<Acc>(tiles.decay + row + j) * Load<Acc>(tiles.beta + j);
        Store(tiles.system + row + j, Load<Acc>(tiles.kk + row + j) * weight);
        if (which == ChunkRows::kQueriesAndKeys) Store(tiles.read + row + j, Load<Acc>(tiles.qk + row + j) * weight);
      }
    }
  }

  static const Acc* StateRows(const GatedChunkTiles<Acc>& tiles) { return tiles.rows; }

  static const Acc* StateFactors(const GatedChunkTiles<Acc>& tiles) { return tiles.from_start; }

  // S = decay_over_chunk S + sum over j of decay_to_end_j beta_j k_j corrections_j^T. `corrections` is scaled on the
  // way.
  static void AdvanceState(const DeltaPlan& plan, int64_t c, const GatedChunkTiles<Acc>& tiles, Acc* corrections,
                           int64_t stride, Acc* state) {
    const Acc* to_end = tiles.decay + (c - 1) * plan.ldc;
    for (int64_t j = 0; j < c; ++j) {
      ScaleRow<Acc>(plan.value_dim, to_end[j] * tiles.beta[j], corrections + j * stride);
    }
    const Acc over_chunk = tiles.from_start[c - 1];
    for (int64_t r = 0; r < plan.key_dim; ++r) ScaleRow<Acc>(plan.value_dim, over_chunk, state + r * plan.ldv);
    Multiply<Into::kAdd>(plan.key_dim, plan.value_dim, c, tiles.rows + plan.ldk, 1, plan.pair_k, corrections, stride,
                         state, plan.ldv);
  }
};
