// The matrix unit: products of bf16 tiles, summed in float. Included after vec-inl.h and tile-inl.h, in the tier amx.
//
// A product c += a b needs a by rows and b by pairs of rows:
//   a      bf16 [rows, depth]        row i at a + i * lda
//   pairs  bf16 [depth / 2, 64, 2]   element (k, j) at [k / 2, j, k % 2]
//   c      float [rows, ldc]
// rows is rounded up to 16, depth to 32: callers keep that much memory behind a and c, and zeros behind the last column
// of a and the last row of pairs (NaN times 0 is not 0). A row of pairs has room for kMatrixColumns columns.

constexpr int64_t kMatrixRows = 16;
constexpr int64_t kMatrixDepth = 32;
constexpr int64_t kMatrixColumns = 64;

PACKFREE_INLINE int64_t RoundUp(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Makes the compiler finish all stores: GCC's tile intrinsics do not tell it what memory they read.
PACKFREE_INLINE void FinishStores(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Gives the calling thread eight tiles of 16 rows of 64 bytes, until CloseMatrixUnit. (Not a class with a constructor:
// the members that a compiler makes for its users would lie outside the target pragma.)
PACKFREE_INLINE void OpenMatrixUnit() {
  alignas(64) uint8_t config[64] = {};
  config[0] = 1;  // palette
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;  // bytes of a row, 16 bits
    config[48 + tile] = 16;      // rows
  }
  FinishStores(config);
  _tile_loadconfig(config);
}
PACKFREE_INLINE void CloseMatrixUnit() { _tile_release(); }

// c[16 or 32 rows, 16 or 32 columns] = or += a b. Tiles 0-3 hold c, 4-5 a, 6-7 b.
template <Into kInto, bool kTwoRows, bool kTwoColumns>
inline void MultiplyMatrixTiles(int64_t depth, const bf16* a, int64_t lda, const bf16* pairs, float* c, int64_t ldc) {
  const int64_t a_bytes = lda * 2, b_bytes = kMatrixColumns * 4, c_bytes = ldc * 4;
  float* lower = c + kMatrixRows * ldc;
  FinishStores(pairs);
  if (kInto == Into::kOverwrite) {
    _tile_zero(0);
    if (kTwoColumns) _tile_zero(1);
    if (kTwoRows) _tile_zero(2);
    if (kTwoRows && kTwoColumns) _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_bytes);
    if (kTwoColumns) _tile_loadd(1, c + 16, c_bytes);
    if (kTwoRows) _tile_loadd(2, lower, c_bytes);
    if (kTwoRows && kTwoColumns) _tile_loadd(3, lower + 16, c_bytes);
  }
  for (int64_t k = 0; k < depth; k += kMatrixDepth) {
    const bf16* b = pairs + k * kMatrixColumns;
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if (kTwoColumns) {
      _tile_loadd(7, b + 32, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (kTwoRows) {
      _tile_loadd(5, a + kMatrixRows * lda + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if (kTwoColumns) _tile_stored(1, c + 16, c_bytes);
  if (kTwoRows) _tile_stored(2, lower, c_bytes);
  if (kTwoRows && kTwoColumns) _tile_stored(3, lower + 16, c_bytes);
}

template <Into kInto, bool kTwoColumns>
inline void MultiplyMatrixColumns(int64_t rows, int64_t depth, const bf16* a, int64_t lda, const bf16* pairs, float* c,
                                  int64_t ldc) {
  int64_t i = 0;
  for (; i + kMatrixRows < rows; i += 2 * kMatrixRows) {
    MultiplyMatrixTiles<kInto, true, kTwoColumns>(depth, a + i * lda, lda, pairs, c + i * ldc, ldc);
  }
  if (i < rows) MultiplyMatrixTiles<kInto, false, kTwoColumns>(depth, a + i * lda, lda, pairs, c + i * ldc, ldc);
}

// c[rows, 0:columns] = or += a b; columns are rounded up to 16. Every element sums over k in the same order, whatever
// tile it falls into.
template <Into kInto>
inline void MultiplyMatrix(int64_t rows, int64_t depth, const bf16* a, int64_t lda, const bf16* pairs, float* c,
                           int64_t ldc, int64_t columns = kMatrixColumns) {
  int64_t j = 0;
  for (; j + 16 < columns; j += 32) {
    MultiplyMatrixColumns<kInto, true>(rows, depth, a, lda, pairs + 2 * j, c + j, ldc);
  }
  if (j < columns) MultiplyMatrixColumns<kInto, false>(rows, depth, a, lda, pairs + 2 * j, c + j, ldc);
}

// target[r, 0:padded] = source[r, 0:columns] and zeros, for `rows` rows; bits are copied.
inline void CopyRows(int64_t rows, int64_t columns, const bf16* source, int64_t stride, bf16* target, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(target + r * padded, source + r * stride, columns * 2);
    __builtin_memset(target + r * padded + columns, 0, (padded - columns) * 2);
  }
}

// target[c, r] = source[r, c] for 32-bit elements, moved as bits. rows and columns are multiples of 16.
inline void TransposeWords(int64_t rows, int64_t columns, const uint32_t* source, int64_t lds, uint32_t* target,
                           int64_t ldt) {
  constexpr int L = kLanes<float>;
  for (int64_t r = 0; r < rows; r += L) {
    for (int64_t c = 0; c < columns; c += L) {
      Vec<float> block[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) __builtin_memcpy(&block[i], source + (r + i) * lds + c, sizeof(block[i]));
      TransposeRegisters<float>(block);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) __builtin_memcpy(target + (c + i) * ldt + r, &block[i], sizeof(block[i]));
    }
  }
}

// pairs[2 c] = both[c], pairs[2 c + 1] = both[16 + c]
PACKFREE_INLINE void StoreInterleaved(bf16* pairs, __m512i both) {
  typedef uint16_t Halves __attribute__((vector_size(64)));
  constexpr Halves kInterleave = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i packed = _mm512_maskz_permutexvar_epi16((__mmask32)-1, (__m512i)kInterleave, both);
  __builtin_memcpy(pairs, &packed, sizeof(packed));
}

// pairs[2 c] = bf16(even[c]), pairs[2 c + 1] = bf16(odd[c])
PACKFREE_INLINE void StorePair(bf16* pairs, Vec<float> even, Vec<float> odd) {
  StoreInterleaved(pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// pairs[r / 2, c, r % 2] = bf16(source[r, c]) for 64 columns; rows up to RoundUp(rows, kMatrixDepth) are 0.
inline void NarrowToPairs(int64_t rows, const float* source, int64_t ld, bf16* pairs) {
  constexpr int L = kLanes<float>;
  for (int64_t r = 0; r < RoundUp(rows, kMatrixDepth); r += 2) {
    for (int64_t c = 0; c < kMatrixColumns; c += L) {
      BitsVec packed = {};
      if (r < rows) packed = __builtin_convertvector(NarrowBf16(Load<float>(source + r * ld + c)), BitsVec);
      if (r + 1 < rows) {
        packed |= __builtin_convertvector(NarrowBf16(Load<float>(source + (r + 1) * ld + c)), BitsVec) << 16;
      }
      __builtin_memcpy(pairs + (r * kMatrixColumns + 2 * c), &packed, sizeof(packed));
    }
  }
}

// pairs[r / 2, c, r % 2] = source[r, c], bits, for columns [0, RoundUp(columns, 16)) of at most 64: a matrix by rows
// becomes one by pairs of rows. rows is even.
inline void PairRows(int64_t rows, int64_t columns, const bf16* source, int64_t lds, bf16* pairs) {
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = 0; c < columns; c += kLanes<float>) {
      HalfVec even, odd;
      __builtin_memcpy(&even, source + r * lds + c, sizeof(even));
      __builtin_memcpy(&odd, source + (r + 1) * lds + c, sizeof(odd));
      StoreInterleaved(pairs + (r * kMatrixColumns + 2 * c),
                       (__m512i)__builtin_shufflevector(even, odd, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                        16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30,
                                                        31));
    }
  }
}

// target[c, r] = source[r, c], bits: the transpose of a bf16 matrix of `rows` x `columns`, by pairs of rows. target has
// RoundUp(columns, 16) rows of ldt elements, and is 0 from column `rows` to RoundUp(rows, kMatrixDepth).
// `words` is scratch for RoundUp(rows, 32) / 2 x RoundUp(columns, 16) words.
inline void TransposeRows(int64_t rows, int64_t columns, const bf16* source, int64_t stride, bf16* target, int64_t ldt,
                          uint32_t* words) {
  const int64_t padded = RoundUp(columns, 16), depth = RoundUp(rows, kMatrixDepth);
  for (int64_t r = 0; r < depth; r += 2) {
    uint32_t* row = words + r / 2 * padded;
    for (int64_t c = 0; c < padded; c += kLanes<float>) {
      const int width = columns - c < kLanes<float> ? static_cast<int>(columns - c) : kLanes<float>;
      const __mmask16 mask = (__mmask16)((1u << width) - 1u);
      BitsVec packed = {};
      if (r < rows) {
        packed = __builtin_convertvector((HalfVec)_mm256_maskz_loadu_epi16(mask, source + r * stride + c), BitsVec);
      }
      if (r + 1 < rows) {
        packed |= __builtin_convertvector((HalfVec)_mm256_maskz_loadu_epi16(mask, source + (r + 1) * stride + c), BitsVec)
                  << 16;
      }
      __builtin_memcpy(row + c, &packed, sizeof(packed));
    }
  }
  TransposeWords(depth / 2, padded, words, padded, reinterpret_cast<uint32_t*>(target), ldt / 2);
}
