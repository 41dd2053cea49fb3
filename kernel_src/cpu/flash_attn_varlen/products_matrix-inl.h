// The matrix products on the matrix unit (see simd/matrix-inl.h), for bf16 and, by three parts of each number, for
// float. Forward: keys by rows, values transposed, queries and probabilities by pairs. For bf16, probabilities are
// rounded as values are; their sum is not.

template <class Elem, class Acc>
struct ForwardProducts {
  static_assert(std::is_same_v<Acc, float>);
  static constexpr int kSplit = kParts<Elem>;
  // A value matrix by columns can only be read from an aligned key on.
  static constexpr bool kWholeBlocks = true;
  // Scores, tile and operands then nearly stay in the L1 cache.
  static constexpr int64_t kBlock = (kSplit == 1 ? 2 : 1) * kKeyBlock;
  static constexpr int64_t kKeysTogether = 64;
  // Rescaling is dear beside the products of the unit. A lag costs lse some eps of float, which bf16 does not see.
  static constexpr int kLag = kSplit == 1 ? 8 : 0;
  static constexpr int kRowsTogether = 2;
  // While the unit multiplies for one half of a tile's columns, the vector units fold the other, a few rows at a time.
  static constexpr int64_t kColumnsTogether = kTileColumns / 2;
  static constexpr int64_t kRowsAStep = kSplit == 1 ? 16 : 4;
  // Where probabilities lie behind the scores: one part fits in their place, because a pair of rows takes the memory of
  // half of them, in the same columns.
  static constexpr int64_t kPairsAt = kSplit == 1 ? 0 : kKeysTogether * kTileColumns;
  static constexpr int64_t kPairsPart = kKeysTogether * kTileColumns;
  static_assert(kBlock % kKeysTogether == 0 && kKeysTogether == kKeysOfRow && kTileColumns == kMatrixColumns);

  static PACKFREE_INLINE void Open() { OpenMatrixUnit(); }
  static PACKFREE_INLINE void Close() { CloseMatrixUnit(); }

  // keys [kBlock, P]
  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const Elem* source, int64_t stride, float* keys) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    CopyRows(rows, dim, source, stride, Parts(keys), padded, kBlock * padded);
  }
  // values transposed, 0 behind the last key.
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const Elem* source, int64_t stride, float* values,
                                         float* scratch) {
    TransposeBlocks(rows, dim, source, stride, Parts(values), TransposedAt(kBlock, dim), scratch);
  }
  static PACKFREE_INLINE void LoadQueries(const QueryTile<float>& tile, const HeadRows& source, int64_t bos,
                                          int64_t group, int64_t kv_head, int64_t dim, float sign, float* rows,
                                          float* qt) {
    const Elem* from[kTileColumns];
    TileRows(tile, source, bos, group, kv_head, from);
    PairDims(from, tile.columns, dim, sign, Parts(rows), Parts(qt));
  }

  template <class Work>
  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t column, int64_t columns, int64_t dim,
                                     const float* keys, const float* qt, float* scores, Work&& work) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    MultiplyMatrix<Into::kOverwrite, kSplit>(rows, padded, {Parts(keys) + first * padded, padded, kBlock * padded},
                                             Parts(qt) + 2 * column, padded * kTileColumns, scores + column,
                                             kTileColumns, columns, work);
  }
  static PACKFREE_INLINE void StoreProbabilities(int64_t row, int64_t column, Vec<float> v, Vec<float> next,
                                                 float* scores) {
    StorePairParts<kSplit>(Parts(scores, kPairsAt) + row * kTileColumns + 2 * column, kPairsPart, v, next);
  }
  template <class Work>
  static PACKFREE_INLINE void AddValues(int64_t first, int64_t rows, int64_t column, int64_t columns, int64_t dim,
                                        const float* values, float* probabilities, float* ot, Work&& work) {
    bf16* pairs = Parts(probabilities, kPairsAt);
    const int64_t depth = RoundUp(rows, kMatrixDepth), written = RoundUp(rows, 2);
    // In these columns only: those of the other half may still hold scores.
    for (int p = 0; p < kSplit; ++p) {
      for (int64_t r = written; r < depth; r += 2) {
        __builtin_memset(pairs + p * kPairsPart + r * kTileColumns + 2 * column, 0, columns * 4);
      }
    }
    const MatrixOperand left{Parts(values) + TransposedAt(first, dim), kKeysOfRow, TransposedAt(kBlock, dim)};
    MultiplyMatrix<Into::kAdd, kSplit>(dim, depth, left, pairs + 2 * column, kPairsPart, ot + column, kTileColumns,
                                       columns, work);
  }
};

// The five products of the backward. Operands, all bf16 and by parts (R = range, P = RoundUp(dim, 32)):
//   keys    [R, P] by rows, then all parts transposed      values  [R, P] by rows
//   q_rows, dout_rows   by pairs of queries c and c + 16, one [32, 64, 2] for every 64 of dim
//   qt, doutt           by pairs of the dim [P / 2, 64, 2]
//   scores, dscores     float [64, 64], then P Z or dS, of two blocks, by rows [64, 64] with queries c and c + 16 side
//                       by side
//   copy                dS by pairs
// For bf16, P Z and dS are rounded to bf16; dq, dk and dv are summed in float.
template <class Elem, class Acc>
struct BackwardProducts {
  static_assert(std::is_same_v<Acc, float>);
  static constexpr int kSplit = kParts<Elem>;
  static constexpr int64_t kBlock = kKeysOfRow;
  static constexpr bool kWholeBlocks = true;
  static constexpr int kRegistersTogether = 2;
  static constexpr bool kOverlaps = true;
  static constexpr int64_t kRowsAStep = kSplit == 1 ? 4 : 1;
  // Elements of a part of a block of scores, and floats of all of them.
  static constexpr int64_t kScoresPart = kBlock * kTileColumns, kGradients = kSplit * kScoresPart / 2;
  static_assert(kScoresPart + 2 * kGradients <= 2 * kKeyBlock * kTileColumns && kTileColumns == kMatrixColumns);

  static PACKFREE_INLINE void Open() { OpenMatrixUnit(); }
  static PACKFREE_INLINE void Close() { CloseMatrixUnit(); }
  static PACKFREE_INLINE int64_t Columns(int64_t columns) { return RoundUp(columns, kMatrixDepth); }
  static PACKFREE_INLINE int64_t QueryPart(int64_t dim) { return RoundUp(dim, kMatrixColumns) * kTileColumns; }

  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const Elem* source, int64_t stride, float* keys,
                                       int64_t range_size, float* scratch) {
    const int64_t padded = RoundUp(dim, kMatrixDepth), part = range_size * padded;
    CopyRows(rows, dim, source, stride, Parts(keys), padded, part);
    TransposeBlocks(rows, dim, source, stride, Parts(keys) + kSplit * part, part, scratch);
  }
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const Elem* source, int64_t stride, float* values,
                                         int64_t range_size) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    CopyRows(rows, dim, source, stride, Parts(values), padded, range_size * padded);
  }
  static inline void LoadQueries(const QueryTile<float>& tile, const HeadRows& source, int64_t bos, int64_t group,
                                 int64_t kv_head, int64_t dim, float sign, float* copy, float* rows,
                                 float* transposed) {
    const Elem* from[kTileColumns];
    TileRows(tile, source, bos, group, kv_head, from);
    PairDims(from, tile.columns, dim, sign, Parts(copy), Parts(transposed));
    PairQueries(from, tile.columns, dim, Parts(copy), Parts(rows), QueryPart(dim));
  }
  // The diagonal of the product out dout^T.
  static inline void Delta(const QueryTile<float>& tile, const HeadRows& out, int64_t bos, int64_t group,
                           int64_t kv_head, int64_t dim, const float* doutt, float* rows, float* scratch,
                           float* delta) {
    const int64_t padded = RoundUp(dim, kMatrixDepth), part = padded * kTileColumns;
    const Elem* from[kTileColumns];
    TileRows(tile, out, bos, group, kv_head, from);
    CopyQueryRows(from, tile.columns, dim, Parts(rows));
    for (int64_t c = 0; c < kTileColumns; c += 32) {
      MultiplyMatrix<Into::kOverwrite, kSplit>(32, padded, {Parts(rows) + c * padded, padded, part},
                                               Parts(doutt) + 2 * c, part, scratch, 32, 32, NoWork());
      for (int64_t i = 0; i < 32; ++i) delta[c + i] = scratch[i * 33];
    }
  }

  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t columns, int64_t dim, int64_t range_size,
                                     const float* a, const float* bt, float* scores) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    MultiplyMatrix<Into::kOverwrite, kSplit>(rows, padded, {Parts(a) + first * padded, padded, range_size * padded},
                                             Parts(bt), padded * kTileColumns, scores, kTileColumns, columns, NoWork());
  }
  static PACKFREE_INLINE float* Gradients(float* scores, int64_t parity) {
    return scores + kScoresPart + parity * kGradients;
  }
  static PACKFREE_INLINE void StoreScores(int64_t row, int64_t column, Vec<float> v, Vec<float> next, float* target) {
    StorePairParts<kSplit>(Parts(target) + row * kTileColumns + column, kScoresPart, v, next);
  }
  // Zeros behind the last key, for the products that round the number of keys up.
  static PACKFREE_INLINE void FinishScores(int64_t rows, float* target) {
    for (int p = 0; p < kSplit; ++p) {
      __builtin_memset(Parts(target) + p * kScoresPart + rows * kTileColumns, 0,
                       (RoundUp(rows, kMatrixDepth) - rows) * kTileColumns * 2);
    }
  }
  template <class Work>
  static PACKFREE_INLINE void AddToKeys(int64_t first, int64_t rows, int64_t columns, int64_t dim, const float* scores,
                                        const float* query_rows, float* target, Work&& work) {
    for (int64_t d = 0; d < dim; d += kMatrixColumns) {
      MultiplyMatrix<Into::kAdd, kSplit>(rows, columns, {Parts(scores), kTileColumns, kScoresPart},
                                         Parts(query_rows) + d * kTileColumns, QueryPart(dim),
                                         target + first * PaddedDim(dim) + d, PaddedDim(dim),
                                         dim - d < kMatrixColumns ? dim - d : kMatrixColumns, work);
    }
  }
  // A tile has room in `copy` for the pairs: at least 64 rows of 64 elements.
  template <class Work>
  static PACKFREE_INLINE void AddToQueries(int64_t first, int64_t rows, int64_t columns, int64_t dim,
                                           int64_t range_size, const float* keys, const float* dscores, float* copy,
                                           float* dqt, Work&& work) {
    const int64_t depth = RoundUp(rows, kMatrixDepth), part = range_size * RoundUp(dim, kMatrixDepth);
    bf16* pairs = Parts(copy);
    for (int p = 0; p < kSplit; ++p) {
      PairSplitRows(depth, columns, Parts(dscores) + p * kScoresPart, kTileColumns, pairs + p * kScoresPart);
    }
    const MatrixOperand left{Parts(keys) + kSplit * part + TransposedAt(first, dim), kKeysOfRow, part};
    MultiplyMatrix<Into::kAdd, kSplit>(dim, depth, left, pairs, kScoresPart, dqt, kTileColumns, columns, work);
  }
};
