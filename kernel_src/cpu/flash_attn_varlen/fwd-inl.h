// Forward: out = softmax(mask(score)) v with the running maximum and denominator of online softmax, one query tile
// against one block of keys at a time. Running values are kept in units of log2: score * log2(e).

// Folds a block of scores [rows, kTileColumns] into the columns [column, column + kRegisters * lanes): scores become
// unnormalised probabilities, max and sum advance, ot is rescaled where the maximum moved.
template <class Products, class Acc, bool kSoftcap, int kRegisters>
inline void FoldScores(const AttentionArgs& args, const QueryTile<Acc>& tile, int64_t column, int64_t key_begin,
                       int64_t rows, const ScoreScale<Acc>& scale, Acc* scores, Acc* max, Acc* sum, Acc* ot) {
  constexpr int L = kLanes<Acc>;
  const Vec<Acc> lowest = Set<Acc>(static_cast<Acc>(-__builtin_inf()));
  Vec<Acc> old[kRegisters], top[kRegisters], total[kRegisters];
#pragma GCC unroll 4
  for (int j = 0; j < kRegisters; ++j) top[j] = lowest;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t key = key_begin + r;
    const bool masked = key < tile.all.begin || key >= tile.all.end;
    Acc* row = scores + r * kTileColumns + column;
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      Vec<Acc> s = Load<Acc>(row + j * L);
      if constexpr (kSoftcap) s = Tanh<Acc>(s * scale.inner);
      if (masked) s = SelectVisible<Acc>(tile, column + j * L, key, s, lowest);
      if (kSoftcap || masked) Store(row + j * L, s);
      top[j] = Max(top[j], s);
    }
  }
  Vec<Acc> shift[kRegisters], decay[kRegisters];
#pragma GCC unroll 4
  for (int j = 0; j < kRegisters; ++j) {
    // A column that has seen no key yet keeps the maximum -infinity; subtracting 0 keeps its probabilities 0.
    old[j] = Load<Acc>(max + column + j * L);
    top[j] = Max(old[j], top[j] * scale.outer);
    // Each column decides for itself.
    top[j] = Select(top[j] <= old[j] + Acc(Products::kLag), old[j], top[j]);
    shift[j] = Select(top[j] == lowest, Zero<Acc>(), top[j]);
    decay[j] = Exp2<Acc>(old[j] - shift[j]);
    total[j] = Load<Acc>(sum + column + j * L) * decay[j];
    Store(max + column + j * L, top[j]);
  }
  const bool dropout = args.dropout_p > 0;
  const uint32_t threshold = DropoutThreshold(args.dropout_p);
  const Acc keep_scale = static_cast<Acc>(1 / (1 - args.dropout_p));
  constexpr int kTogether = Products::kRowsTogether;
  for (int64_t r = 0; r < rows; r += kTogether) {
    Vec<Acc> p[kTogether][kRegisters];
#pragma GCC unroll 2
    for (int i = 0; i < kTogether; ++i) {
      if (kTogether > 1 && r + i >= rows) {
#pragma GCC unroll 4
        for (int j = 0; j < kRegisters; ++j) p[i][j] = Zero<Acc>();
        continue;
      }
      const Acc* row = scores + (r + i) * kTileColumns + column;
#pragma GCC unroll 4
      for (int j = 0; j < kRegisters; ++j) {
        p[i][j] = Exp2Any<Acc>(MulAdd(Load<Acc>(row + j * L), Set<Acc>(scale.outer), -shift[j]));
        total[j] = total[j] + p[i][j];
      }
      if (dropout) {
        Acc keep[kRegisters * L];
        DropoutKeep<Acc>(tile.dropout + column, static_cast<uint32_t>(key_begin + r + i), threshold, keep_scale,
                         kRegisters * L, keep);
#pragma GCC unroll 4
        for (int j = 0; j < kRegisters; ++j) p[i][j] = p[i][j] * Load<Acc>(keep + j * L);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      Products::StoreProbabilities(r, column + j * L, p[0][j], p[kTogether - 1][j], scores);
    }
  }
  Vec<Acc> moved = Zero<Acc>();
#pragma GCC unroll 4
  for (int j = 0; j < kRegisters; ++j) {
    Store(sum + column + j * L, total[j]);
    moved = Select(decay[j] == Set<Acc>(Acc(1)), moved, Set<Acc>(Acc(1)));
  }
  if (ReduceMax<Acc>(moved) == Acc(0)) return;
  for (int64_t d = 0; d < args.V; ++d) {
    Acc* row = ot + d * kTileColumns + column;
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) Store(row + j * L, Load<Acc>(row + j * L) * decay[j]);
  }
}

template <class Products, class Acc, bool kSoftcap>
inline void FoldTile(const AttentionArgs& args, const QueryTile<Acc>& tile, int64_t key_begin, int64_t rows,
                     const ScoreScale<Acc>& scale, Acc* scores, Acc* max, Acc* sum, Acc* ot) {
  constexpr int L = kLanes<Acc>;
  int64_t c = 0;
  for (; c + 4 * L <= tile.columns; c += 4 * L) {
    FoldScores<Products, Acc, kSoftcap, 4>(args, tile, c, key_begin, rows, scale, scores, max, sum, ot);
  }
  for (; c < tile.columns; c += L) {
    FoldScores<Products, Acc, kSoftcap, 1>(args, tile, c, key_begin, rows, scale, scores, max, sum, ot);
  }
}

template <class Elem, class Acc>
void ForwardUnit(const AttentionForwardArgs& args, const QueryUnit& unit, void* scratch) {
  constexpr Acc kLog2e = Acc(1.44269504088896340736), kLn2 = Acc(0.69314718055994530942);
  constexpr int L = kLanes<Acc>;
  const ForwardScratch layout(args);
  const int64_t group = args.H / args.HK;
  const int64_t key_dim = PaddedDim(args.K);
  const int64_t q_bos = args.queries.bos(unit.sequence), k_bos = args.keys.bos(unit.sequence);
  const int64_t tile_count = unit.tile_end - unit.tile_begin;
  const bool softcap = args.softcap > 0;
  const ScoreScale<Acc> scale = ScaleOf<Acc>(args);
  Acc* base = static_cast<Acc*>(scratch);
  // The shapes of operands are those of vector registers; products_matrix-inl.h has the others.
  Acc* keys = base + layout.keys;      // [kKeyBlock, key_dim]
  Acc* values = base + layout.values;  // [kKeyBlock, value_dim]
  Acc* scores = base + layout.scores;  // [kKeyBlock, kTileColumns]
  Acc* rows = base + layout.rows;      // [kTileColumns, max(key_dim, value_dim)]
  QueryTile<Acc> tiles[16];
  using Products = ForwardProducts<Elem, Acc>;

  Products::Open();
  // Queries, transposed; a sink opens the softmax of its head as a key with value 0 would.
  KeySpan some{args.keys.length(unit.sequence), 0};
  for (int64_t t = 0; t < tile_count; ++t) {
    Acc* qt = base + layout.tiles + t * layout.tile_size;  // [K, kTileColumns]
    Acc* ot = qt + key_dim * kTileColumns;                 // [V, kTileColumns]
    Acc* max = qt + layout.column_info;                    // [kTileColumns]
    Acc* sum = max + kTileColumns;                         // [kTileColumns]
    QueryTile<Acc>& tile = tiles[t];
    DescribeTile<Acc>(args, unit.sequence, unit.kv_head, unit.tile_begin + t, sum + kTileColumns, &tile);
    LoadQueryRows<Elem>(tile, args.q, q_bos, group, unit.kv_head, args.K, rows, key_dim);
    LoadTileTransposed(tile.columns, args.K, rows, key_dim, qt, kTileColumns, scale.sign);
    Products::PrepareQueries(args.K, qt);
    ClearTile(args.V, kTileColumns, ot, kTileColumns);
    for (int64_t c = 0; c < kTileColumns; ++c) {
      const int64_t head = unit.kv_head * group + (tile.first + c) % group;
      max[c] = args.s_aux == nullptr ? static_cast<Acc>(-__builtin_inf())
                                     : static_cast<const Acc*>(args.s_aux)[head] * kLog2e;
      sum[c] = args.s_aux == nullptr ? Acc(0) : Acc(1);
    }
    if (tile.some.begin < tile.some.end) {
      some.begin = tile.some.begin < some.begin ? tile.some.begin : some.begin;
      some.end = tile.some.end > some.end ? tile.some.end : some.end;
    }
  }

  constexpr int64_t kBlock = Products::kBlock;
  for (int64_t block = some.begin / kBlock * kBlock; block < some.end; block += kBlock) {
    const int64_t block_end = block + kBlock < some.end ? block + kBlock : some.end;
    Products::LoadKeys(block_end - block, args.K,
                      static_cast<const Elem*>(args.k.data) + (k_bos + block) * args.k.token_stride +
                          unit.kv_head * args.k.head_stride,
                      args.k.token_stride, keys);
    Products::LoadValues(block_end - block, args.V,
                        static_cast<const Elem*>(args.v.data) + (k_bos + block) * args.v.token_stride +
                            unit.kv_head * args.v.head_stride,
                        args.v.token_stride, values, scores);
    for (int64_t t = 0; t < tile_count; ++t) {
      const QueryTile<Acc>& tile = tiles[t];
      const int64_t seen_begin = tile.some.begin > block ? tile.some.begin : block;
      const int64_t end = tile.some.end < block_end ? tile.some.end : block_end;
      if (seen_begin >= end) continue;
      Acc* qt = base + layout.tiles + t * layout.tile_size;
      Acc* ot = qt + key_dim * kTileColumns;
      Acc* max = qt + layout.column_info;
      Acc* sum = max + kTileColumns;
      constexpr int64_t kStep = Products::kKeysTogether;
      for (int64_t step = block + (seen_begin - block) / kStep * kStep; step < end; step += kStep) {
        const int64_t begin = Products::kWholeBlocks || step > seen_begin ? step : seen_begin;
        const int64_t rows_end = step + kStep < end ? step + kStep : end, count = rows_end - begin;
        // scores[key, query] = k[key] . q[query]
        Products::Scores(begin - block, count, tile.columns, args.K, keys, qt, scores);
        if (softcap) {
          FoldTile<Products, Acc, true>(args, tile, begin, count, scale, scores, max, sum, ot);
        } else {
          FoldTile<Products, Acc, false>(args, tile, begin, count, scale, scores, max, sum, ot);
        }
        // ot[:, query] += v[key] p[key, query]
        Products::AddValues(begin - block, count, tile.columns, args.V, values, scores, ot);
      }
    }
  }

  Products::Close();

  // out = ot / sum, lse = max ln(2) + ln(sum). A row that saw nothing has sum 0: output 0, lse -infinity.
  for (int64_t t = 0; t < tile_count; ++t) {
    const QueryTile<Acc>& tile = tiles[t];
    Acc* qt = base + layout.tiles + t * layout.tile_size;
    Acc* ot = qt + key_dim * kTileColumns;
    Acc* max = qt + layout.column_info;
    Acc* sum = max + kTileColumns;
    for (int64_t c = 0; c < tile.columns; c += L) {
      const Vec<Acc> denominator = Load<Acc>(sum + c);
      const Vec<Acc> inverse = Select(denominator == Zero<Acc>(), Zero<Acc>(), Acc(1) / denominator);
      for (int64_t d = 0; d < args.V; ++d) {
        Acc* p = ot + d * kTileColumns + c;
        Store(p, Load<Acc>(p) * inverse);
      }
      Store(sum + c, MulAdd(Load<Acc>(max + c), Set<Acc>(kLn2), Log<Acc>(denominator)));
    }
    StoreQueryColumns<Elem>(tile, ot, Acc(1), q_bos, group, unit.kv_head, args.H, args.V, static_cast<Elem*>(args.out),
                            rows);
    if (args.lse == nullptr) continue;
    for (int64_t c = 0; c < tile.columns; ++c) {
      const int64_t m = tile.first + c;
      const int64_t head = unit.kv_head * group + m % group;
      static_cast<Acc*>(args.lse)[head * args.queries.tokens + q_bos + m / group] = sum[c];
    }
  }
}
