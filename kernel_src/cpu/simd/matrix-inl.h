// The matrix unit: products of bf16 tiles, summed in float. Included after vec-inl.h and tile-inl.h, in the tier amx.
//
// A product c += a b needs a by rows and b by pairs of rows:
//   a      bf16 [rows, depth]        row i at a + i * lda
//   pairs  bf16 [depth / 2, 64, 2]   element (k, j) at [k / 2, j, k % 2]
//   c      float [rows, ldc]
// rows is rounded up to 16, depth to 32: callers keep that much memory behind a and c, and zeros behind the last column
// of a and the last row of pairs (NaN times 0 is not 0). A row of pairs has room for kMatrixColumns columns.
//
// Matrices of floats are multiplied by parts: a float is the exact sum of three bf16 (24 bits of mantissa, 8 in each),
// and of the nine products of parts the six largest are summed. What is left out is at most 2^-21 of |a| |b| and some
// 2^-24 on average; what is rounded is less than in a chain of float multiply-adds. An operand then is three such
// matrices, `part` elements apart, largest first. The unit takes subnormal bf16 for 0, so floats below 2^-102 lose
// precision; an infinity may become NaN.

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

// Number of bf16 matrices that a matrix of Elem becomes.
template <class Elem>
constexpr int kMatrixParts = std::is_same_v<Elem, float> ? 3 : 1;

// An operand by rows: its rows `ld` elements apart, its parts `part`.
struct MatrixOperand {
  const bf16* data;
  int64_t ld;
  int64_t part;
};

// Verbs of the products below. Tiles 0-3 hold c [16 or 32 rows, 16 or 32 columns], 4-5 a, 6-7 b.
template <bool kTwoRows>
PACKFREE_INLINE void LoadMatrixRows(const bf16* a, int64_t lda) {
  _tile_loadd(4, a, lda * 2);
  if (kTwoRows) _tile_loadd(5, a + kMatrixRows * lda, lda * 2);
}
template <bool kTwoColumns>
PACKFREE_INLINE void LoadMatrixPairs(const bf16* pairs) {
  _tile_loadd(6, pairs, kMatrixColumns * 4);
  if (kTwoColumns) _tile_loadd(7, pairs + 32, kMatrixColumns * 4);
}
template <bool kTwoRows, bool kTwoColumns, class Work, class Sum>
PACKFREE_INLINE void AddMatrixTiles(Work& work, Sum& sum) {
  _tile_dpbf16ps(0, 4, 6);
  if (kTwoColumns) _tile_dpbf16ps(1, 4, 7);
  if (kTwoRows) _tile_dpbf16ps(2, 5, 6);
  if (kTwoRows && kTwoColumns) _tile_dpbf16ps(3, 5, 7);
  work.Step();
  sum.Step();
}

template <bool kTwoRows, bool kTwoColumns>
PACKFREE_INLINE void StoreMatrixTiles(float* c, int64_t ldc) {
  const int64_t c_bytes = ldc * 4;
  float* lower = c + kMatrixRows * ldc;
  _tile_stored(0, c, c_bytes);
  if (kTwoColumns) _tile_stored(1, c + 16, c_bytes);
  if (kTwoRows) _tile_stored(2, lower, c_bytes);
  if (kTwoRows && kTwoColumns) _tile_stored(3, lower + 16, c_bytes);
}

// Adds a tile's product to its target while the unit is busy with the next tile: a few registers between its products.
struct DeferredSum {
  alignas(64) float product[2 * kMatrixRows * 32];  // of the tile that was multiplied last
  float* target;                                    // what is not added yet goes there; null if all is
  int64_t ld;
  int rows, columns, row;

  PACKFREE_INLINE void Start() { target = nullptr; }
  // The next kRegisters registers, or all with kRegisters = 0.
  template <int kRegisters>
  PACKFREE_INLINE void Add() {
    constexpr int L = kLanes<float>;
    for (int done = 0; target != nullptr && (kRegisters == 0 || done < kRegisters); ++row) {
      float* sum = target + row * ld;
      const float* from = product + row * columns;
      for (int j = 0; j < columns; j += L, ++done) Store(sum + j, Load<float>(sum + j) + Load<float>(from + j));
      if (row + 1 == rows) target = nullptr;
    }
  }
  PACKFREE_INLINE void Step() { Add<4>(); }
  PACKFREE_INLINE void Finish() { Add<0>(); }
  // Takes the tile that has just been multiplied; what was there must be added.
  template <bool kTwoRows, bool kTwoColumns>
  PACKFREE_INLINE void Take(float* c, int64_t ldc) {
    rows = kTwoRows ? 32 : 16;
    columns = kTwoColumns ? 32 : 16;
    StoreMatrixTiles<kTwoRows, kTwoColumns>(product, columns);
    target = c;
    ld = ldc;
    row = 0;
  }
};
struct NoSum {
  PACKFREE_INLINE void Start() {}
  PACKFREE_INLINE void Step() {}
  PACKFREE_INLINE void Finish() {}
  template <bool kTwoRows, bool kTwoColumns>
  PACKFREE_INLINE void Take(float* c, int64_t ldc) {
    StoreMatrixTiles<kTwoRows, kTwoColumns>(c, ldc);
  }
};

// c[16 or 32 rows, 16 or 32 columns] = or += a b. The small products of parts come first. Floats are summed from 0 and
// meet the target once, by way of `sum`: with six products the target would be rounded six times as often.
template <Into kInto, int kParts, bool kTwoRows, bool kTwoColumns, class Work, class Sum>
inline void MultiplyMatrixTiles(int64_t depth, const MatrixOperand& a, const bf16* pairs, int64_t pairs_part, float* c,
                                int64_t ldc, Work& work, Sum& sum) {
  FinishStores(pairs);
  if (kInto == Into::kOverwrite || kParts > 1) {
    _tile_zero(0);
    if (kTwoColumns) _tile_zero(1);
    if (kTwoRows) _tile_zero(2);
    if (kTwoRows && kTwoColumns) _tile_zero(3);
  } else {
    const int64_t c_bytes = ldc * 4;
    const float* lower = c + kMatrixRows * ldc;
    _tile_loadd(0, c, c_bytes);
    if (kTwoColumns) _tile_loadd(1, c + 16, c_bytes);
    if (kTwoRows) _tile_loadd(2, lower, c_bytes);
    if (kTwoRows && kTwoColumns) _tile_loadd(3, lower + 16, c_bytes);
  }
  for (int64_t k = 0; k < depth; k += kMatrixDepth) {
    const bf16* rows = a.data + k;
    const bf16* b = pairs + k * kMatrixColumns;
    LoadMatrixRows<kTwoRows>(rows, a.ld);
    if constexpr (kParts == 3) {
      LoadMatrixPairs<kTwoColumns>(b + 2 * pairs_part);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
      LoadMatrixPairs<kTwoColumns>(b + pairs_part);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
      LoadMatrixRows<kTwoRows>(rows + a.part, a.ld);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
      LoadMatrixPairs<kTwoColumns>(b);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
      LoadMatrixRows<kTwoRows>(rows + 2 * a.part, a.ld);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
      LoadMatrixRows<kTwoRows>(rows, a.ld);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
    } else {
      LoadMatrixPairs<kTwoColumns>(b);
      AddMatrixTiles<kTwoRows, kTwoColumns>(work, sum);
    }
  }
  sum.Finish();
  sum.template Take<kTwoRows, kTwoColumns>(c, ldc);
}

template <Into kInto, int kParts, bool kTwoColumns, class Work, class Sum>
inline void MultiplyMatrixColumns(int64_t rows, int64_t depth, MatrixOperand a, const bf16* pairs, int64_t pairs_part,
                                  float* c, int64_t ldc, Work& work, Sum& sum) {
  int64_t i = 0;
  for (; i + kMatrixRows < rows; i += 2 * kMatrixRows) {
    MultiplyMatrixTiles<kInto, kParts, true, kTwoColumns>(depth, a, pairs, pairs_part, c + i * ldc, ldc, work, sum);
    a.data += 2 * kMatrixRows * a.ld;
  }
  if (i >= rows) return;
  MultiplyMatrixTiles<kInto, kParts, false, kTwoColumns>(depth, a, pairs, pairs_part, c + i * ldc, ldc, work, sum);
}

// c[rows, 0:columns] = or += a b; columns are rounded up to 16. Every element sums over k in the same order, whatever
// tile it falls into.
// work.Step(), a little work for the vector units, is called after every four products of tiles: these take the matrix
// unit 64 cycles, and a core looks only a few hundred instructions ahead, so the two units only overlap if they
// alternate. Sums of products are such work as well.
template <Into kInto, int kParts, class Work>
inline void MultiplyMatrix(int64_t rows, int64_t depth, const MatrixOperand& a, const bf16* pairs, int64_t pairs_part,
                           float* c, int64_t ldc, int64_t columns, Work&& work) {
  std::conditional_t<kInto == Into::kAdd && (kParts > 1), DeferredSum, NoSum> sum;
  sum.Start();
  int64_t j = 0;
  for (; j + 16 < columns; j += 32) {
    MultiplyMatrixColumns<kInto, kParts, true>(rows, depth, a, pairs + 2 * j, pairs_part, c + j, ldc, work, sum);
  }
  if (j < columns) {
    MultiplyMatrixColumns<kInto, kParts, false>(rows, depth, a, pairs + 2 * j, pairs_part, c + j, ldc, work, sum);
  }
  sum.Finish();
}

// x as the sum of bf16: each part stands in the upper halves of its words; the lower halves of the last are anything.
// Cutting off instead of rounding keeps every part finite and the sum exact. A NaN stays one: where its upper half
// looks like infinity, x minus that is NaN. Of an infinity nothing is left, unless kFinite says that a NaN does as
// well.
template <bool kFinite>
PACKFREE_INLINE void SplitFloats(Vec<float> x, BitsVec* parts) {
  constexpr uint32_t kUpper = 0xffff0000u;
  parts[0] = (BitsVec)x & kUpper;
  const Vec<float> high = (Vec<float>)parts[0];
  Vec<float> rest = x - high;
  if (!kFinite) rest = Select(x == high, Zero<float>(), rest);
  parts[1] = (BitsVec)rest & kUpper;
  parts[2] = (BitsVec)(rest - (Vec<float>)parts[1]);
}

// kParts rows, `part` elements apart, whose sum is v: v itself, rounded, if there is only one.
template <int kParts>
PACKFREE_INLINE void StoreRowParts(bf16* row, int64_t part, Vec<float> v) {
  if constexpr (kParts == 1) {
    Store(row, v);
  } else {
    BitsVec parts[kParts];
    SplitFloats<false>(v, parts);
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) {
      const HalfVec half = __builtin_convertvector(parts[p] >> 16, HalfVec);
      __builtin_memcpy(row + p * part, &half, sizeof(half));
    }
  }
}

// The rows of an operand: target[r, 0:padded] = source[r, 0:columns] and zeros, for `rows` rows, every part of them;
// padded is a multiple of 32.
inline void CopyRows(int64_t rows, int64_t columns, const bf16* source, int64_t stride, bf16* target, int64_t padded,
                     int64_t /*part*/) {
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memcpy(target + r * padded, source + r * stride, columns * 2);
    __builtin_memset(target + r * padded + columns, 0, (padded - columns) * 2);
  }
}
inline void CopyRows(int64_t rows, int64_t columns, const float* source, int64_t stride, bf16* target, int64_t padded,
                     int64_t part) {
  constexpr int L = kLanes<float>;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < padded; c += L) {
      const int width = columns - c >= L ? L : columns > c ? static_cast<int>(columns - c) : 0;
      StoreRowParts<3>(target + r * padded + c, part, LoadUpTo<float>(source + r * stride + c, width));
    }
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

// Words whose upper half is that of `odd` and whose lower half is the upper one of `even`; and both of the lower
// halves.
PACKFREE_INLINE BitsVec UpperHalves(BitsVec even, BitsVec odd) {
  typedef uint8_t Bytes __attribute__((vector_size(64)));
  constexpr Bytes kDown = {2,  3,  0,  0,  6, 7, 0,  0,  10, 11, 0, 0, 14, 15, 0, 0, 2,  3,  0,  0,  6, 7,
                           0,  0,  10, 11, 0, 0, 14, 15, 0,  0,  2, 3, 0,  0,  6, 7, 0,  0,  10, 11, 0, 0,
                           14, 15, 0,  0,  2, 3, 0,  0,  6,  7,  0, 0, 10, 11, 0, 0, 14, 15, 0,  0};
  return (BitsVec)_mm512_mask_shuffle_epi8((__m512i)odd, 0x3333333333333333u, (__m512i)even, (__m512i)kDown);
}
PACKFREE_INLINE BitsVec LowerHalves(BitsVec even, BitsVec odd) { return (even & 0xffffu) | (odd << 16); }

// kParts rows of pairs, `part` elements apart, whose sums are pairs[2 c] = even[c] and pairs[2 c + 1] = odd[c]; rounded
// if there is only one. An infinity becomes NaN if it is split.
template <int kParts>
PACKFREE_INLINE void StorePairParts(bf16* pairs, int64_t part, Vec<float> even, Vec<float> odd) {
  if constexpr (kParts == 1) {
    StoreInterleaved(pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
  } else {
    BitsVec low[kParts], high[kParts];
    SplitFloats<true>(even, low);
    SplitFloats<true>(odd, high);
#pragma GCC unroll 3
    for (int p = 0; p < kParts; ++p) {
      const BitsVec words = UpperHalves(low[p], high[p]);
      __builtin_memcpy(pairs + p * part, &words, sizeof(words));
    }
  }
}

// A matrix by rows becomes one by pairs of rows r and r + 16, which lie where those of r and r + 1 would: a permutation
// of the depth, which the other operand of a product has to share. rows and columns are multiples of 32.
inline void PairRows(int64_t rows, int64_t columns, const bf16* source, int64_t lds, bf16* pairs) {
  for (int64_t r = 0; r < rows; r += 32) {
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t c = 0; c < columns; c += kLanes<float>) {
        HalfVec even, odd;
        __builtin_memcpy(&even, source + (r + i) * lds + c, sizeof(even));
        __builtin_memcpy(&odd, source + (r + i + 16) * lds + c, sizeof(odd));
        StoreInterleaved(pairs + ((r + 2 * i) * kMatrixColumns + 2 * c),
                         _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)even), (__m256i)odd, 1));
      }
    }
  }
}

// The same permutation of columns, as StorePairParts makes it of v[c] and v[c + 16], undone: rows [rows, columns] whose
// words hold columns c and c + 16 become pairs of rows r and r + 1. rows is even, columns a multiple of 32.
inline void PairSplitRows(int64_t rows, int64_t columns, const bf16* source, int64_t lds, bf16* pairs) {
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = 0; c < columns; c += 2 * kLanes<float>) {
      BitsVec even, odd;
      __builtin_memcpy(&even, source + r * lds + c, sizeof(even));
      __builtin_memcpy(&odd, source + (r + 1) * lds + c, sizeof(odd));
      const BitsVec left = LowerHalves(even, odd), right = UpperHalves(even, odd);
      __builtin_memcpy(pairs + (r * kMatrixColumns + 2 * c), &left, sizeof(left));
      __builtin_memcpy(pairs + (r * kMatrixColumns + 2 * c) + 32, &right, sizeof(right));
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
        const HalfVec next = (HalfVec)_mm256_maskz_loadu_epi16(mask, source + (r + 1) * stride + c);
        packed |= __builtin_convertvector(next, BitsVec) << 16;
      }
      __builtin_memcpy(row + c, &packed, sizeof(packed));
    }
  }
  TransposeWords(depth / 2, padded, words, padded, reinterpret_cast<uint32_t*>(target), ldt / 2);
}

// The same of a float matrix, by parts; without scratch.
inline void TransposeRows(int64_t rows, int64_t columns, const float* source, int64_t stride, bf16* target, int64_t ldt,
                          int64_t part) {
  constexpr int L = kLanes<float>;
  for (int64_t r = 0; r < RoundUp(rows, kMatrixDepth); r += L) {
    for (int64_t c = 0; c < columns; c += L) {
      const int width = columns - c < L ? static_cast<int>(columns - c) : L;
      Vec<float> block[L];
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        block[i] = r + i < rows ? LoadUpTo<float>(source + (r + i) * stride + c, width) : Zero<float>();
      }
      TransposeRegisters<float>(block);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) StoreRowParts<3>(target + (c + i) * ldt + r, part, block[i]);
    }
  }
}
