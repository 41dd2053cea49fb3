// The matrix products on the matrix unit, for bf16. Forward: keys by rows, values transposed, queries and
// probabilities by pairs (see simd/matrix-inl.h). Probabilities are rounded to bf16, as values are; their sum is not.

// target [columns, ld] = the transpose of source [rows, columns], 0 up to RoundUp(rows, 32). `scratch` has room for
// 128 x 64 words.
PACKFREE_INLINE void TransposeBlocks(int64_t rows, int64_t columns, const bf16* source, int64_t stride, bf16* target,
                                     int64_t ld, float* scratch) {
  constexpr int64_t kSide = 128;
  static_assert(kSide / 2 * kSide <= kKeyBlock * kTileColumns);
  for (int64_t r = 0; r < rows; r += kSide) {
    for (int64_t c = 0; c < columns; c += kSide) {
      TransposeRows(rows - r < kSide ? rows - r : kSide, columns - c < kSide ? columns - c : kSide,
                    source + r * stride + c, stride, target + c * ld + r, ld, reinterpret_cast<uint32_t*>(scratch));
    }
  }
}

template <class Elem, class Acc>
struct ForwardProducts {
  static_assert(std::is_same_v<Elem, bf16> && std::is_same_v<Acc, float>);
  // A value matrix by columns can only be read from an aligned key on.
  static constexpr bool kWholeBlocks = true;
  // Scores, tile and operands then nearly stay in the L1 cache.
  static constexpr int64_t kBlock = 2 * kKeyBlock;
  static constexpr int64_t kKeysTogether = 64;
  // Rescaling is dear beside the products of the unit. A lag costs lse some eps of float, which bf16 does not see.
  static constexpr int kLag = 8;
  static constexpr int kRowsTogether = 2;
  static_assert(kBlock % kKeysTogether == 0 && kKeysTogether % kMatrixDepth == 0 && kTileColumns == kMatrixColumns);

  static PACKFREE_INLINE void Open() { OpenMatrixUnit(); }
  static PACKFREE_INLINE void Close() { CloseMatrixUnit(); }

  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const bf16* source, int64_t stride, float* keys) {
    CopyRows(rows, dim, source, stride, reinterpret_cast<bf16*>(keys), RoundUp(dim, kMatrixDepth));
  }
  // values [V, kBlock], 0 behind the last key.
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const bf16* source, int64_t stride, float* values,
                                         float* scratch) {
    TransposeBlocks(rows, dim, source, stride, reinterpret_cast<bf16*>(values), kBlock, scratch);
  }
  // In place: pairs of rows take half the memory of the rows, and row r is read before row r / 2 is written.
  static PACKFREE_INLINE void PrepareQueries(int64_t dim, float* qt) {
    NarrowToPairs(dim, qt, kTileColumns, reinterpret_cast<bf16*>(qt));
  }

  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t columns, int64_t dim, const float* keys,
                                     const float* qt, float* scores) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    MultiplyMatrix<Into::kOverwrite>(rows, padded, reinterpret_cast<const bf16*>(keys) + first * padded, padded,
                                     reinterpret_cast<const bf16*>(qt), scores, kTileColumns, columns);
  }
  // In place: a pair of rows takes the memory of half of them, in the same columns.
  static PACKFREE_INLINE void StoreProbabilities(int64_t row, int64_t column, Vec<float> v, Vec<float> next,
                                                 float* scores) {
    StorePair(reinterpret_cast<bf16*>(scores) + row * kTileColumns + 2 * column, v, next);
  }
  static PACKFREE_INLINE void AddValues(int64_t first, int64_t rows, int64_t columns, int64_t dim, const float* values,
                                        float* probabilities, float* ot) {
    bf16* pairs = reinterpret_cast<bf16*>(probabilities);
    const int64_t depth = RoundUp(rows, kMatrixDepth), written = RoundUp(rows, 2);
    __builtin_memset(pairs + written * kTileColumns, 0, (depth - written) * kTileColumns * 2);
    MultiplyMatrix<Into::kAdd>(dim, depth, reinterpret_cast<const bf16*>(values) + first, kBlock, pairs, ot,
                               kTileColumns, columns);
  }
};

// target[c, :] = the row of `rows` behind each column of a tile, bits, with zeros behind the last column of each and
// behind the tile's last query up to kTileColumns.
PACKFREE_INLINE void CopyQueryRows(const QueryTile<float>& tile, const HeadRows& rows, int64_t bos, int64_t group,
                                   int64_t kv_head, int64_t dim, bf16* target, int64_t ld) {
  for (int64_t c = 0; c < tile.columns; ++c) {
    CopyRows(1, dim, TileRow<bf16>(rows, bos, group, kv_head, tile.first + c), 0, target + c * ld, ld);
  }
  __builtin_memset(target + tile.columns * ld, 0, (kTileColumns - tile.columns) * ld * 2);
}

// The five products of the backward. Operands, all bf16, with the offsets in floats at which they lie in their buffers
// (R = range, P = RoundUp(dim, 32)):
//   keys    [R, P] by rows, then from R P / 2 on [dim, R] transposed      values  [R, P] by rows
//   q_rows, dout_rows   by pairs of queries, one [32, 64, 2] for every 64 of dim
//   qt, doutt           by pairs of the dim [P / 2, 64, 2], then from 32 P on the rows [64, P] they were made of
//   scores, dscores     float [64, 64], then from 4096 on P Z or dS by rows [64, 64], then from 6144 on dS by pairs
// P Z and dS are rounded to bf16; dq, dk and dv are summed in float.
template <class Elem, class Acc>
struct BackwardProducts {
  static_assert(std::is_same_v<Elem, bf16> && std::is_same_v<Acc, float>);
  static constexpr int64_t kBlock = 64;
  static constexpr bool kWholeBlocks = true;
  static constexpr int64_t kRowsAt = kBlock * kTileColumns, kPairsAt = kRowsAt + kRowsAt / 2;
  static_assert(kKeyBlock == 2 * kBlock && kTileColumns == kMatrixColumns);

  static PACKFREE_INLINE void Open() { OpenMatrixUnit(); }
  static PACKFREE_INLINE void Close() { CloseMatrixUnit(); }
  static PACKFREE_INLINE int64_t Columns(int64_t columns) { return RoundUp(columns, kMatrixDepth); }

  static PACKFREE_INLINE bf16* At(float* buffer, int64_t offset = 0) {
    return reinterpret_cast<bf16*>(buffer + offset);
  }
  static PACKFREE_INLINE const bf16* At(const float* buffer, int64_t offset = 0) {
    return reinterpret_cast<const bf16*>(buffer + offset);
  }

  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const bf16* source, int64_t stride, float* keys,
                                       int64_t range_size, float* scratch) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    CopyRows(rows, dim, source, stride, At(keys), padded);
    TransposeBlocks(rows, dim, source, stride, At(keys, range_size * padded / 2), range_size, scratch);
  }
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const bf16* source, int64_t stride, float* values) {
    CopyRows(rows, dim, source, stride, At(values), RoundUp(dim, kMatrixDepth));
  }
  static inline void LoadQueries(const QueryTile<float>& tile, const HeadRows& source, int64_t bos, int64_t group,
                                 int64_t kv_head, int64_t dim, float sign, float* rows, float* transposed) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    bf16* copy = At(transposed, padded / 2 * kTileColumns);
    CopyQueryRows(tile, source, bos, group, kv_head, dim, copy, padded);
    for (int64_t d = 0; d < padded; d += kMatrixColumns) {
      PairRows(kTileColumns, padded - d < kMatrixColumns ? padded - d : kMatrixColumns, copy + d, padded,
               At(rows) + d * kTileColumns);
    }
    // A pair of the dim is a word of a row.
    uint32_t* words = reinterpret_cast<uint32_t*>(transposed);
    TransposeWords(kTileColumns, padded / 2, reinterpret_cast<const uint32_t*>(copy), padded / 2, words, kTileColumns);
    if (sign > 0) return;
    for (int64_t i = 0; i < padded / 2 * kTileColumns; ++i) words[i] ^= 0x80008000u;
  }
  // The diagonal of the product out dout^T.
  static inline void Delta(const QueryTile<float>& tile, const HeadRows& out, int64_t bos, int64_t group,
                           int64_t kv_head, int64_t dim, const float* doutt, float* rows, float* scratch,
                           float* delta) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    CopyQueryRows(tile, out, bos, group, kv_head, dim, At(rows), padded);
    for (int64_t c = 0; c < kTileColumns; c += 16) {
      MultiplyMatrix<Into::kOverwrite>(16, padded, At(rows) + c * padded, padded, At(doutt) + 2 * c, scratch, 16, 16);
      for (int64_t i = 0; i < 16; ++i) delta[c + i] = scratch[i * 17];
    }
  }

  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t columns, int64_t dim, const float* a,
                                     const float* bt, float* scores) {
    const int64_t padded = RoundUp(dim, kMatrixDepth);
    MultiplyMatrix<Into::kOverwrite>(rows, padded, At(a) + first * padded, padded, At(bt), scores, kTileColumns,
                                     columns);
  }
  static PACKFREE_INLINE void StoreScores(int64_t row, int64_t column, Vec<float> v, float* scores) {
    Store(At(scores, kRowsAt) + row * kTileColumns + column, v);
  }
  // Zeros behind the last key, for the products that round the number of keys up.
  static PACKFREE_INLINE void FinishScores(int64_t rows, float* scores) {
    __builtin_memset(At(scores, kRowsAt) + rows * kTileColumns, 0,
                     (RoundUp(rows, kMatrixDepth) - rows) * kTileColumns * 2);
  }
  static PACKFREE_INLINE void AddToKeys(int64_t first, int64_t rows, int64_t columns, int64_t dim, const float* scores,
                                        const float* query_rows, float* target) {
    for (int64_t d = 0; d < dim; d += kMatrixColumns) {
      MultiplyMatrix<Into::kAdd>(rows, columns, At(scores, kRowsAt), kTileColumns, At(query_rows) + d * kTileColumns,
                                 target + first * PaddedDim(dim) + d, PaddedDim(dim),
                                 dim - d < kMatrixColumns ? dim - d : kMatrixColumns);
    }
  }
  static PACKFREE_INLINE void AddToQueries(int64_t first, int64_t rows, int64_t columns, int64_t dim,
                                           int64_t range_size, const float* keys, float* dscores, float* dqt) {
    const int64_t depth = RoundUp(rows, kMatrixDepth);
    const bf16* transposed = At(keys, range_size * RoundUp(dim, kMatrixDepth) / 2);
    PairRows(depth, columns, At(dscores, kRowsAt), kTileColumns, At(dscores, kPairsAt));
    MultiplyMatrix<Into::kAdd>(dim, depth, transposed + first, range_size, At(dscores, kPairsAt), dqt, kTileColumns,
                               columns);
  }
};
