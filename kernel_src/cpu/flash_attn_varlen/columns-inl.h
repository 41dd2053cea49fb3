// What forward and backward share: the columns of a query tile, their key bounds, and dropout.
// A tile is held transposed, one query row a column, so that the softmax over keys runs down the rows of a score tile
// and every step of it is a plain vector operation.

// The columns of one query tile and what each of them sees.
template <class Acc>
struct QueryTile {
  using Int = typename VecTraits<Acc>::IntLane;
  int64_t first;      // row m of column 0
  int64_t columns;    // 1 .. kTileColumns
  KeySpan some;       // keys that at least one column sees
  KeySpan all;        // keys that every column sees; empty if begin >= end
  Int* key_begin;     // [kTileColumns] bounds of the keys each column sees
  Int* key_end;       // [kTileColumns]
  uint32_t* dropout;  // [2, kTileColumns] key of each column's dropout stream
};

// How a product q . k becomes a score in units of log2: outer * (sign * q . k), or with softcap
// outer * tanh(inner * (sign * q . k)). The sign is folded into q so that `outer` is positive and the running maximum
// can be taken of raw products; the scale itself stays out of q because there it would cost q a rounding.
template <class Acc>
struct ScoreScale {
  Acc sign;
  Acc inner;
  Acc outer;
};
template <class Acc>
PACKFREE_INLINE ScoreScale<Acc> ScaleOf(const AttentionArgs& args) {
  constexpr double kLog2e = 1.44269504088896340736;
  const double size = args.softmax_scale < 0 ? -args.softmax_scale : args.softmax_scale;
  const bool softcap = args.softcap > 0;
  // Above 0 even for a scale of 0, so that -infinity stays -infinity.
  const double outer = softcap ? args.softcap * kLog2e : size * kLog2e;
  return {args.softmax_scale < 0 ? Acc(-1) : Acc(1), softcap ? static_cast<Acc>(size / args.softcap) : Acc(0),
          static_cast<Acc>(outer < 1e-30 ? 1e-30 : outer)};
}

// A fixed bijection of 64 bits that scatters its input (the finaliser of splitmix64, Steele, Lea and Flood 2014).
PACKFREE_INLINE uint64_t Scatter64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Bounds of a tile's columns by visible_keys. Ends may rise and fall from one query to the next.
template <class Acc>
__attribute__((noinline)) void ListBounds(const AttentionArgs& args, int64_t sequence, QueryTile<Acc>* tile) {
  using Int = typename VecTraits<Acc>::IntLane;
  const int64_t group = args.H / args.HK, bos = args.queries.bos(sequence), key_length = args.keys.length(sequence);
  tile->some = {key_length, 0};
  tile->all = {0, key_length};
  for (int64_t c = 0; c < tile->columns; ++c) {
    const KeySpan span = ListedKeys(args, key_length, bos + (tile->first + c) / group);
    tile->key_begin[c] = static_cast<Int>(span.begin);
    tile->key_end[c] = static_cast<Int>(span.end);
    // A query that sees nothing, {0, 0}, leaves no key that all see, and adds none that some see.
    tile->all.begin = span.begin > tile->all.begin ? span.begin : tile->all.begin;
    tile->all.end = span.end < tile->all.end ? span.end : tile->all.end;
    if (span.begin == span.end) continue;
    tile->some.begin = span.begin < tile->some.begin ? span.begin : tile->some.begin;
    tile->some.end = span.end > tile->some.end ? span.end : tile->some.end;
  }
  if (tile->some.end == 0) tile->some = {0, 0};
}

// `info` has room for 4 * kTileColumns elements of Acc.
template <class Acc>
inline void DescribeTile(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t tile, Acc* info,
                         QueryTile<Acc>* out) {
  using Int = typename VecTraits<Acc>::IntLane;
  const int64_t group = args.H / args.HK;
  const int64_t query_length = args.queries.length(sequence), key_length = args.keys.length(sequence);
  const int64_t rows = query_length * group;
  out->first = tile * kTileColumns;
  out->columns = rows - out->first < kTileColumns ? rows - out->first : kTileColumns;
  out->key_begin = reinterpret_cast<Int*>(info);
  out->key_end = reinterpret_cast<Int*>(info + kTileColumns);
  out->dropout = reinterpret_cast<uint32_t*>(info + 2 * kTileColumns);
  const int64_t last = out->first + out->columns - 1;
  const KeySpan low = VisibleKeys(args, query_length, key_length, out->first / group);
  const KeySpan high = VisibleKeys(args, query_length, key_length, last / group);
  out->some = {low.begin, high.end};
  out->all = {high.begin, low.end};
  for (int64_t c = 0; c < kTileColumns; ++c) {
    const bool present = c < out->columns;
    const int64_t m = out->first + (present ? c : 0);
    const KeySpan span = VisibleKeys(args, query_length, key_length, m / group);
    out->key_begin[c] = static_cast<Int>(present ? span.begin : 0);
    out->key_end[c] = static_cast<Int>(present ? span.end : 0);
    if (args.dropout_p > 0) {
      // Scattered before the index is added: neighbouring seeds must not share streams.
      uint64_t key = Scatter64(Scatter64(args.dropout_seed) + static_cast<uint64_t>(sequence));
      key = Scatter64(key + static_cast<uint64_t>(kv_head * group + m % group));
      key = Scatter64(key + static_cast<uint64_t>(m / group));
      out->dropout[c] = static_cast<uint32_t>(key);
      out->dropout[kTileColumns + c] = static_cast<uint32_t>(key >> 32);
    }
  }
  if (args.visible_keys != nullptr) ListBounds(args, sequence, out);
}

// keep[c] = 1 / (1 - p) where (query of column c, key) survives dropout, else 0, for `count` columns.
template <class Acc>
PACKFREE_INLINE void DropoutKeep(const uint32_t* dropout, uint32_t key, uint32_t threshold, Acc scale, int count,
                                 Acc* keep) {
  for (int c = 0; c < count; ++c) {
    // Two rounds of multiply and shift (the finaliser of MurmurHash3), one before and one after the column's second
    // key.
    uint32_t x = key + dropout[c];
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    x = (x ^ (x >> 16)) ^ dropout[kTileColumns + c];
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    x ^= x >> 16;
    keep[c] = x >= threshold ? scale : Acc(0);
  }
}
inline uint32_t DropoutThreshold(double p) { return static_cast<uint32_t>(p * 4294967296.0); }

// v where the lane's column sees `key`, else `otherwise`.
template <class Acc>
PACKFREE_INLINE Vec<Acc> SelectVisible(const QueryTile<Acc>& tile, int64_t column, int64_t key, Vec<Acc> v,
                                       Vec<Acc> otherwise) {
  using Int = typename VecTraits<Acc>::IntLane;
  IntVec<Acc> begin, end;
  __builtin_memcpy(&begin, tile.key_begin + column, sizeof(begin));
  __builtin_memcpy(&end, tile.key_end + column, sizeof(end));
  const IntVec<Acc> j = IntVec<Acc>{} + static_cast<Int>(key);
  return Select((j >= begin) & (j < end), v, otherwise);
}

// Where lse and dlse of a tile's column lie; `bos` is the sequence's first token.
template <class Acc>
PACKFREE_INLINE int64_t LseIndex(const AttentionArgs& args, int64_t bos, int64_t kv_head, const QueryTile<Acc>& tile,
                                 int64_t column) {
  const int64_t group = args.H / args.HK, m = tile.first + column;
  return (kv_head * group + m % group) * args.queries.tokens + bos + m / group;
}

// Terms of a dot that are summed before they meet the sum of the others: long dots then round nearly like short ones.
// The scalar tier, which rounds twice a step, has less.
constexpr int64_t kStretch = PACKFREE_TIER == 0 ? 16 : 64;

// scores[r, c] = row r of `a` [rows, ld] . column c of `bt` [dim, kTileColumns]: the products of keys with queries and
// of values with output gradients.
template <class Acc>
inline void MultiplyRows(int64_t rows, int64_t columns, int64_t dim, const Acc* a, int64_t ld, const Acc* bt,
                         Acc* scores) {
  const int64_t first = dim < kStretch ? dim : kStretch;
  Multiply<Into::kOverwrite>(rows, columns, first, a, ld, int64_t{1}, bt, kTileColumns, scores, kTileColumns);
  for (int64_t d = kStretch; d < dim; d += kStretch) {
    const int64_t depth = dim - d < kStretch ? dim - d : kStretch;
    Multiply<Into::kAdd>(rows, columns, depth, a + d, ld, int64_t{1}, bt + d * kTileColumns, kTileColumns, scores,
                         kTileColumns);
  }
}

// For products that nothing goes on beside.
struct NoWork {
  PACKFREE_INLINE void Step() {}
};
