// The two matrix products of the forward, and the form in which they want their operands, for tiers that multiply in
// vector registers: everything is widened to Acc. products_matrix-inl.h is the same for the matrix unit.
template <class Elem, class Acc>
struct ForwardProducts {
  // Keys of a block need not be visited from the block's first one on.
  static constexpr bool kWholeBlocks = false;

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
  // qt [K, kTileColumns] as it was loaded serves as it is.
  static PACKFREE_INLINE void PrepareQueries(int64_t /*dim*/, Acc* /*qt*/) {}

  // scores[key, query] = k[key] . q[query], keys counted from the block's row `first`
  static PACKFREE_INLINE void Scores(int64_t first, int64_t rows, int64_t columns, int64_t dim, const Acc* keys,
                                     const Acc* qt, Acc* scores) {
    MultiplyRows(rows, columns, dim, keys + first * PaddedDim(dim), PaddedDim(dim), qt, scores);
  }
  // ot[:, query] += v[key] p[key, query]
  static PACKFREE_INLINE void AddValues(int64_t first, int64_t rows, int64_t columns, int64_t dim, const Acc* values,
                                        Acc* probabilities, Acc* ot) {
    Multiply<Into::kAdd>(dim, columns, rows, values + first * PaddedDim(dim), int64_t{1}, PaddedDim(dim), probabilities,
                         kTileColumns, ot, kTileColumns);
  }
};
