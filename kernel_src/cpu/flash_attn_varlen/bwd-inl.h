// Backward: probabilities are recomputed from lse, block by block, so nothing of size T^2 is kept. With P the
// probabilities, Z the dropout factors and delta = sum(dout * out) - dlse per query:
//   dv = (P Z)^T dout    dP = Z (dout v^T)    dS = P (dP - delta)    dq = scale dS k    dk = scale dS^T q
// and for a sink, a key whose value is 0: ds_aux = -sum over queries of P_sink delta.

// Turns scores [rows, kTileColumns] into P Z and dscores, which holds dout v^T, into dS, both transposed and in the
// form that Products wants, for the columns [column, column + kRegisters * lanes). lse is in units of log2.
template <class Products, class Acc, bool kSoftcap, int kRegisters>
inline void ScoreGradients(const AttentionArgs& args, const QueryTile<Acc>& tile, int64_t column, int64_t key_begin,
                           int64_t rows, const ScoreScale<Acc>& scale, const Acc* lse, const Acc* delta, Acc* scores,
                           Acc* dscores) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> log_sum[kRegisters], center[kRegisters];
#pragma GCC unroll 4
  for (int j = 0; j < kRegisters; ++j) {
    log_sum[j] = Load<Acc>(lse + column + j * L);
    center[j] = Load<Acc>(delta + column + j * L);
  }
  const bool dropout = args.dropout_p > 0;
  const uint32_t threshold = DropoutThreshold(args.dropout_p);
  const Acc keep_scale = static_cast<Acc>(1 / (1 - args.dropout_p));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t key = key_begin + r;
    const bool masked = key < tile.all.begin || key >= tile.all.end;
    Acc* row = scores + r * kTileColumns + column;
    Acc* drow = dscores + r * kTileColumns + column;
    Acc keep[kRegisters * L];
    if (dropout) {
      DropoutKeep<Acc>(tile.dropout + column, static_cast<uint32_t>(key), threshold, keep_scale, kRegisters * L, keep);
    }
    Vec<Acc> kept[kRegisters], ds[kRegisters];
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      Vec<Acc> s = Load<Acc>(row + j * L), dp = Load<Acc>(drow + j * L), slope = Zero<Acc>();
      if constexpr (kSoftcap) {
        s = Tanh<Acc>(s * scale.inner);
        slope = Acc(1) - s * s;
      }
      Vec<Acc> p = Exp2Any<Acc>(MulAdd(s, Set<Acc>(scale.outer), -log_sum[j]));
      if (masked) p = SelectVisible<Acc>(tile, column + j * L, key, p, Zero<Acc>());
      kept[j] = p;
      if (dropout) {
        dp = dp * Load<Acc>(keep + j * L);
        kept[j] = p * Load<Acc>(keep + j * L);
      }
      ds[j] = p * (dp - center[j]);
      if constexpr (kSoftcap) ds[j] = ds[j] * slope;
      if (masked) ds[j] = SelectVisible<Acc>(tile, column + j * L, key, ds[j], Zero<Acc>());
    }
    constexpr int kTogether = Products::kRegistersTogether;
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; j += kTogether) {
      Products::StoreScores(r, column + j * L, kept[j], kept[j + kTogether - 1], scores);
      Products::StoreScores(r, column + j * L, ds[j], ds[j + kTogether - 1], dscores);
    }
  }
}

template <class Products, class Acc, bool kSoftcap>
inline void TileScoreGradients(const AttentionArgs& args, const QueryTile<Acc>& tile, int64_t key_begin, int64_t rows,
                               const ScoreScale<Acc>& scale, const Acc* lse, const Acc* delta, Acc* scores, Acc* dscores) {
  constexpr int L = kLanes<Acc>;
  const int64_t columns = Products::Columns(tile.columns);
  int64_t c = 0;
  for (; c + 4 * L <= columns; c += 4 * L) {
    ScoreGradients<Products, Acc, kSoftcap, 4>(args, tile, c, key_begin, rows, scale, lse, delta, scores, dscores);
  }
  constexpr int kTogether = Products::kRegistersTogether;
  for (; c < columns; c += kTogether * L) {
    ScoreGradients<Products, Acc, kSoftcap, kTogether>(args, tile, c, key_begin, rows, scale, lse, delta, scores, dscores);
  }
  Products::FinishScores(rows, scores);
  Products::FinishScores(rows, dscores);
}

// sum over the value dim of dout * out for one query row, minus the gradient of its lse.
template <class Elem, class Acc>
PACKFREE_INLINE Acc RowDelta(const AttentionBackwardArgs& args, const Elem* dout, const Elem* out, int64_t lse_index) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> sum = Zero<Acc>();
  for (int64_t d = 0; d < args.V; d += L) {
    const int width = args.V - d < L ? static_cast<int>(args.V - d) : L;
    if (width == L) {
      sum = MulAdd(Load<Acc>(dout + d), Load<Acc>(out + d), sum);
    } else {
      sum = MulAdd(LoadN<Acc>(dout + d, width), LoadN<Acc>(out + d, width), sum);
    }
  }
  const Acc delta = ReduceSum<Acc>(sum);
  return args.dlse == nullptr ? delta : delta - static_cast<const Acc*>(args.dlse)[lse_index];
}

// What a query tile needs for its gradients: q and dout by rows and transposed, lse in units of log2, delta.
// `copy` is scratch for a tile's rows, `scratch` a block of scores.
template <class Elem, class Acc>
inline void LoadGradientTile(const AttentionBackwardArgs& args, const KeyUnit& unit, const QueryTile<Acc>& tile,
                             Acc sign, Acc* q_rows, Acc* qt, Acc* dout_rows, Acc* doutt, Acc* copy, Acc* lse,
                             Acc* delta, Acc* scratch) {
  constexpr Acc kLog2e = Acc(1.44269504088896340736);
  using Products = BackwardProducts<Elem, Acc>;
  const int64_t group = args.H / args.HK, bos = args.queries.bos(unit.sequence);
  Products::LoadQueries(tile, args.dout, bos, group, unit.kv_head, args.V, Acc(1), copy, dout_rows, doutt);
  Products::Delta(tile, args.out, bos, group, unit.kv_head, args.V, doutt, copy, scratch, delta);
  Products::LoadQueries(tile, args.q, bos, group, unit.kv_head, args.K, sign, copy, q_rows, qt);
  for (int64_t c = 0; c < kTileColumns; ++c) {
    // Columns past the tile's end get probability 0.
    lse[c] = static_cast<Acc>(__builtin_inf());
    if (c >= tile.columns) continue;
    const int64_t m = tile.first + c, head = unit.kv_head * group + m % group;
    const int64_t index = head * args.queries.tokens + bos + m / group;
    lse[c] = static_cast<const Acc*>(args.lse)[index] * kLog2e;
    if (args.dlse != nullptr) delta[c] -= static_cast<const Acc*>(args.dlse)[index];
  }
}

// The ranges of keys [first, last) that some column of the tile sees; the empty span counts as none.
template <class Acc>
inline KeySpan TileRanges(const QueryTile<Acc>& tile, int64_t range_size) {
  if (tile.some.begin >= tile.some.end) return {0, 0};
  return {tile.some.begin / range_size, CeilDiv(tile.some.end, range_size)};
}

// Adds the part dqt [K, kTileColumns] of range `range` to the sum of the ranges before it. Returns true if this was
// the last one; dqt then holds the whole sum.
template <class Acc>
inline bool ExchangeQueryGradient(const KeySpan& ranges, int64_t range, int64_t elements, int32_t* arrived,
                                  Acc* partial, Acc* dqt) {
  constexpr int L = kLanes<Acc>;
  if (ranges.end - ranges.begin == 1) return true;
  WaitFor(arrived, static_cast<int32_t>(range - ranges.begin));
  const bool last = range + 1 == ranges.end;
  for (int64_t i = 0; i < elements; i += L) {
    Vec<Acc> sum = Load<Acc>(dqt + i);
    if (range != ranges.begin) sum = Load<Acc>(partial + i) + sum;
    Store((last ? dqt : partial) + i, sum);
  }
  __atomic_store_n(arrived, static_cast<int32_t>(range - ranges.begin + 1), __ATOMIC_RELEASE);
  return last;
}

template <class Elem, class Acc>
void BackwardUnit(const AttentionBackwardArgs& args, const KeyUnit& unit, const QueryGradientExchange& exchange,
                  void* scratch) {
  const BackwardScratch layout(args);
  const int64_t group = args.H / args.HK;
  const int64_t key_dim = PaddedDim(args.K), value_dim = PaddedDim(args.V);
  const int64_t q_bos = args.queries.bos(unit.sequence), k_bos = args.keys.bos(unit.sequence);
  const int64_t range_size = KeyRange(args);
  const int64_t range_begin = unit.range * range_size;
  const int64_t keys_left = args.keys.length(unit.sequence) - range_begin;
  const int64_t range_end = range_begin + (keys_left < range_size ? keys_left : range_size);
  const bool softcap = args.softcap > 0;
  const ScoreScale<Acc> scale = ScaleOf<Acc>(args);
  const Acc final_scale = static_cast<Acc>(args.softmax_scale);
  Acc* base = static_cast<Acc*>(scratch);
  // The shapes of operands are those of vector registers; products_matrix-inl.h has the others.
  Acc* keys = base + layout.keys;            // [range, key_dim]
  Acc* values = base + layout.values;        // [range, value_dim]
  Acc* dkeys = base + layout.dkeys;          // [range, key_dim]
  Acc* dvalues = base + layout.dvalues;      // [range, value_dim]
  Acc* scores = base + layout.scores;        // [kKeyBlock, kTileColumns]
  Acc* dscores = base + layout.dscores;      // [kKeyBlock, kTileColumns]
  Acc* q_rows = base + layout.q_rows;        // [kTileColumns, key_dim]
  Acc* dout_rows = base + layout.dout_rows;  // [kTileColumns, value_dim]
  Acc* qt = base + layout.qt;                // [K, kTileColumns]
  Acc* doutt = base + layout.doutt;          // [V, kTileColumns]
  Acc* dqt = base + layout.dqt;              // [K, kTileColumns]
  Acc* copy = base + layout.copy;            // [kTileColumns, max(key_dim, value_dim)]
  Acc* lse = base + layout.column_info;      // [kTileColumns]
  Acc* delta = lse + kTileColumns;           // [kTileColumns]

  const int64_t count = range_end - range_begin;
  using Products = BackwardProducts<Elem, Acc>;
  Products::Open();
  Products::LoadKeys(count, args.K,
                     static_cast<const Elem*>(args.k.data) + (k_bos + range_begin) * args.k.token_stride +
                         unit.kv_head * args.k.head_stride,
                     args.k.token_stride, keys, range_size, scores);
  Products::LoadValues(count, args.V,
                       static_cast<const Elem*>(args.v.data) + (k_bos + range_begin) * args.v.token_stride +
                           unit.kv_head * args.v.head_stride,
                       args.v.token_stride, values, range_size);
  ClearTile(count, args.K, dkeys, key_dim);
  ClearTile(count, args.V, dvalues, value_dim);

  const int64_t tile_count = TileCount(args, unit.sequence);
  for (int64_t t = 0; t < tile_count; ++t) {
    QueryTile<Acc> tile;
    DescribeTile<Acc>(args, unit.sequence, unit.kv_head, t, delta + kTileColumns, &tile);
    const KeySpan ranges = TileRanges(tile, range_size);
    // Range 0 also answers for tiles that see no key at all: their dq is 0.
    const bool unseen = ranges.begin == ranges.end && unit.range == 0;
    if (!unseen && (unit.range < ranges.begin || unit.range >= ranges.end)) continue;
    ClearTile(args.K, kTileColumns, dqt, kTileColumns);
    const int64_t seen_begin = tile.some.begin > range_begin ? tile.some.begin : range_begin;
    const int64_t seen_end = tile.some.end < range_end ? tile.some.end : range_end;
    if (!unseen) {
      LoadGradientTile<Elem>(args, unit, tile, scale.sign, q_rows, qt, dout_rows, doutt, copy, lse, delta, scores);
    }
    constexpr int64_t kBlock = Products::kBlock;
    const int64_t columns = Products::Columns(tile.columns);
    for (int64_t block = seen_begin / kBlock * kBlock; !unseen && block < seen_end; block += kBlock) {
      const int64_t begin = Products::kWholeBlocks || block > seen_begin ? block : seen_begin;
      const int64_t end = block + kBlock < seen_end ? block + kBlock : seen_end;
      const int64_t rows = end - begin, first = begin - range_begin;
      // scores = k q^T, dscores = v dout^T
      Products::Scores(first, rows, columns, args.K, range_size, keys, qt, scores);
      Products::Scores(first, rows, columns, args.V, range_size, values, doutt, dscores);
      if (softcap) {
        TileScoreGradients<Products, Acc, true>(args, tile, begin, rows, scale, lse, delta, scores, dscores);
      } else {
        TileScoreGradients<Products, Acc, false>(args, tile, begin, rows, scale, lse, delta, scores, dscores);
      }
      // dv += (P Z)^T dout, dk += dS^T q, dq^T += k^T dS^T
      Products::AddToKeys(first, rows, columns, args.V, scores, dout_rows, dvalues);
      Products::AddToKeys(first, rows, columns, args.K, dscores, q_rows, dkeys);
      Products::AddToQueries(first, rows, columns, args.K, range_size, keys, dscores, dqt);
    }
    bool whole = true;
    if (unit.first_state >= 0 && !unseen) {
      const int64_t elements = args.K * kTileColumns;
      whole = ExchangeQueryGradient<Acc>(ranges, unit.range, elements, exchange.arrived + unit.first_state + t,
                                         static_cast<Acc*>(exchange.partial) + (unit.first_state + t) * elements, dqt);
    }
    if (whole) {
      StoreQueryColumns<Elem>(tile, dqt, final_scale, q_bos, group, unit.kv_head, args.H, args.K,
                              static_cast<Elem*>(args.dq), q_rows);
    }
  }

  Products::Close();
  StoreTile(count, args.K, dkeys, key_dim,
            static_cast<Elem*>(args.dk) + ((k_bos + range_begin) * args.HK + unit.kv_head) * args.K, args.HK * args.K,
            final_scale);
  StoreTile(count, args.V, dvalues, value_dim,
            static_cast<Elem*>(args.dv) + ((k_bos + range_begin) * args.HK + unit.kv_head) * args.V, args.HK * args.V);
}

// One sequence's part of ds_aux[head]: -sum over its queries, in order, of P_sink delta.
template <class Elem, class Acc>
void SinkGradientUnit(const AttentionBackwardArgs& args, int64_t sequence, int64_t head, void* target) {
  const Acc sink = static_cast<const Acc*>(args.s_aux)[head];
  double sum = 0;
  for (int64_t t = args.queries.bos(sequence); t < args.queries.eos(sequence); ++t) {
    const int64_t index = head * args.queries.tokens + t;
    const Elem* dout =
        static_cast<const Elem*>(args.dout.data) + t * args.dout.token_stride + head * args.dout.head_stride;
    const Elem* out = static_cast<const Elem*>(args.out.data) + t * args.out.token_stride + head * args.out.head_stride;
    const Acc probability = ExpOne<Acc>(sink - static_cast<const Acc*>(args.lse)[index]);
    sum -= static_cast<double>(probability * RowDelta<Elem, Acc>(args, dout, out, index));
  }
  *static_cast<Acc*>(target) = static_cast<Acc>(sum);
}
