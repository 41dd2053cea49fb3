// Backward stages of Kimi delta attention, as delta_rule/items-inl.h calls them. Included once per tier, after
// chunk-inl.h. Names of gradients carry d_ before the name of the tile they belong to. The gradient of a log-decay is
// gathered as the sum over all decays that span its token; each span adds to its own tokens by a running sum, and
// nothing is taken away again.

// tiles.chunk.system[i, j] = beta_i mix[i, j]: the system that gradients go back through, transposed.
template <class Acc>
inline void WeighPairsBackward(const DeltaPlan& plan, int64_t c, const KdaChunkTiles<Acc>& chunk) {
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    const Vec<Acc> beta = Set<Acc>(chunk.beta[i]);
    for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
      Store(chunk.system + row + j, beta * Load<Acc>(chunk.mix + row + j));
    }
  }
}

// Rows [first, end) of q and k were decayed by decay[i], which spans tokens (spanned, i]. From the gradients d_parts of
// the decayed rows, from row `first` on: those of the rows, and of the log-decays.
template <class Acc>
inline void GradientsFromBehind(const DeltaPlan& plan, int64_t first, int64_t end, int64_t spanned, const Acc* decay,
                                const Acc* decayed_rows, const Acc* d_parts, const KdaBackwardTiles<Acc>& tiles) {
  const int64_t ld = plan.ldk;
  for (int64_t x = 0; x < plan.key_dim; x += kLanes<Acc>) {
    Vec<Acc> after = Zero<Acc>();
    for (int64_t i = end - 1; i >= first; --i) {
      const Vec<Acc> factor = Load<Acc>(decay + i * ld + x);
      const int64_t at = 2 * i * ld + x;
      const Vec<Acc> by_q = Load<Acc>(d_parts + at - 2 * first * ld);
      const Vec<Acc> by_k = Load<Acc>(d_parts + at - 2 * first * ld + ld);
      Acc* d_q = tiles.d_rows + at;
      Acc* d_k = d_q + ld;
      Store(d_q, MulAdd(factor, by_q, Load<Acc>(d_q)));
      Store(d_k, MulAdd(factor, by_k, Load<Acc>(d_k)));
      if (i <= spanned) continue;
      after = MulAdd(Load<Acc>(decayed_rows + at), by_q, after);
      after = MulAdd(Load<Acc>(decayed_rows + at + ld), by_k, after);
      Acc* d_decay = tiles.d_decay + i * ld + x;
      Store(d_decay, Load<Acc>(d_decay) + after);
    }
  }
}

// The same for rows [0, count) of k that were decayed to a mark; the decay of row j spans tokens (j, mark].
template <class Acc>
inline void GradientsFromMark(const DeltaPlan& plan, int64_t c, int64_t mark, int64_t count, const Acc* d_parts,
                              const KdaBackwardTiles<Acc>& tiles) {
  const int64_t ld = plan.ldk;
  const Acc* to_mark = tiles.chunk.to_mark + MarkRow(mark) * ld;
  const Acc* mark_rows = tiles.chunk.mark_rows + MarkRow(mark) * ld;
  for (int64_t x = 0; x < plan.key_dim; x += kLanes<Acc>) {
    Vec<Acc> before = Zero<Acc>();
    for (int64_t j = 0; j < count; ++j) {
      const Vec<Acc> d_row = Load<Acc>(d_parts + j * ld + x);
      Acc* d_k = tiles.d_rows + (2 * j + 1) * ld + x;
      Store(d_k, MulAdd(Load<Acc>(to_mark + j * ld + x), d_row, Load<Acc>(d_k)));
      if (j + 1 == c) continue;
      before = MulAdd(Load<Acc>(mark_rows + j * ld + x), d_row, before);
      Acc* d_decay = tiles.d_decay + (j + 1) * ld + x;
      Store(d_decay, Load<Acc>(d_decay) + before);
    }
  }
}

// Gradients of the pairs inside one sub-block of `count` tokens, whose first is `first`. For each key j, up: the key
// decayed to every later token i, w_i; down: its gradient, which collects what the tokens from i on give and decays on
// the way, so that it meets w_i in the gradient of the decay of token i.
template <class Acc>
inline void PairGradientsInSubBlock(const DeltaPlan& plan, int64_t c, int64_t first, int64_t count,
                                    const KdaBackwardTiles<Acc>& tiles) {
  const int64_t ld = plan.ldk, pair = plan.pair_k, ldc = plan.ldc;
  const Acc* d_read = tiles.pairs + first * ldc + first;
  const Acc* d_mix = tiles.pairs + (c + first) * ldc + first;
  const Acc* q_rows = tiles.chunk.rows + first * pair;
  const Acc* k_rows = q_rows + ld;
  const Acc* steps = tiles.chunk.step + first * ld;
  Acc* d_q_rows = tiles.d_rows + first * pair;
  Acc* d_k_rows = d_q_rows + ld;
  Acc* d_decays = tiles.d_decay + first * ld;
  for (int64_t x = 0; x < plan.key_dim; x += kLanes<Acc>) {
    Vec<Acc> q[kSubBlock], k[kSubBlock], step[kSubBlock], d_q[kSubBlock], d_k[kSubBlock], d_decay[kSubBlock];
    for (int64_t i = 0; i < count; ++i) {
      q[i] = Load<Acc>(q_rows + i * pair + x);
      k[i] = Load<Acc>(k_rows + i * pair + x);
      step[i] = Load<Acc>(steps + i * ld + x);
      d_q[i] = Load<Acc>(d_q_rows + i * pair + x);
      d_k[i] = Load<Acc>(d_k_rows + i * pair + x);
      d_decay[i] = Load<Acc>(d_decays + i * ld + x);
    }
    for (int64_t j = 0; j < count; ++j) {
      Vec<Acc> key[kSubBlock];
      Vec<Acc> now = k[j];
      for (int64_t i = j + 1; i < count; ++i) {
        now = now * step[i];
        key[i] = now;
        d_q[i] = MulAdd(Set<Acc>(d_read[i * ldc + j]), now, d_q[i]);
        d_k[i] = MulAdd(Set<Acc>(d_mix[i * ldc + j]), now, d_k[i]);
      }
      Vec<Acc> d_key = Zero<Acc>();
      for (int64_t i = count - 1; i > j; --i) {
        d_key = MulAdd(Set<Acc>(d_read[i * ldc + j]), q[i], d_key);
        d_key = MulAdd(Set<Acc>(d_mix[i * ldc + j]), k[i], d_key);
        d_decay[i] = MulAdd(d_key, key[i], d_decay[i]);
        d_key = d_key * step[i];
      }
      const Vec<Acc> own = Set<Acc>(d_read[j * ldc + j]);
      d_q[j] = MulAdd(own, k[j], d_q[j]);
      d_k[j] = d_k[j] + MulAdd(own, q[j], d_key);
    }
    for (int64_t i = 0; i < count; ++i) {
      Store(d_q_rows + i * pair + x, d_q[i]);
      Store(d_k_rows + i * pair + x, d_k[i]);
      Store(d_decays + i * ld + x, d_decay[i]);
    }
  }
}

// From the gradients of read and mix in tiles.pairs to those of rows and log-decays.
template <class Acc>
inline void PairGradients(const DeltaPlan& plan, int64_t c, const KdaBackwardTiles<Acc>& tiles) {
  const int64_t K = plan.key_dim, ldk = plan.ldk, pair = plan.pair_k, ldc = plan.ldc;
  const KdaChunkTiles<Acc>& chunk = tiles.chunk;
  for (int64_t first = 0; first < c; first += kSubBlock) {
    const int64_t count = c - first < kSubBlock ? c - first : kSubBlock;
    if (first > 0) {
      const int64_t mark = first / kSubBlock;
      const Acc* keys = chunk.mark_rows + MarkRow(mark) * ldk;
      const Acc* inner = chunk.inner_rows + first * pair;
      const Acc* d_read = tiles.pairs + first * ldc;
      const Acc* d_mix = tiles.pairs + (c + first) * ldc;
      Multiply<Into::kOverwrite>(count, K, first, d_read, ldc, 1, keys, ldk, tiles.d_parts, pair);
      Multiply<Into::kOverwrite>(count, K, first, d_mix, ldc, 1, keys, ldk, tiles.d_parts + ldk, pair);
      GradientsFromBehind<Acc>(plan, first, first + count, first, chunk.inner, chunk.inner_rows, tiles.d_parts, tiles);
      Multiply<Into::kOverwrite>(first, K, count, d_read, 1, ldc, inner, pair, tiles.d_parts, ldk);
      Multiply<Into::kAdd>(first, K, count, d_mix, 1, ldc, inner + ldk, pair, tiles.d_parts, ldk);
      GradientsFromMark<Acc>(plan, c, mark, first, tiles.d_parts, tiles);
    }
    PairGradientsInSubBlock<Acc>(plan, c, first, count, tiles);
  }
}

// The whole rule, as delta_rule/items-inl.h takes it.
template <class Elem, class Acc>
struct KdaRule : KdaForwardStages<Elem, Acc> {
  // One chunk of one value head. `state_transposed`, null for 0, and `corrections` are what the recomputation kept. The
  // gradient of the state after the chunk, d_after or null for 0, becomes that of the state before it, d_before, unless
  // that is null. Both are the same memory.
  static void BackwardHead(const KdaBackward& args, const DeltaPlan& plan, int64_t begin, int64_t c, int64_t hv,
                           const KdaBackwardTiles<Acc>& tiles, const Acc* state_transposed, Acc* corrections,
                           const Acc* d_after, Acc* d_before) {
    const KdaInputs& in = args.in;
    const KdaChunkTiles<Acc>& chunk = tiles.chunk;
    const int64_t K = plan.key_dim, V = plan.value_dim, ldk = plan.ldk, ldv = plan.ldv, ldc = plan.ldc;
    const int64_t token = begin * in.value_heads + hv;  // of [T, HV]
    const int64_t end_mark = SubBlocksOf(c);
    const Acc* end_rows = chunk.mark_rows + MarkRow(end_mark) * ldk;
    const Acc* over_chunk = chunk.from_start + (c - 1) * ldk;
    const int64_t pair_v = plan.pair_v;
    Acc* d_o = chunk.value_rows;        // [c, V]
    Acc* d_v = chunk.value_rows + ldv;  // [c, V]: gradient of beta corrections, then -dv
    KdaRule::PrepareHead(in, plan, begin, c, hv, ChunkRows::kQueriesAndKeys, chunk);
    WeighPairsBackward<Acc>(plan, c, chunk);
    LoadTile<Acc>(c, V, static_cast<const Elem*>(args.dout) + token * V, in.value_heads * V, d_o, pair_v);

    // d(beta corrections) = (k decayed to the end) d_after + read^T d_o, then back through the solve.
    if (d_after != nullptr) {
      Multiply<Into::kOverwrite>(c, V, K, end_rows, ldk, 1, d_after, ldv, d_v, pair_v);
      MultiplyLowerTransposed<Into::kAdd>(c, V, chunk.read, ldc, d_o, pair_v, d_v, pair_v);
      LoadTileTransposed<Acc>(K, V, d_after, ldv, tiles.d_state_transposed, ldk);
    } else {
      MultiplyLowerTransposed<Into::kOverwrite>(c, V, chunk.read, ldc, d_o, pair_v, d_v, pair_v);
    }
    CorrectionGradients<Elem, Acc>(args, plan, c, token, tiles, d_o, d_v, corrections);

    // What every log-decay of the chunk gets from the decay of the state over the whole of it.
    const int64_t spanned = d_after != nullptr && state_transposed != nullptr ? V : 0;
    for (int64_t x = 0; x < K; x += kLanes<Acc>) {
      Vec<Acc> kept = Zero<Acc>();
      for (int64_t r = 0; r < spanned; ++r) {
        kept =
            MulAdd(Load<Acc>(state_transposed + r * ldk + x), Load<Acc>(tiles.d_state_transposed + r * ldk + x), kept);
      }
      if (spanned != 0) kept = kept * Load<Acc>(over_chunk + x);
      for (int64_t i = 0; i < c; ++i) Store(tiles.d_decay + i * ldk + x, kept);
    }
    // Through the state before the chunk, the state after it, and the pairs.
    if (state_transposed != nullptr) {
      Multiply<Into::kOverwrite>(2 * c, K, V, d_o, ldv, 1, state_transposed, ldk, tiles.d_parts, ldk);
      GradientsFromBehind<Acc>(plan, 0, c, -1, chunk.from_start, chunk.start_rows, tiles.d_parts, tiles);
    }
    if (d_after != nullptr) {
      Multiply<Into::kOverwrite>(c, K, V, corrections, ldv, 1, tiles.d_state_transposed, ldk, tiles.d_parts, ldk);
      GradientsFromMark<Acc>(plan, c, end_mark, c, tiles.d_parts, tiles);
    }
    PairGradients<Acc>(plan, c, tiles);
    const int64_t at = token * K;
    Acc* d_rates = args.d_rates == nullptr ? nullptr : static_cast<Acc*>(args.d_rates) + token;
    StoreDecayGradients<Acc>(Gate<Acc>(in, hv), c, K, static_cast<const Acc*>(in.g) + at, in.value_heads * K,
                             tiles.d_decay, ldk, static_cast<Acc*>(args.dg) + at, d_rates, in.value_heads);

    if (d_before == nullptr) return;
    // d_before = decay over the chunk d_after + (q decayed from the start)^T d_o - (k decayed from the start)^T dv,
    // from the last token back, q and k in turn: each partial sum is then the gradient of the state at some token.
    for (int64_t r = 0; r < K; ++r) ScaleRow<Acc>(V, over_chunk[r], d_before + r * ldv);
    const int64_t last = 2 * c - 1;
    Multiply<Into::kAdd>(K, V, 2 * c, chunk.start_rows + last * ldk, 1, -ldk, chunk.value_rows + last * ldv, -ldv,
                         d_before, ldv);
  }

  // A key head has no products of its own; see KeyProducts.
  static void ClearKeyProductGradients(const DeltaPlan&, int64_t, const KdaBackwardTiles<Acc>&) {}

  static void KeyProductGradients(const DeltaPlan&, int64_t, const KdaBackwardTiles<Acc>&) {}
};
