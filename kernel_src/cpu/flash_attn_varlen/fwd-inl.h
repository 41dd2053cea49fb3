// Forward: out = softmax(mask(score)) v with the running maximum and denominator of online softmax, one query tile
// against one block of keys at a time. Running values are kept in units of log2: score * log2(e).

// Folds a block of scores [rows, kTileColumns] into the columns [column, column + kRegisters * lanes): scores become
// unnormalised probabilities, max and sum advance, ot is rescaled where the maximum moved. Step() does a part of it, so
// that it can go on beside a product; Finish() does the rest.
template <class Products, class Acc, bool kSoftcap, int kRegisters>
struct Fold {
  static constexpr int L = kLanes<Acc>;
  const AttentionArgs& args;
  const QueryTile<Acc>& tile;
  const ScoreScale<Acc>& scale;
  int64_t column, key_begin, rows;
  Acc *scores, *max, *sum, *ot;
  int64_t seen = 0, done = 0;  // rows whose scores are part of the maximum; rows that hold probabilities
  Vec<Acc> top[kRegisters] = {}, shift[kRegisters] = {}, total[kRegisters] = {};

  // Masks the scores, and takes their maximum.
  PACKFREE_INLINE void MaskAndMax(int64_t begin, int64_t end) {
    const Vec<Acc> lowest = Set<Acc>(static_cast<Acc>(-__builtin_inf()));
    Vec<Acc> highest[kRegisters];
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) highest[j] = begin == 0 ? lowest : top[j];
    for (int64_t r = begin; r < end; ++r) {
      const int64_t key = key_begin + r;
      const bool masked = key < tile.all.begin || key >= tile.all.end;
      Acc* row = scores + r * kTileColumns + column;
#pragma GCC unroll 4
      for (int j = 0; j < kRegisters; ++j) {
        Vec<Acc> s = Load<Acc>(row + j * L);
        if constexpr (kSoftcap) s = Tanh<Acc>(s * scale.inner);
        if (masked) s = SelectVisible<Acc>(tile, column + j * L, key, s, lowest);
        if (kSoftcap || masked) Store(row + j * L, s);
        highest[j] = Max(highest[j], s);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) top[j] = highest[j];
  }

  // Moves the columns to their new maximum.
  PACKFREE_INLINE void Rescale() {
    const Vec<Acc> lowest = Set<Acc>(static_cast<Acc>(-__builtin_inf()));
    Vec<Acc> decay[kRegisters], moved = Zero<Acc>();
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      // A column that has seen no key yet keeps the maximum -infinity; subtracting 0 keeps its probabilities 0.
      const Vec<Acc> old = Load<Acc>(max + column + j * L);
      top[j] = Max(old, top[j] * scale.outer);
      // Each column decides for itself.
      top[j] = Select(top[j] <= old + Acc(Products::kLag), old, top[j]);
      shift[j] = Select(top[j] == lowest, Zero<Acc>(), top[j]);
      decay[j] = Exp2<Acc>(old - shift[j]);
      total[j] = Load<Acc>(sum + column + j * L) * decay[j];
      Store(max + column + j * L, top[j]);
      moved = Select(decay[j] == Set<Acc>(Acc(1)), moved, Set<Acc>(Acc(1)));
    }
    if (ReduceMax<Acc>(moved) == Acc(0)) return;
    for (int64_t d = 0; d < args.V; ++d) {
      Acc* row = ot + d * kTileColumns + column;
#pragma GCC unroll 4
      for (int j = 0; j < kRegisters; ++j) Store(row + j * L, Load<Acc>(row + j * L) * decay[j]);
    }
  }

  // Probabilities, and their sum.
  PACKFREE_INLINE void Exponentiate(int64_t begin, int64_t end) {
    const bool dropout = args.dropout_p > 0;
    const uint32_t threshold = DropoutThreshold(args.dropout_p);
    const Acc keep_scale = static_cast<Acc>(1 / (1 - args.dropout_p));
    constexpr int kTogether = Products::kRowsTogether;
    const Vec<Acc> outer = Set<Acc>(scale.outer);
    Vec<Acc> part[kRegisters], base[kRegisters];
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      part[j] = total[j];
      base[j] = -shift[j];
    }
    for (int64_t r = begin; r < end; r += kTogether) {
      Vec<Acc> p[kTogether][kRegisters];
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) {
        if (kTogether > 1 && r + i >= end) {
#pragma GCC unroll 4
          for (int j = 0; j < kRegisters; ++j) p[i][j] = Zero<Acc>();
          continue;
        }
        const Acc* row = scores + (r + i) * kTileColumns + column;
#pragma GCC unroll 4
        for (int j = 0; j < kRegisters; ++j) {
          p[i][j] = Exp2Any<Acc>(MulAdd(Load<Acc>(row + j * L), outer, base[j]));
          part[j] = part[j] + p[i][j];
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
#pragma GCC unroll 4
    for (int j = 0; j < kRegisters; ++j) {
      total[j] = part[j];
      if (end == rows) Store(sum + column + j * L, part[j]);
    }
  }

  __attribute__((noinline)) void Step() {
    if (seen < rows) {
      // Four times as many rows, which are that much cheaper.
      const int64_t end = seen + 4 * Products::kRowsAStep < rows ? seen + 4 * Products::kRowsAStep : rows;
      MaskAndMax(seen, end);
      seen = end;
      if (end == rows) Rescale();
    } else if (done < rows) {
      const int64_t end = done + Products::kRowsAStep < rows ? done + Products::kRowsAStep : rows;
      Exponentiate(done, end);
      done = end;
    }
  }
  PACKFREE_INLINE void Finish() {
    while (done < rows) Step();
  }
};

// One tile's step over the keys [key_begin, key_begin + rows), whose first one is row `first` of the loaded block.
template <class Products, class Acc, bool kSoftcap>
inline void ForwardStep(const AttentionArgs& args, const QueryTile<Acc>& tile, const ScoreScale<Acc>& scale,
                        int64_t first, int64_t key_begin, int64_t rows, const Acc* keys, const Acc* values,
                        const Acc* qt, Acc* scores, Acc* max, Acc* sum, Acc* ot) {
  constexpr int L = kLanes<Acc>;
  if constexpr (Products::kColumnsTogether == kTileColumns) {
    // scores[key, query] = k[key] . q[query]
    Products::Scores(first, rows, tile.columns, args.K, keys, qt, scores);
    int64_t c = 0;
    for (; c + 4 * L <= tile.columns; c += 4 * L) {
      Fold<Products, Acc, kSoftcap, 4>{args, tile, scale, c, key_begin, rows, scores, max, sum, ot}.Finish();
    }
    for (; c < tile.columns; c += L) {
      Fold<Products, Acc, kSoftcap, 1>{args, tile, scale, c, key_begin, rows, scores, max, sum, ot}.Finish();
    }
    // ot[:, query] += v[key] p[key, query]
    Products::AddValues(first, rows, tile.columns, args.V, values, scores, ot);
  } else {
    // The same, half of the columns after the other; the half that is folded goes on beside a product of the other one.
    constexpr int64_t kHalf = Products::kColumnsTogether;
    Products::Scores(first, rows, 0, kHalf, args.K, keys, qt, scores, NoWork());
    Fold<Products, Acc, kSoftcap, kHalf / L> left{args, tile, scale, 0, key_begin, rows, scores, max, sum, ot};
    if (tile.columns > kHalf) Products::Scores(first, rows, kHalf, kHalf, args.K, keys, qt, scores, left);
    left.Finish();
    if (tile.columns <= kHalf) return Products::AddValues(first, rows, 0, kHalf, args.V, values, scores, ot, NoWork());
    Fold<Products, Acc, kSoftcap, kHalf / L> right{args, tile, scale, kHalf, key_begin, rows, scores, max, sum, ot};
    Products::AddValues(first, rows, 0, kHalf, args.V, values, scores, ot, right);
    right.Finish();
    Products::AddValues(first, rows, kHalf, kHalf, args.V, values, scores, ot, NoWork());
  }
}

// Opens the item's query tiles: queries transposed, no value summed yet. A sink opens the softmax of its head as a key
// with value 0 would. Returns the keys that at least one of the tiles sees.
template <class Elem, class Acc>
inline KeySpan OpenQueryTiles(const AttentionForwardArgs& args, const QueryItem& item, Acc sign,
                              const AttentionForwardTiles<Acc>& memory, QueryTile<Acc>* tiles) {
  constexpr Acc kLog2e = Acc(1.44269504088896340736);
  const int64_t group = args.H / args.HK, bos = args.queries.bos(item.sequence);
  KeySpan some{args.keys.length(item.sequence), 0};
  for (int64_t t = 0; t < item.tile_end - item.tile_begin; ++t) {
    const auto [qt, ot, max, sum, columns] = memory.tile[t];
    QueryTile<Acc>& tile = tiles[t];
    DescribeTile<Acc>(args, item.sequence, item.kv_head, item.tile_begin + t, columns, &tile);
    ForwardProducts<Elem, Acc>::LoadQueries(tile, args.q, bos, group, item.kv_head, args.K, sign, memory.rows, qt);
    ClearTile(args.V, kTileColumns, ot, kTileColumns);
    for (int64_t c = 0; c < kTileColumns; ++c) {
      const int64_t head = item.kv_head * group + (tile.first + c) % group;
      max[c] = args.s_aux == nullptr ? static_cast<Acc>(-__builtin_inf())
                                     : static_cast<const Acc*>(args.s_aux)[head] * kLog2e;
      sum[c] = args.s_aux == nullptr ? Acc(0) : Acc(1);
    }
    if (tile.some.begin < tile.some.end) {
      some.begin = tile.some.begin < some.begin ? tile.some.begin : some.begin;
      some.end = tile.some.end > some.end ? tile.some.end : some.end;
    }
  }
  return some;
}

// Keys and values of the block [begin, end) of the sequence's keys.
template <class Elem, class Acc>
inline void LoadKeyBlock(const AttentionForwardArgs& args, const QueryItem& item, int64_t begin, int64_t end,
                         const AttentionForwardTiles<Acc>& memory) {
  using Products = ForwardProducts<Elem, Acc>;
  const int64_t token = args.keys.bos(item.sequence) + begin;
  Products::LoadKeys(end - begin, args.K, KeyRow<Elem>(args.k, token, item.kv_head), args.k.token_stride, memory.keys);
  Products::LoadValues(end - begin, args.V, KeyRow<Elem>(args.v, token, item.kv_head), args.v.token_stride,
                       memory.values, memory.scores);
}

// One tile's steps over the keys of the loaded block [begin, end) that it sees.
template <class Products, class Acc, bool kSoftcap>
inline void VisitBlock(const AttentionForwardArgs& args, const QueryTile<Acc>& tile, const ScoreScale<Acc>& scale,
                       int64_t begin, int64_t end, const AttentionForwardTiles<Acc>& memory,
                       const QueryTileMemory<Acc>& of) {
  constexpr int64_t kStep = Products::kKeysTogether;
  const int64_t seen_begin = tile.some.begin > begin ? tile.some.begin : begin;
  const int64_t seen_end = tile.some.end < end ? tile.some.end : end;
  if (seen_begin >= seen_end) return;
  for (int64_t step = begin + (seen_begin - begin) / kStep * kStep; step < seen_end; step += kStep) {
    const int64_t from = Products::kWholeBlocks || step > seen_begin ? step : seen_begin;
    const int64_t to = step + kStep < seen_end ? step + kStep : seen_end;
    ForwardStep<Products, Acc, kSoftcap>(args, tile, scale, from - begin, from, to - from, memory.keys, memory.values,
                                         of.qt, memory.scores, of.max, of.sum, of.ot);
  }
}

// out = ot / sum, lse = max ln(2) + ln(sum). A row that saw nothing has sum 0: output 0, lse -infinity.
template <class Elem, class Acc>
inline void StoreQueryTile(const AttentionForwardArgs& args, const QueryItem& item, const QueryTile<Acc>& tile,
                           const QueryTileMemory<Acc>& of, Acc* rows) {
  constexpr Acc kLn2 = Acc(0.69314718055994530942);
  constexpr int L = kLanes<Acc>;
  const int64_t group = args.H / args.HK, bos = args.queries.bos(item.sequence);
  for (int64_t c = 0; c < tile.columns; c += L) {
    const Vec<Acc> denominator = Load<Acc>(of.sum + c);
    const Vec<Acc> inverse = Select(denominator == Zero<Acc>(), Zero<Acc>(), Acc(1) / denominator);
    for (int64_t d = 0; d < args.V; ++d) {
      Acc* at = of.ot + d * kTileColumns + c;
      Store(at, Load<Acc>(at) * inverse);
    }
    Store(of.sum + c, MulAdd(Load<Acc>(of.max + c), Set<Acc>(kLn2), Log<Acc>(denominator)));
  }
  StoreQueryColumns<Elem>(tile, of.ot, Acc(1), bos, group, item.kv_head, args.H, args.V, static_cast<Elem*>(args.out),
                          rows);
  if (args.lse == nullptr) return;
  for (int64_t c = 0; c < tile.columns; ++c) {
    static_cast<Acc*>(args.lse)[LseIndex(args, bos, item.kv_head, tile, c)] = of.sum[c];
  }
}

template <class Elem, class Acc>
void ForwardItem(const AttentionForwardArgs& args, const QueryItem& item, void* scratch) {
  using Products = ForwardProducts<Elem, Acc>;
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const AttentionForwardTiles<Acc> memory(args, pieces);
  const ScoreScale<Acc> scale = ScaleOf<Acc>(args);
  const int64_t tile_count = item.tile_end - item.tile_begin;
  QueryTile<Acc> tiles[kMostTiles];

  Products::Open();
  const KeySpan some = OpenQueryTiles<Elem, Acc>(args, item, scale.sign, memory, tiles);
  for (int64_t block = some.begin / Products::kBlock * Products::kBlock; block < some.end; block += Products::kBlock) {
    const int64_t end = block + Products::kBlock < some.end ? block + Products::kBlock : some.end;
    LoadKeyBlock<Elem, Acc>(args, item, block, end, memory);
    for (int64_t t = 0; t < tile_count; ++t) {
      if (args.softcap > 0) {
        VisitBlock<Products, Acc, true>(args, tiles[t], scale, block, end, memory, memory.tile[t]);
      } else {
        VisitBlock<Products, Acc, false>(args, tiles[t], scale, block, end, memory, memory.tile[t]);
      }
    }
  }
  Products::Close();
  for (int64_t t = 0; t < tile_count; ++t) {
    StoreQueryTile<Elem>(args, item, tiles[t], memory.tile[t], memory.rows);
  }
}
