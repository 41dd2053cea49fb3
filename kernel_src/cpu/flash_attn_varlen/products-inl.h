// The matrix products of forward and backward, and the form in which they want their operands, for tiers that multiply
// in vector registers: everything is widened to Acc. products_matrix-inl.h is the same for the matrix unit.

template <class Elem, class Acc>
struct ForwardProducts {
  // Keys that are loaded together, those of them that are folded together, and whether these are visited from the first
  // one on even if no query sees it.
  static constexpr int64_t kBlock = kKeyBlock;
  static constexpr int64_t kKeysTogether = kBlock;
  static constexpr bool kWholeBlocks = false;
  // A column's running maximum advances when it would grow by more than this (in units of log2).
  static constexpr int kLag = 0;
  // Rows of probabilities that StoreProbabilities takes together.
  static constexpr int kRowsTogether = 1;
  // Columns that a product takes at a time, and rows that a step of Fold takes.
  static constexpr int64_t kColumnsTogether = kTileColumns;
  static constexpr int64_t kRowsAStep = kBlock;

  // Around all of a work item's products.
  static PACKFREE_INLINE void Open() {}
  static PACKFREE_INLINE void Close() {}

  // A block of keys [rows, K] and of values [rows, V] into scratch [kKeyBlock, PaddedDim].
  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const Elem* source, int64_t stride, Acc* keys) {
    LoadTile(rows, dim, source, stride, keys, PaddedDim(dim));
  }
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const Elem* source, int64_t stride, Acc* values,
                                         Acc* /*scratch*/) {
    LoadTile(rows, dim, source, stride, values, PaddedDim(dim));
  }
  // qt [K, kTileColumns] = sign * the queries' rows transposed. `rows` is scratch for the rows.
  static PACKFREE_INLINE void LoadQueries(const QueryTile<Acc>& tile, const HeadRows& source, int64_t bos,
                                          int64_t group, int64_t kv_head, int64_t dim, Acc sign, Acc* rows, Acc* qt) {
    LoadQueryTile<Elem>(tile, source, bos, group, kv_head, dim, sign, rows, qt);
  }

  // scores[key, query] = k[key] . q[query], keys counted from the block's row `first`
  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t columns, int64_t dim, const Acc* keys,
                                     const Acc* qt, Acc* scores) {
    MultiplyRows(rows, columns, dim, keys + first * PaddedDim(dim), PaddedDim(dim), qt, scores);
  }
  static PACKFREE_INLINE void StoreProbabilities(int64_t row, int64_t column, Vec<Acc> v, Vec<Acc> /*next*/,
                                                 Acc* scores) {
    Store(scores + row * kTileColumns + column, v);
  }
  // ot[:, query] += v[key] p[key, query]
  static PACKFREE_INLINE void AddValues(int64_t first, int64_t rows, int64_t columns, int64_t dim, const Acc* values,
                                        Acc* probabilities, Acc* ot) {
    Multiply<Into::kAdd>(dim, columns, rows, values + first * PaddedDim(dim), int64_t{1}, PaddedDim(dim), probabilities,
                         kTileColumns, ot, kTileColumns);
  }
};

template <class Elem, class Acc>
struct BackwardProducts {
  // Keys that are visited together, and whether a visit starts at a block's first key even if no query sees it.
  static constexpr int64_t kBlock = kKeyBlock;
  static constexpr bool kWholeBlocks = false;
  // Registers that StoreScores takes together.
  static constexpr int kRegistersTogether = 1;
  // Whether the gradients of one block's scores are made beside the products of the block before it.
  static constexpr bool kOverlaps = false;

  static PACKFREE_INLINE void Open() {}
  static PACKFREE_INLINE void Close() {}
  // Columns of a tile that the products over queries read.
  static PACKFREE_INLINE int64_t Columns(int64_t columns) { return columns; }

  // A range of keys [rows, K] and of values [rows, V].
  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const Elem* source, int64_t stride, Acc* keys,
                                       int64_t /*range_size*/, Acc* /*scratch*/) {
    LoadTile(rows, dim, source, stride, keys, PaddedDim(dim));
  }
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const Elem* source, int64_t stride, Acc* values,
                                         int64_t /*range_size*/) {
    LoadTile(rows, dim, source, stride, values, PaddedDim(dim));
  }
  // The rows of `source` behind each column of a tile, as they are and transposed (times `sign`). `copy` is scratch for
  // the rows.
  static PACKFREE_INLINE void LoadQueries(const QueryTile<Acc>& tile, const HeadRows& source, int64_t bos,
                                          int64_t group, int64_t kv_head, int64_t dim, Acc sign, Acc* /*copy*/,
                                          Acc* rows, Acc* transposed) {
    LoadQueryTile<Elem>(tile, source, bos, group, kv_head, dim, sign, rows, transposed);
  }
  // delta[c] = sum over d of doutt[d, c] * out[c, d], summed as Scores sums dout . v: a query whose output is one value
  // row then gets dP - delta = 0 exactly. `rows` has room for a tile's rows; `scratch` is a block of scores.
  static inline void Delta(const QueryTile<Acc>& tile, const HeadRows& out, int64_t bos, int64_t group, int64_t kv_head,
                           int64_t dim, const Acc* doutt, Acc* rows, Acc* scratch, Acc* delta) {
    constexpr int L = kLanes<Acc>;
    LoadQueryRows<Elem>(tile, out, bos, group, kv_head, dim, rows, PaddedDim(dim));
    for (int64_t c = 0; c < kTileColumns; ++c) delta[c] = Acc(0);
    for (int64_t d = 0; d < dim; d += kStretch) {
      const int64_t depth = dim - d < kStretch ? dim - d : kStretch;
      LoadTileTransposed(tile.columns, depth, rows + d, PaddedDim(dim), scratch, kTileColumns);
      for (int64_t c = 0; c < tile.columns; c += L) {
        Vec<Acc> sum = Zero<Acc>();
        for (int64_t i = 0; i < depth; ++i) {
          sum = MulAdd(Load<Acc>(scratch + i * kTileColumns + c), Load<Acc>(doutt + (d + i) * kTileColumns + c), sum);
        }
        Store(delta + c, d == 0 ? sum : Load<Acc>(delta + c) + sum);
      }
    }
  }

  // scores[key, query] = row `first` + key of `a` . column query of `bt`
  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t columns, int64_t dim, int64_t /*range_size*/,
                                     const Acc* a, const Acc* bt, Acc* scores) {
    MultiplyRows(rows, columns, dim, a + first * PaddedDim(dim), PaddedDim(dim), bt, scores);
  }
  // Where P Z or dS of a block of scores go, how ScoreGradients puts registers of them there, and what has to follow
  // the last row. Neighbouring blocks have different parities.
  static PACKFREE_INLINE Acc* Gradients(Acc* scores, int64_t /*parity*/) { return scores; }
  static PACKFREE_INLINE void StoreScores(int64_t row, int64_t column, Vec<Acc> v, Vec<Acc> /*next*/, Acc* target) {
    Store(target + row * kTileColumns + column, v);
  }
  static PACKFREE_INLINE void FinishScores(int64_t /*rows*/, Acc* /*target*/) {}
  // target[first + key, :] += sum over queries of scores[key, query] rows[query, :]: dv and dk
  template <class Work>
  static PACKFREE_INLINE void AddToKeys(int64_t first, int64_t rows, int64_t columns, int64_t dim, const Acc* scores,
                                        const Acc* query_rows, Acc* target, Work&& /*work*/) {
    Multiply<Into::kAdd>(rows, dim, columns, scores, kTileColumns, int64_t{1}, query_rows, PaddedDim(dim),
                         target + first * PaddedDim(dim), PaddedDim(dim));
  }
  // dqt[:, query] += sum over keys of k[first + key, :] dscores[key, query]. `copy` is scratch.
  template <class Work>
  static PACKFREE_INLINE void AddToQueries(int64_t first, int64_t rows, int64_t columns, int64_t dim,
                                           int64_t /*range_size*/, const Acc* keys, const Acc* dscores, Acc* /*copy*/,
                                           Acc* dqt, Work&& /*work*/) {
    Multiply<Into::kAdd>(dim, columns, rows, keys + first * PaddedDim(dim), int64_t{1}, PaddedDim(dim), dscores,
                         kTileColumns, dqt, kTileColumns);
  }
};
