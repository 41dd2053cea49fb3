// Backward: probabilities are recomputed from lse, block by block, so nothing of size T^2 is kept. With P the
// probabilities, Z the dropout factors and delta = sum(dout * out) - dlse per query:
//   dv = (P Z)^T dout    dP = Z (dout v^T)    dS = P (dP - delta)    dq = scale dS k    dk = scale dS^T q
// and for a sink, a key whose value is 0: ds_aux = -sum over queries of P_sink delta.

// One block's P Z and dS, both transposed, from scores and from dscores, which holds dout v^T, both
// [rows, kTileColumns]; lse is in units of log2. They go to `kept` and `ds` in the form that Products wants, a few rows
// a step, which may lie between the products of the block before.
template <class Products, class Acc, bool kSoftcap>
struct ScoreGradients {
  const AttentionArgs& args;
  const QueryTile<Acc>& tile;
  const ScoreScale<Acc>& scale;
  const Acc* lse;
  const Acc* delta;
  const Acc* scores;
  const Acc* dscores;
  int64_t key_begin, rows;
  Acc* kept;
  Acc* ds;
  int64_t done;

  // For the columns [column, column + kRegisters * lanes) of the rows [done, end).
  template <int kRegisters>
  PACKFREE_INLINE void Columns(int64_t column, int64_t end) {
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
    for (int64_t r = done; r < end; ++r) {
      const int64_t key = key_begin + r;
      const bool masked = key < tile.all.begin || key >= tile.all.end;
      const Acc* row = scores + r * kTileColumns + column;
      const Acc* drow = dscores + r * kTileColumns + column;
      Acc keep[kRegisters * L];
      if (dropout) {
        DropoutKeep<Acc>(tile.dropout + column, static_cast<uint32_t>(key), threshold, keep_scale, kRegisters * L,
                         keep);
      }
      Vec<Acc> probability[kRegisters], gradient[kRegisters];
#pragma GCC unroll 4
      for (int j = 0; j < kRegisters; ++j) {
        Vec<Acc> s = Load<Acc>(row + j * L), dp = Load<Acc>(drow + j * L), slope = Zero<Acc>();
        if constexpr (kSoftcap) {
          s = Tanh<Acc>(s * scale.inner);
          slope = Acc(1) - s * s;
        }
        Vec<Acc> p = Exp2Any<Acc>(MulAdd(s, Set<Acc>(scale.outer), -log_sum[j]));
        if (masked) p = SelectVisible<Acc>(tile, column + j * L, key, p, Zero<Acc>());
        probability[j] = p;
        if (dropout) {
          dp = dp * Load<Acc>(keep + j * L);
          probability[j] = p * Load<Acc>(keep + j * L);
        }
        gradient[j] = p * (dp - center[j]);
        if constexpr (kSoftcap) gradient[j] = gradient[j] * slope;
        if (masked) gradient[j] = SelectVisible<Acc>(tile, column + j * L, key, gradient[j], Zero<Acc>());
      }
      constexpr int kTogether = Products::kRegistersTogether;
#pragma GCC unroll 4
      for (int j = 0; j < kRegisters; j += kTogether) {
        Products::StoreScores(r, column + j * L, probability[j], probability[j + kTogether - 1], kept);
        Products::StoreScores(r, column + j * L, gradient[j], gradient[j + kTogether - 1], ds);
      }
    }
  }

  __attribute__((noinline)) void Rows(int64_t end) {
    constexpr int L = kLanes<Acc>, kTogether = Products::kRegistersTogether;
    const int64_t columns = Products::Columns(tile.columns);
    int64_t c = 0;
    for (; c + 4 * L <= columns; c += 4 * L) Columns<4>(c, end);
    for (; c < columns; c += kTogether * L) Columns<kTogether>(c, end);
    done = end;
    if (done < rows) return;
    Products::FinishScores(rows, kept);
    Products::FinishScores(rows, ds);
  }
  PACKFREE_INLINE void Step() {
    if (done < rows) Rows(done + Products::kRowsAStep < rows ? done + Products::kRowsAStep : rows);
  }
  PACKFREE_INLINE void Finish() {
    if (done < rows) Rows(rows);
  }
  PACKFREE_INLINE void Become(const ScoreGradients& other) {
    key_begin = other.key_begin;
    rows = other.rows;
    kept = other.kept;
    ds = other.ds;
    done = other.done;
  }
};

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

// dout by rows and transposed, and with it delta if it is wanted.
template <class Elem, class Acc>
inline void LoadOutputGradient(const AttentionBackwardArgs& args, const KeyItem& item, const QueryTile<Acc>& tile,
                               const AttentionBackwardTiles<Acc>& on, Acc* delta) {
  using Products = BackwardProducts<Elem, Acc>;
  const int64_t group = args.H / args.HK, bos = args.queries.bos(item.sequence);
  Products::LoadQueries(tile, args.dout, bos, group, item.kv_head, args.V, Acc(1), on.copy, on.dout_rows, on.doutt);
  if (delta == nullptr) return;
  Products::Delta(tile, args.out, bos, group, item.kv_head, args.V, on.doutt, on.copy, on.scores, delta);
  if (args.dlse == nullptr) return;
  for (int64_t c = 0; c < tile.columns; ++c) {
    delta[c] -= static_cast<const Acc*>(args.dlse)[LseIndex(args, bos, item.kv_head, tile, c)];
  }
}

// What a query tile needs for its gradients: q and dout by rows and transposed, lse in units of log2, and delta, which
// is copied from `delta` unless that is null.
template <class Elem, class Acc>
inline void LoadGradientTile(const AttentionBackwardArgs& args, const KeyItem& item, const QueryTile<Acc>& tile,
                             Acc sign, const Acc* delta, const AttentionBackwardTiles<Acc>& on) {
  constexpr Acc kLog2e = Acc(1.44269504088896340736);
  const int64_t group = args.H / args.HK, bos = args.queries.bos(item.sequence);
  LoadOutputGradient<Elem>(args, item, tile, on, delta == nullptr ? on.delta : nullptr);
  if (delta != nullptr) __builtin_memcpy(on.delta, delta, kTileColumns * sizeof(Acc));
  BackwardProducts<Elem, Acc>::LoadQueries(tile, args.q, bos, group, item.kv_head, args.K, sign, on.copy, on.q_rows,
                                           on.qt);
  for (int64_t c = 0; c < kTileColumns; ++c) {
    // Columns past the tile's end get probability 0.
    on.lse[c] = c < tile.columns
                    ? static_cast<const Acc*>(args.lse)[LseIndex(args, bos, item.kv_head, tile, c)] * kLog2e
                    : static_cast<Acc>(__builtin_inf());
  }
}

// Brings what the next query tile needs into the L2 cache, a share of its rows for every block of keys of this one.
template <class Elem>
struct NextTile {
  static constexpr int64_t kShare = 8;
  const AttentionBackwardArgs& args;
  const KeyItem& item;
  int64_t first;        // row of column 0
  int64_t done, rows;   // rows that were fetched, of how many
  const char* partial;  // its sum of dq so far, null if there is none
  int64_t partial_row;  // bytes of it for every row

  static PACKFREE_INLINE void Fetch(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
  }
  void Step() {
    const int64_t group = args.H / args.HK, bos = args.queries.bos(item.sequence);
    for (const int64_t end = done + kShare < rows ? done + kShare : rows; done < end; ++done) {
      const int64_t m = first + done;
      Fetch(TileRow<Elem>(args.dout, bos, group, item.kv_head, m), args.V * sizeof(Elem));
      Fetch(TileRow<Elem>(args.q, bos, group, item.kv_head, m), args.K * sizeof(Elem));
      if (partial != nullptr) Fetch(partial + done * partial_row, partial_row);
    }
  }
};

// scores = k q^T, dscores = v dout^T for the rows from `first` on, and what makes P Z and dS of them.
template <class Products, class Acc, bool kSoftcap>
PACKFREE_INLINE ScoreGradients<Products, Acc, kSoftcap> BlockScores(const AttentionArgs& args,
                                                                    const QueryTile<Acc>& tile,
                                                                    const ScoreScale<Acc>& scale,
                                                                    const AttentionBackwardTiles<Acc>& on,
                                                                    int64_t first, int64_t key_begin, int64_t rows) {
  const int64_t columns = Products::Columns(tile.columns), parity = key_begin / Products::kBlock % 2;
  Products::Scores(first, rows, columns, args.K, on.range_size, on.keys, on.qt, on.scores);
  Products::Scores(first, rows, columns, args.V, on.range_size, on.values, on.doutt, on.dscores);
  return {args,
          tile,
          scale,
          on.lse,
          on.delta,
          on.scores,
          on.dscores,
          key_begin,
          rows,
          Products::Gradients(on.scores, parity),
          Products::Gradients(on.dscores, parity),
          0};
}

// dv += (P Z)^T dout, dk += dS^T q, dq^T += k^T dS^T for the rows from `first` on; `work` goes on beside them.
template <class Products, class Acc, class Gradients, class Work>
PACKFREE_INLINE void AddBlock(const AttentionArgs& args, const AttentionBackwardTiles<Acc>& on, const Gradients& block,
                              int64_t first, Work&& work) {
  const int64_t columns = Products::Columns(block.tile.columns), rows = block.rows;
  Products::AddToKeys(first, rows, columns, args.V, block.kept, on.dout_rows, on.dvalues, work);
  Products::AddToKeys(first, rows, columns, args.K, block.ds, on.q_rows, on.dkeys, work);
  Products::AddToQueries(first, rows, columns, args.K, on.range_size, on.keys, block.ds, on.copy, on.dqt, work);
}

// The tile's part of the gradients by the keys [begin, end) of a range that starts at range_begin.
template <class Products, class Acc, bool kSoftcap, class Next>
void AddTileGradients(const AttentionArgs& args, const QueryTile<Acc>& tile, const ScoreScale<Acc>& scale,
                      const AttentionBackwardTiles<Acc>& on, int64_t range_begin, int64_t begin, int64_t end,
                      Next& next_tile) {
  constexpr int64_t kBlock = Products::kBlock;
  int64_t block = begin / kBlock * kBlock;
  int64_t from = Products::kWholeBlocks ? block : begin;
  int64_t to = block + kBlock < end ? block + kBlock : end;
  auto here = BlockScores<Products, Acc, kSoftcap>(args, tile, scale, on, from - range_begin, from, to - from);
  here.Finish();
  for (block += kBlock; block < end; block += kBlock) {
    const int64_t first = from - range_begin;
    next_tile.Step();
    from = block;
    to = block + kBlock < end ? block + kBlock : end;
    if constexpr (Products::kOverlaps) {
      auto next = BlockScores<Products, Acc, kSoftcap>(args, tile, scale, on, from - range_begin, from, to - from);
      AddBlock<Products>(args, on, here, first, next);
      next.Finish();
      here.Become(next);
    } else {
      AddBlock<Products>(args, on, here, first, NoWork());
      here.Become(BlockScores<Products, Acc, kSoftcap>(args, tile, scale, on, from - range_begin, from, to - from));
      here.Finish();
    }
  }
  next_tile.Step();
  AddBlock<Products>(args, on, here, from - range_begin, NoWork());
}

// Fills exchange.delta for tile `item.range` of a sequence with several ranges.
template <class Elem, class Acc>
void DeltaItem(const AttentionBackwardArgs& args, const KeyItem& item, const RangeExchange& exchange, void* scratch) {
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const AttentionBackwardTiles<Acc> on(args, pieces);
  QueryTile<Acc> tile;
  DescribeTile<Acc>(args, item.sequence, item.kv_head, item.range, on.columns, &tile);
  BackwardProducts<Elem, Acc>::Open();
  LoadOutputGradient<Elem>(args, item, tile, on,
                           static_cast<Acc*>(exchange.delta) + (item.first_state + item.range) * kTileColumns);
  BackwardProducts<Elem, Acc>::Close();
}

// Keys and values of the item's range, from token `begin` of the pack on, and no gradient of them yet.
template <class Elem, class Acc>
inline void LoadKeyRange(const AttentionBackwardArgs& args, const KeyItem& item, int64_t begin, int64_t count,
                         const AttentionBackwardTiles<Acc>& on) {
  using Products = BackwardProducts<Elem, Acc>;
  Products::LoadKeys(count, args.K, KeyRow<Elem>(args.k, begin, item.kv_head), args.k.token_stride, on.keys,
                     on.range_size, on.scores);
  Products::LoadValues(count, args.V, KeyRow<Elem>(args.v, begin, item.kv_head), args.v.token_stride, on.values,
                       on.range_size);
  ClearTile(count, args.K, on.dkeys, PaddedDim(args.K));
  ClearTile(count, args.V, on.dvalues, PaddedDim(args.V));
}

template <class Elem, class Acc>
inline void StoreKeyRange(const AttentionBackwardArgs& args, const KeyItem& item, int64_t begin, int64_t count,
                          const AttentionBackwardTiles<Acc>& on) {
  const int64_t row = begin * args.HK + item.kv_head;
  StoreTile(count, args.K, on.dkeys, PaddedDim(args.K), static_cast<Elem*>(args.dk) + row * args.K, args.HK * args.K,
            static_cast<Acc>(args.softmax_scale));
  StoreTile(count, args.V, on.dvalues, PaddedDim(args.V), static_cast<Elem*>(args.dv) + row * args.V, args.HK * args.V);
}

// The gradients between one query tile and the item's range of keys, `range`: those of the keys are summed, that of the
// queries is left in on.dqt. `state` counts the tile among those of sequences with several ranges, or is negative.
template <class Elem, class Acc>
inline void VisitQueryTile(const AttentionBackwardArgs& args, const KeyItem& item, const RangeExchange& exchange,
                           const QueryTile<Acc>& tile, const ScoreScale<Acc>& scale, const KeySpan& range,
                           int64_t state, const AttentionBackwardTiles<Acc>& on) {
  using Products = BackwardProducts<Elem, Acc>;
  const int64_t row_bytes = args.K * static_cast<int64_t>(sizeof(Acc)), tile_bytes = row_bytes * kTileColumns;
  const Acc* delta = state < 0 ? nullptr : static_cast<const Acc*>(exchange.delta) + state * kTileColumns;
  LoadGradientTile<Elem>(args, item, tile, scale.sign, delta, on);
  const int64_t next_first = tile.first + kTileColumns;
  const int64_t left = args.queries.length(item.sequence) * (args.H / args.HK) - next_first;
  const bool next_has_partial = state >= 0 && item.range > 0;
  NextTile<Elem> next{
      args,
      item,
      next_first,
      0,
      left < kTileColumns ? left : kTileColumns,
      next_has_partial ? static_cast<const char*>(exchange.partial) + (state + 1) * tile_bytes : nullptr,
      row_bytes};
  const int64_t begin = tile.some.begin > range.begin ? tile.some.begin : range.begin;
  const int64_t end = tile.some.end < range.end ? tile.some.end : range.end;
  if (args.softcap > 0) {
    AddTileGradients<Products, Acc, true>(args, tile, scale, on, range.begin, begin, end, next);
  } else {
    AddTileGradients<Products, Acc, false>(args, tile, scale, on, range.begin, begin, end, next);
  }
}

template <class Elem, class Acc>
void BackwardItem(const AttentionBackwardArgs& args, const KeyItem& item, const RangeExchange& exchange,
                  void* scratch) {
  using Products = BackwardProducts<Elem, Acc>;
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const AttentionBackwardTiles<Acc> on(args, pieces);
  const int64_t group = args.H / args.HK, size = on.range_size, length = args.keys.length(item.sequence);
  const KeySpan range{item.range * size, item.range * size + size < length ? item.range * size + size : length};
  const int64_t first_key = args.keys.bos(item.sequence) + range.begin, count = range.end - range.begin;
  const ScoreScale<Acc> scale = ScaleOf<Acc>(args);

  Products::Open();
  LoadKeyRange<Elem>(args, item, first_key, count, on);
  const int64_t tile_count = TileCount(args, item.sequence);
  for (int64_t t = 0; t < tile_count; ++t) {
    QueryTile<Acc> tile;
    DescribeTile<Acc>(args, item.sequence, item.kv_head, t, on.columns, &tile);
    const KeySpan ranges = TileRanges(tile, size);
    // Range 0 also answers for tiles that see no key at all: their dq is 0.
    const bool unseen = ranges.begin == ranges.end && item.range == 0;
    if (!unseen && (item.range < ranges.begin || item.range >= ranges.end)) continue;
    ClearTile(args.K, kTileColumns, on.dqt, kTileColumns);
    const int64_t state = item.first_state < 0 ? -1 : item.first_state + t;
    if (!unseen) VisitQueryTile<Elem>(args, item, exchange, tile, scale, range, state, on);
    bool whole = true;
    if (state >= 0 && !unseen) {
      const int64_t elements = args.K * kTileColumns;
      whole = ExchangeQueryGradient<Acc>(ranges, item.range, elements, exchange.arrived + state,
                                         static_cast<Acc*>(exchange.partial) + state * elements, on.dqt);
    }
    if (!whole) continue;
    StoreQueryColumns<Elem>(tile, on.dqt, static_cast<Acc>(args.softmax_scale), args.queries.bos(item.sequence), group,
                            item.kv_head, args.H, args.K, static_cast<Elem*>(args.dq), on.q_rows);
  }
  Products::Close();
  StoreKeyRange<Elem>(args, item, first_key, count, on);
}

// One sequence's part of ds_aux[head]: -sum over its queries, in order, of P_sink delta.
template <class Elem, class Acc>
void SinkGradientItem(const AttentionBackwardArgs& args, int64_t sequence, int64_t head, void* target) {
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
