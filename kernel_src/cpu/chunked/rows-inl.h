// Rows of a chunk: load with or without L2 normalisation, scale, dot products. Included once per tier, after
// tile-inl.h.
// All tiles keep 0 in the padding of their rows (tile-inl.h), which lets these loops run over whole registers.

// Added to the sum of squares below the root, as the published models were trained with.
constexpr double kNormEpsilon = 1e-6;

// Sum of a[c] * b[c] over a padded row.
template <class Acc>
PACKFREE_INLINE Acc RowDot(int64_t columns, const Acc* a, const Acc* b) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> even = Zero<Acc>(), odd = Zero<Acc>();
  int64_t c = 0;
  for (; c + L < columns; c += 2 * L) {
    even = MulAdd(Load<Acc>(a + c), Load<Acc>(b + c), even);
    odd = MulAdd(Load<Acc>(a + c + L), Load<Acc>(b + c + L), odd);
  }
  if (c < columns) even = MulAdd(Load<Acc>(a + c), Load<Acc>(b + c), even);
  return ReduceSum<Acc>(even + odd);
}

// row *= factor
template <class Acc>
PACKFREE_INLINE void ScaleRow(int64_t columns, Acc factor, Acc* row) {
  for (int64_t c = 0; c < columns; c += kLanes<Acc>) Store(row + c, Load<Acc>(row + c) * factor);
}

// target += factor * row
template <class Acc>
PACKFREE_INLINE void AddScaledRow(int64_t columns, Acc factor, const Acc* row, Acc* target) {
  const Vec<Acc> scale = Set<Acc>(factor);
  for (int64_t c = 0; c < columns; c += kLanes<Acc>) {
    Store(target + c, MulAdd(scale, Load<Acc>(row + c), Load<Acc>(target + c)));
  }
}

// tile[r, :] = source[r, :] * scale, or with `normalize` source[r, :] * inverse_norm[r] * scale, where
// inverse_norm[r] = 1 / sqrt(|source[r, :]|^2 + epsilon). Without it inverse_norm is not written.
template <class Acc, class Elem>
inline void LoadRows(int64_t rows, int64_t columns, const Elem* source, int64_t stride, bool normalize, Acc scale,
                     Acc* tile, int64_t ld, Acc* inverse_norm) {
  LoadTile<Acc>(rows, columns, source, stride, tile, ld, normalize ? Acc(1) : scale);
  if (!normalize) return;
  for (int64_t r = 0; r < rows; ++r) {
    Acc* row = tile + r * ld;
    const Acc squares = RowDot<Acc>(columns, row, row) + static_cast<Acc>(kNormEpsilon);
    inverse_norm[r] = Acc(1) / static_cast<Acc>(__builtin_sqrt(squares));
    ScaleRow<Acc>(columns, inverse_norm[r] * scale, row);
  }
}

// Gradient of LoadRows. `tile` holds its result y, `gradient` dy; with x the source row and r its inverse norm
//   dx = r (scale dy - r x (y . dy)), and without normalisation dx = scale dy.
// Writes dx to target; `gradient` is used up.
template <class Acc, class Elem>
inline void StoreRowGradients(int64_t rows, int64_t columns, const Elem* source, int64_t source_stride, bool normalize,
                              Acc scale, const Acc* tile, int64_t ld, const Acc* inverse_norm, Acc* gradient,
                              Elem* target, int64_t target_stride) {
  constexpr int L = kLanes<Acc>;
  if (!normalize) return StoreTile<Acc>(rows, columns, gradient, ld, target, target_stride, scale);
  for (int64_t r = 0; r < rows; ++r) {
    Acc* dy = gradient + r * ld;
    const Acc inverse = inverse_norm[r];
    const Vec<Acc> along = Set<Acc>(-inverse * inverse * RowDot<Acc>(columns, tile + r * ld, dy));
    const Vec<Acc> across = Set<Acc>(inverse * scale);
    const Elem* x = source + r * source_stride;
    for (int64_t c = 0; c < columns; c += L) {
      const int width = columns - c < L ? static_cast<int>(columns - c) : L;
      const Vec<Acc> dx = MulAdd(along, LoadUpTo<Acc>(x + c, width), across * Load<Acc>(dy + c));
      StoreUpTo(target + r * target_stride + c, dx, width);
    }
  }
}

// Copies the strided column of c values to row[0 .. kChunk), 0 behind them.
template <class Acc>
inline void LoadColumn(int64_t c, const Acc* source, int64_t stride, Acc* row) {
  for (int64_t i = 0; i < kChunk; ++i) row[i] = i < c ? source[i * stride] : Acc(0);
}
