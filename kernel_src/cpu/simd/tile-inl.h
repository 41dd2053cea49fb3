// Small dense tiles in scratch memory: load, store, transpose, multiply. Included once per tier, after vec-inl.h.
//
// A tile is row-major in Acc. Its columns are padded: a row holds PadColumns<Acc>(columns) elements at least, and every
// function here works on whole registers, so it may read and write the padding. LoadTile sets it to 0.

// Columns rounded up to whole registers: the least leading dimension of a tile.
template <class Acc>
PACKFREE_INLINE int64_t PadColumns(int64_t columns) {
  return (columns + kLanes<Acc> - 1) / kLanes<Acc> * kLanes<Acc>;
}

// tile[r, c] = source[r, c] * scale for r < rows, c < columns; padding columns up to PadColumns(columns) are 0.
// `stride` is the distance of rows in elements; columns lie side by side.
template <class Acc, class Elem>
inline void LoadTile(int64_t rows, int64_t columns, const Elem* source, int64_t stride, Acc* tile, int64_t ld,
                     Acc scale = Acc(1)) {
  constexpr int L = kLanes<Acc>;
  const Vec<Acc> factor = Set<Acc>(scale);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    for (; c + L <= columns; c += L) Store(tile + r * ld + c, Load<Acc>(source + r * stride + c) * factor);
    if (c < columns) {
      Store(tile + r * ld + c, LoadN<Acc>(source + r * stride + c, static_cast<int>(columns - c)) * factor);
    }
  }
}

// target[r, c] = tile[r, c] * scale
template <class Acc, class Elem>
inline void StoreTile(int64_t rows, int64_t columns, const Acc* tile, int64_t ld, Elem* target, int64_t stride,
                      Acc scale = Acc(1)) {
  constexpr int L = kLanes<Acc>;
  const Vec<Acc> factor = Set<Acc>(scale);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    for (; c + L <= columns; c += L) Store(target + r * stride + c, Load<Acc>(tile + r * ld + c) * factor);
    if (c < columns) {
      StoreN(target + r * stride + c, Load<Acc>(tile + r * ld + c) * factor, static_cast<int>(columns - c));
    }
  }
}

// Sets rows x PadColumns(columns) elements to 0.
template <class Acc>
inline void ClearTile(int64_t rows, int64_t columns, Acc* tile, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes<Acc>) Store(tile + r * ld + c, Zero<Acc>());
  }
}

// Lane n of the result is lane I[n] of a and b, counted through both.
template <int... I, class V>
PACKFREE_INLINE V ShuffleLanes(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  using Lanes = decltype(a == b);
  return __builtin_shuffle(a, b, Lanes{I...});
#endif
}

// Lane i of the two rows that one butterfly step of a transpose makes from rows a and b, kStep apart.
template <int kStep, class V, int... I>
PACKFREE_INLINE V ButterflyLow(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int L = sizeof...(I);
  return ShuffleLanes<((I & kStep) ? L + I - kStep : I)...>(a, b);
}
template <int kStep, class V, int... I>
PACKFREE_INLINE V ButterflyHigh(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int L = sizeof...(I);
  return ShuffleLanes<((I & kStep) ? L + I : I + kStep)...>(a, b);
}
template <int kStep, class Acc>
PACKFREE_INLINE void TransposeStep(Vec<Acc>* rows) {
  constexpr int L = kLanes<Acc>;
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    if (i & kStep) continue;
    const Vec<Acc> a = rows[i], b = rows[i + kStep];
    rows[i] = ButterflyLow<kStep>(a, b, std::make_integer_sequence<int, L>());
    rows[i + kStep] = ButterflyHigh<kStep>(a, b, std::make_integer_sequence<int, L>());
  }
}
// Transposes kLanes rows of kLanes elements in registers.
template <class Acc>
PACKFREE_INLINE void TransposeRegisters(Vec<Acc>* rows) {
  TransposeStep<1, Acc>(rows);
  if constexpr (kLanes<Acc> > 2) TransposeStep<2, Acc>(rows);
  if constexpr (kLanes<Acc> > 4) TransposeStep<4, Acc>(rows);
  if constexpr (kLanes<Acc> > 8) TransposeStep<8, Acc>(rows);
}

// tile[c, r] = source[r, c] * scale for r < rows, c < columns: the transposed tile has `columns` rows of `rows`
// elements, padded with 0 up to PadColumns(rows).
template <class Acc, class Elem>
inline void LoadTileTransposed(int64_t rows, int64_t columns, const Elem* source, int64_t stride, Acc* tile, int64_t ld,
                               Acc scale = Acc(1)) {
  constexpr int L = kLanes<Acc>;
  const Vec<Acc> factor = Set<Acc>(scale);
  for (int64_t r = 0; r < rows; r += L) {
    const int present = rows - r < L ? static_cast<int>(rows - r) : L;
    for (int64_t c = 0; c < columns; c += L) {
      const int width = columns - c < L ? static_cast<int>(columns - c) : L;
      Vec<Acc> block[L];
      // A whole block stays in registers.
      if (present == L && width == L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) block[i] = Load<Acc>(source + (r + i) * stride + c) * factor;
        TransposeRegisters<Acc>(block);
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) Store(tile + (c + i) * ld + r, block[i]);
        continue;
      }
      for (int i = 0; i < L; ++i) block[i] = Zero<Acc>();
      for (int i = 0; i < present; ++i) {
        const Elem* p = source + (r + i) * stride + c;
        block[i] = (width == L ? Load<Acc>(p) : LoadN<Acc>(p, width)) * factor;
      }
      TransposeRegisters<Acc>(block);
      for (int i = 0; i < width; ++i) Store(tile + (c + i) * ld + r, block[i]);
    }
  }
}

// target[c, r] = tile[r, c] for r < rows, c < columns: column c of the tile becomes row c of the target. The tile's
// rows hold PadColumns(columns) elements; `stride` is the distance of the target's rows.
template <class Acc, class Elem>
inline void StoreTileTransposed(int64_t rows, int64_t columns, const Acc* tile, int64_t ld, Elem* target,
                                int64_t stride) {
  constexpr int L = kLanes<Acc>;
  for (int64_t r = 0; r < rows; r += L) {
    const int present = rows - r < L ? static_cast<int>(rows - r) : L;
    for (int64_t c = 0; c < columns; c += L) {
      const int width = columns - c < L ? static_cast<int>(columns - c) : L;
      Vec<Acc> block[L];
      for (int i = 0; i < L; ++i) block[i] = i < present ? Load<Acc>(tile + (r + i) * ld + c) : Zero<Acc>();
      TransposeRegisters<Acc>(block);
      for (int i = 0; i < width; ++i) StoreUpTo(target + (c + i) * stride + r, block[i], present);
    }
  }
}

// sums[r] = sum of the kLanes elements of row r, in ReduceSum's tree. `tile` [rows, kLanes] and `sums` have room for
// PadColumns(rows) rows; what stands in the tile's padding rows reaches the padding of `sums` only.
template <class Acc>
inline void SumLanes(int64_t rows, const Acc* tile, Acc* sums) {
  constexpr int L = kLanes<Acc>;
  for (int64_t r = 0; r < rows; r += L) {
    Vec<Acc> block[L];
    for (int i = 0; i < L; ++i) block[i] = Load<Acc>(tile + (r + i) * L);
    TransposeRegisters<Acc>(block);
    for (int half = L / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) block[i] = block[i] + block[i + half];
    }
    Store(sums + r, block[0]);
  }
}

// How Multiply treats what the target holds.
enum class Into { kOverwrite, kAdd, kSubtract };

// Register tile of Multiply: kRows x kRegisters accumulators. 24 + 4 of 32 registers on AVX-512, 12 + 2 of 16 on AVX2.
// On NEON 16 + 4 of 32: there a multiply-add takes its factor for a row from one more register, and each row has one.
#if PACKFREE_AVX512
constexpr int kTileRows = 6, kTileRegisters = 4;
#elif PACKFREE_NEON
constexpr int kTileRows = 4, kTileRegisters = 4;
#else
constexpr int kTileRows = 6, kTileRegisters = 2;
#endif

// c[0:kRows, 0:kRegisters*L] (op)= a b. a(i, k) lies at a[i * row_a + k * col_a]. Every element sums over k in rising
// order with one MulAdd a step, so its bits do not depend on which register tile it falls into. The product is summed
// from 0 and meets the target once, so a target that many products go into keeps the rounding of a blocked sum.
template <class Acc, Into kInto, int kRows, int kRegisters>
inline __attribute__((noinline)) void MultiplyRegisters(int64_t depth, const Acc* a, int64_t row_a, int64_t col_a,
                                                        const Acc* b, int64_t ldb, Acc* c, int64_t ldc) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> sum[kRows][kRegisters];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kRegisters; ++j) sum[i][j] = Zero<Acc>();
  for (int64_t k = 0; k < depth; ++k) {
    Vec<Acc> right[kRegisters];
#pragma GCC unroll 8
    for (int j = 0; j < kRegisters; ++j) right[j] = Load<Acc>(b + k * ldb + j * L);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec<Acc> left = Set<Acc>(a[i * row_a + k * col_a]);
#pragma GCC unroll 8
      for (int j = 0; j < kRegisters; ++j) sum[i][j] = MulAdd(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < kRegisters; ++j) {
      Acc* target = c + i * ldc + j * L;
      if constexpr (kInto == Into::kAdd) sum[i][j] = Load<Acc>(target) + sum[i][j];
      if constexpr (kInto == Into::kSubtract) sum[i][j] = Load<Acc>(target) - sum[i][j];
      Store(target, sum[i][j]);
    }
}

template <class Acc, Into kInto, int kRegisters>
inline void MultiplyColumns(int64_t rows, int64_t depth, const Acc* a, int64_t row_a, int64_t col_a, const Acc* b,
                            int64_t ldb, Acc* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + kTileRows <= rows; i += kTileRows) {
    MultiplyRegisters<Acc, kInto, kTileRows, kRegisters>(depth, a + i * row_a, row_a, col_a, b, ldb, c + i * ldc, ldc);
  }
  const Acc* rest_a = a + i * row_a;
  Acc* rest_c = c + i * ldc;
  switch (rows - i) {
    case 5:
      return MultiplyRegisters<Acc, kInto, 5, kRegisters>(depth, rest_a, row_a, col_a, b, ldb, rest_c, ldc);
    case 4:
      return MultiplyRegisters<Acc, kInto, 4, kRegisters>(depth, rest_a, row_a, col_a, b, ldb, rest_c, ldc);
    case 3:
      return MultiplyRegisters<Acc, kInto, 3, kRegisters>(depth, rest_a, row_a, col_a, b, ldb, rest_c, ldc);
    case 2:
      return MultiplyRegisters<Acc, kInto, 2, kRegisters>(depth, rest_a, row_a, col_a, b, ldb, rest_c, ldc);
    case 1:
      return MultiplyRegisters<Acc, kInto, 1, kRegisters>(depth, rest_a, row_a, col_a, b, ldb, rest_c, ldc);
    default:
      return;
  }
}

// c[rows, columns] = a b, or += or -=, for tiles a (any strides), b [depth, columns], c [rows, columns].
// a(i, k) lies at a[i * row_a + k * col_a]: (lda, 1) reads a as it is, (1, lda) transposed.
template <Into kInto, class Acc>
inline void Multiply(int64_t rows, int64_t columns, int64_t depth, const Acc* a, int64_t row_a, int64_t col_a,
                     const Acc* b, int64_t ldb, Acc* c, int64_t ldc) {
  constexpr int L = kLanes<Acc>;
  int64_t registers = (columns + L - 1) / L;
  for (; registers >= kTileRegisters; registers -= kTileRegisters) {
    MultiplyColumns<Acc, kInto, kTileRegisters>(rows, depth, a, row_a, col_a, b, ldb, c, ldc);
    b += kTileRegisters * L;
    c += kTileRegisters * L;
  }
  if constexpr (kTileRegisters > 2) {
    if (registers == 3) return MultiplyColumns<Acc, kInto, 3>(rows, depth, a, row_a, col_a, b, ldb, c, ldc);
    if (registers == 2) return MultiplyColumns<Acc, kInto, 2>(rows, depth, a, row_a, col_a, b, ldb, c, ldc);
  }
  if (registers == 1) MultiplyColumns<Acc, kInto, 1>(rows, depth, a, row_a, col_a, b, ldb, c, ldc);
}
