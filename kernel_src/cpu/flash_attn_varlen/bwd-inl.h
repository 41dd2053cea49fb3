// Backward: probabilities are recomputed from lse, block by block, so nothing of size T^2 is kept. With P the
// probabilities, Z the dropout factors and delta = sum(dout * out) - dlse per query:
//   dv = (P Z)^T dout    dP = Z (dout v^T)    dS = P (dP - delta)    dq = scale dS k    dk = scale dS^T q
// and for a sink, a key whose value is 0: ds_aux = -sum over queries of P_sink delta.

// Turns scores [rows, kTileColumns] into P Z and dscores, which holds dout v^T, into dS, both transposed, for the
// columns [column, column + kRegisters * lanes). lse is in units of log2.
template <class Acc, bool kSoftcap, int kRegisters>
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
  const uint32_t threshold = DropoutThreshold(args.dropout_p);
  const Acc keep_scale = static_cast<Acc>(1 / (1 - args.dropout_p));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t key = key_begin + r;
    const bool masked = key < tile.all.begin || key >= tile.all.end;
    Acc* row = scores + r * kTileColumns + column;
    Acc* drow = dscores + r * kTileColumns + column;
    Acc keep[kRegisters * L];
    if (args.dropout_p > 0) {
      DropoutKeep<Acc>(tile.dropout + column, static_cast<uint32_t>(key), threshold, keep_scale, kRegisters * L, keep);
    }
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      Vec<Acc> s = Load<Acc>(row + j * L), dp = Load<Acc>(drow + j * L), slope = Zero<Acc>();
      if constexpr (kSoftcap) {
        s = Tanh<Acc>(s * scale.inner);
        slope = Acc(1) - s * s;
      }
      Vec<Acc> p = Exp2<Acc>(MulAdd(s, Set<Acc>(scale.outer), -log_sum[j]));
      if (masked) p = SelectVisible<Acc>(tile, column + j * L, key, p, Zero<Acc>());
      Vec<Acc> kept = p;
      if (args.dropout_p > 0) {
        dp = dp * Load<Acc>(keep + j * L);
        kept = p * Load<Acc>(keep + j * L);
      }
      Vec<Acc> ds = p * (dp - center[j]);
      if constexpr (kSoftcap) ds = ds * slope;
      if (masked) ds = SelectVisible<Acc>(tile, column + j * L, key, ds, Zero<Acc>());
      Store(row + j * L, kept);
      Store(drow + j * L, ds);
    }
  }
}

template <class Acc, bool kSoftcap>
inline void TileScoreGradients(const AttentionArgs& args, const QueryTile<Acc>& tile, int64_t key_begin, int64_t rows,
                               const ScoreScale<Acc>& scale, const Acc* lse, const Acc* delta, Acc* scores, Acc* dscores) {
  constexpr int L = kLanes<Acc>;
  int64_t c = 0;
  for (; c + 4 * L <= tile.columns; c += 4 * L) {
    ScoreGradients<Acc, kSoftcap, 4>(args, tile, c, key_begin, rows, scale, lse, delta, scores, dscores);
  }
  for (; c < tile.columns; c += L) {
    ScoreGradients<Acc, kSoftcap, 1>(args, tile, c, key_begin, rows, scale, lse, delta, scores, dscores);
  }
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

// delta[c] = sum over d of doutt[d, c] * out_rows[c, d], summed as MultiplyRows sums dout . v: a query whose output is
// one value row then gets dP - delta = 0 exactly. `transposed` is scratch [kStretch, kTileColumns].
template <class Acc>
inline void TileDelta(const QueryTile<Acc>& tile, int64_t dim, const Acc* doutt, const Acc* out_rows, int64_t ld,
                      Acc* transposed, Acc* delta) {
  constexpr int L = kLanes<Acc>;
  for (int64_t c = 0; c < kTileColumns; ++c) delta[c] = Acc(0);
  for (int64_t d = 0; d < dim; d += kStretch) {
    const int64_t depth = dim - d < kStretch ? dim - d : kStretch;
    LoadTileTransposed(tile.columns, depth, out_rows + d, ld, transposed, kTileColumns);
    for (int64_t c = 0; c < tile.columns; c += L) {
      Vec<Acc> sum = Zero<Acc>();
      for (int64_t i = 0; i < depth; ++i) {
        sum = MulAdd(Load<Acc>(transposed + i * kTileColumns + c), Load<Acc>(doutt + (d + i) * kTileColumns + c), sum);
      }
      Store(delta + c, d == 0 ? sum : Load<Acc>(delta + c) + sum);
    }
  }
}

// What a query tile needs for its gradients: q and dout by rows and transposed, lse in units of log2, delta.
// `transposed` is scratch of a block of scores.
template <class Elem, class Acc>
inline void LoadGradientTile(const AttentionBackwardArgs& args, const KeyUnit& unit, const QueryTile<Acc>& tile,
                             Acc sign, Acc* q_rows, Acc* qt, Acc* dout_rows, Acc* doutt, Acc* lse, Acc* delta,
                             Acc* transposed) {
  constexpr Acc kLog2e = Acc(1.44269504088896340736);
  const int64_t group = args.H / args.HK, bos = args.queries.bos(unit.sequence);
  const int64_t key_dim = PaddedDim(args.K), value_dim = PaddedDim(args.V);
  LoadQueryRows<Elem>(tile, args.q, bos, group, unit.kv_head, args.K, q_rows, key_dim);
  LoadTileTransposed(tile.columns, args.K, q_rows, key_dim, qt, kTileColumns, sign);
  LoadQueryRows<Elem>(tile, args.dout, bos, group, unit.kv_head, args.V, dout_rows, value_dim);
  LoadTileTransposed(tile.columns, args.V, dout_rows, value_dim, doutt, kTileColumns);
  LoadQueryRows<Elem>(tile, args.out, bos, group, unit.kv_head, args.V, dout_rows, value_dim);
  TileDelta(tile, args.V, doutt, dout_rows, value_dim, transposed, delta);
  LoadQueryRows<Elem>(tile, args.dout, bos, group, unit.kv_head, args.V, dout_rows, value_dim);
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
  Acc* lse = base + layout.column_info;      // [kTileColumns]
  Acc* delta = lse + kTileColumns;           // [kTileColumns]

  const int64_t count = range_end - range_begin;
  LoadTile(count, args.K,
           static_cast<const Elem*>(args.k.data) + (k_bos + range_begin) * args.k.token_stride +
               unit.kv_head * args.k.head_stride,
           args.k.token_stride, keys, key_dim);
  LoadTile(count, args.V,
           static_cast<const Elem*>(args.v.data) + (k_bos + range_begin) * args.v.token_stride +
               unit.kv_head * args.v.head_stride,
           args.v.token_stride, values, value_dim);
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
      LoadGradientTile<Elem>(args, unit, tile, scale.sign, q_rows, qt, dout_rows, doutt, lse, delta,
                             scores);
    }
    for (int64_t block = seen_begin / kKeyBlock * kKeyBlock; !unseen && block < seen_end; block += kKeyBlock) {
      const int64_t begin = block > seen_begin ? block : seen_begin;
      const int64_t end = block + kKeyBlock < seen_end ? block + kKeyBlock : seen_end;
      const int64_t rows = end - begin;
      const Acc* block_keys = keys + (begin - range_begin) * key_dim;
      const Acc* block_values = values + (begin - range_begin) * value_dim;
      // scores = k q^T, dscores = v dout^T
      MultiplyRows(rows, tile.columns, args.K, block_keys, key_dim, qt, scores);
      MultiplyRows(rows, tile.columns, args.V, block_values, value_dim, doutt, dscores);
      if (softcap) {
        TileScoreGradients<Acc, true>(args, tile, begin, rows, scale, lse, delta, scores, dscores);
      } else {
        TileScoreGradients<Acc, false>(args, tile, begin, rows, scale, lse, delta, scores, dscores);
      }
      // dv += (P Z)^T dout, dk += dS^T q, dq^T += k^T dS^T
      Multiply<Into::kAdd>(rows, args.V, tile.columns, scores, kTileColumns, int64_t{1}, dout_rows, value_dim,
                           dvalues + (begin - range_begin) * value_dim, value_dim);
      Multiply<Into::kAdd>(rows, args.K, tile.columns, dscores, kTileColumns, int64_t{1}, q_rows, key_dim,
                           dkeys + (begin - range_begin) * key_dim, key_dim);
      Multiply<Into::kAdd>(args.K, tile.columns, rows, block_keys, int64_t{1}, key_dim, dscores, kTileColumns, dqt,
                           kTileColumns);
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
