// The forms in which the matrix unit wants keys and queries, by parts of bf16. Included before products_matrix-inl.h.

template <class Elem>
constexpr int kParts = kMatrixParts<Elem>;

PACKFREE_INLINE bf16* Parts(float* buffer, int64_t offset = 0) { return reinterpret_cast<bf16*>(buffer + offset); }
PACKFREE_INLINE const bf16* Parts(const float* buffer, int64_t offset = 0) {
  return reinterpret_cast<const bf16*>(buffer + offset);
}

// Keys that lie side by side in a transposed matrix. With longer rows, a power of two apart, they would all fall into a
// few sets of the L1 cache.
constexpr int64_t kKeysOfRow = 64;

// Element of a part of a transposed matrix where key `first`, a multiple of kKeysOfRow, begins.
PACKFREE_INLINE int64_t TransposedAt(int64_t first, int64_t columns) { return first * RoundUp(columns, kMatrixRows); }

// target = the transpose of source [rows, columns]: [columns, kKeysOfRow] for every kKeysOfRow rows, 0 behind the last
// row up to a multiple of kMatrixDepth. `scratch` has room for 32 x 256 words.
PACKFREE_INLINE void TransposeBlocks(int64_t rows, int64_t columns, const bf16* source, int64_t stride, bf16* target,
                                     int64_t /*part*/, float* scratch) {
  constexpr int64_t kSide = 256;
  static_assert(kKeysOfRow / 2 * kSide <= kKeyBlock * kTileColumns);
  for (int64_t r = 0; r < rows; r += kKeysOfRow) {
    for (int64_t c = 0; c < columns; c += kSide) {
      TransposeRows(rows - r < kKeysOfRow ? rows - r : kKeysOfRow, columns - c < kSide ? columns - c : kSide,
                    source + r * stride + c, stride, target + TransposedAt(r, columns) + c * kKeysOfRow, kKeysOfRow,
                    reinterpret_cast<uint32_t*>(scratch));
    }
  }
}
PACKFREE_INLINE void TransposeBlocks(int64_t rows, int64_t columns, const float* source, int64_t stride, bf16* target,
                                     int64_t part, float* /*scratch*/) {
  for (int64_t r = 0; r < rows; r += kKeysOfRow) {
    TransposeRows(rows - r < kKeysOfRow ? rows - r : kKeysOfRow, columns, source + r * stride, stride,
                  target + TransposedAt(r, columns), kKeysOfRow, part);
  }
}

// The query rows of a tile, one behind each column; those from `columns` on are 0. Forms of them, by parts, with
// P = RoundUp(dim, 32) and zeros behind the last element of each row:
//   CopyQueryRows   target [kTileColumns, P]
//   PairDims        pairs [P / 2, kTileColumns, 2] = sign * the rows transposed, by pairs of the dim
//   PairQueries     pairs of queries c and c + 16, one [32, 64, 2] for every 64 of dim
// For bf16 the latter two are made of the first one, `copy`; floats go their own way, to be split only once for each.
template <class Elem>
PACKFREE_INLINE void CopyQueryRows(const Elem* const* source, int64_t columns, int64_t dim, bf16* target) {
  const int64_t padded = RoundUp(dim, kMatrixDepth), part = kTileColumns * padded;
  for (int64_t c = 0; c < columns; ++c) CopyRows(1, dim, source[c], 0, target + c * padded, padded, part);
  for (int p = 0; p < kParts<Elem>; ++p) {
    __builtin_memset(target + p * part + columns * padded, 0, (kTileColumns - columns) * padded * 2);
  }
}

inline void PairDims(const bf16* const* source, int64_t columns, int64_t dim, float sign, bf16* copy, bf16* pairs) {
  const int64_t padded = RoundUp(dim, kMatrixDepth);
  CopyQueryRows(source, columns, dim, copy);
  // A pair of the dim is a word of a row.
  uint32_t* words = reinterpret_cast<uint32_t*>(pairs);
  TransposeWords(kTileColumns, padded / 2, reinterpret_cast<const uint32_t*>(copy), padded / 2, words, kTileColumns);
  if (sign > 0) return;
  for (int64_t i = 0; i < padded / 2 * kTileColumns; ++i) words[i] ^= 0x80008000u;
}
inline void PairQueries(const bf16* const* /*source*/, int64_t /*columns*/, int64_t dim, const bf16* copy, bf16* pairs,
                        int64_t /*part*/) {
  const int64_t padded = RoundUp(dim, kMatrixDepth);
  for (int64_t d = 0; d < padded; d += kMatrixColumns) {
    PairRows(kTileColumns, padded - d < kMatrixColumns ? padded - d : kMatrixColumns, copy + d, padded,
             pairs + d * kTileColumns);
  }
}

// A register of query c from element d on.
PACKFREE_INLINE Vec<float> QueryElements(const float* const* source, int64_t columns, int64_t dim, int64_t c,
                                         int64_t d) {
  if (c >= columns || d >= dim) return Zero<float>();
  return LoadUpTo<float>(source[c] + d, dim - d < kLanes<float> ? static_cast<int>(dim - d) : kLanes<float>);
}
inline void PairDims(const float* const* source, int64_t columns, int64_t dim, float sign, bf16* /*copy*/,
                     bf16* pairs) {
  constexpr int L = kLanes<float>;
  const int64_t padded = RoundUp(dim, kMatrixDepth), part = padded * kTileColumns;
  for (int64_t c = 0; c < kTileColumns; c += L) {
    for (int64_t d = 0; d < padded; d += L) {
      Vec<float> block[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) block[i] = QueryElements(source, columns, dim, c + i, d) * sign;
      TransposeRegisters<float>(block);
#pragma GCC unroll 16
      for (int i = 0; i < L; i += 2) {
        StorePairParts<3>(pairs + (d + i) * kTileColumns + 2 * c, part, block[i], block[i + 1]);
      }
    }
  }
}
inline void PairQueries(const float* const* source, int64_t columns, int64_t dim, const bf16* /*copy*/, bf16* pairs,
                        int64_t part) {
  for (int64_t c = 0; c < kTileColumns; c += 32) {
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t d = 0; d < RoundUp(dim, kMatrixDepth); d += kLanes<float>) {
        bf16* target = pairs + (d - d % kMatrixColumns + c + 2 * i) * kMatrixColumns + 2 * (d % kMatrixColumns);
        StorePairParts<3>(target, part, QueryElements(source, columns, dim, c + i, d),
                          QueryElements(source, columns, dim, c + i + 16, d));
      }
    }
  }
}
