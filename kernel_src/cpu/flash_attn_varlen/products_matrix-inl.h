// The two matrix products of the forward on the matrix unit, for bf16: keys by rows, values transposed, queries and
// probabilities by pairs (see simd/matrix-inl.h). Probabilities are rounded to bf16, as values are; their sum is not.
// Each form takes at most the memory that the widened one would, so the scratch layout is the same.
template <class Elem, class Acc>
struct ForwardProducts {
  static_assert(std::is_same_v<Elem, bf16> && std::is_same_v<Acc, float>);
  // A value matrix by columns can only be read from an aligned key on.
  static constexpr bool kWholeBlocks = true;
  static_assert(kKeyBlock % kMatrixDepth == 0 && kTileColumns == kMatrixColumns);

  static PACKFREE_INLINE void Open() { OpenMatrixUnit(); }
  static PACKFREE_INLINE void Close() { CloseMatrixUnit(); }

  static PACKFREE_INLINE void LoadKeys(int64_t rows, int64_t dim, const bf16* source, int64_t stride, float* keys) {
    CopyRows(rows, dim, source, stride, reinterpret_cast<bf16*>(keys), RoundUp(dim, kMatrixDepth));
  }
  // values [V, kKeyBlock], 0 behind the last key. `scratch` has room for kKeyBlock x kTileColumns floats: the words of
  // 128 columns at a time.
  static PACKFREE_INLINE void LoadValues(int64_t rows, int64_t dim, const bf16* source, int64_t stride, float* values,
                                         float* scratch) {
    constexpr int64_t kColumns = 2 * kTileColumns;
    for (int64_t d = 0; d < dim; d += kColumns) {
      TransposeRows(rows, dim - d < kColumns ? dim - d : kColumns, source + d, stride,
                    reinterpret_cast<bf16*>(values) + d * kKeyBlock, kKeyBlock, reinterpret_cast<uint32_t*>(scratch));
    }
  }
  // In place: pairs of rows take half the memory of the rows, and row r is read before row r / 2 is written.
  static PACKFREE_INLINE void PrepareQueries(int64_t dim, float* qt) {
    NarrowToPairs(dim, qt, kTileColumns, reinterpret_cast<bf16*>(qt));
  }

  static PACKFREE_INLINE void Scores(int64_t /*first*/, int64_t rows, int64_t /*columns*/, int64_t dim,
                                     const float* keys, const float* qt, float* scores) {
    MultiplyMatrix<Into::kOverwrite>(rows, RoundUp(dim, kMatrixDepth), reinterpret_cast<const bf16*>(keys),
                                     RoundUp(dim, kMatrixDepth), reinterpret_cast<const bf16*>(qt), scores,
                                     kTileColumns);
  }
  static PACKFREE_INLINE void AddValues(int64_t /*first*/, int64_t rows, int64_t /*columns*/, int64_t dim,
                                        const float* values, float* probabilities, float* ot) {
    bf16* pairs = reinterpret_cast<bf16*>(probabilities);
    NarrowToPairs(rows, probabilities, kTileColumns, pairs);
    MultiplyMatrix<Into::kAdd>(dim, RoundUp(rows, kMatrixDepth), reinterpret_cast<const bf16*>(values), kKeyBlock,
                               pairs, ot, kTileColumns);
  }
};
