// Products and solves with lower triangles of at most kChunk rows. Included once per tier, after tile-inl.h.
// A lower tile has 0 above its diagonal up to the next multiple of kTriangleBlock columns; what lies further right is
// neither read nor written.

// Columns of row r of a lower tile with `rows` rows that must be valid.
PACKFREE_INLINE int64_t TriangleWidth(int64_t r, int64_t rows) {
  const int64_t end = (r / kTriangleBlock + 1) * kTriangleBlock;
  return end < rows ? end : rows;
}

// target (op)= the lower part of a b: a [rows, depth], b [depth, rows].
template <Into kInto, class Acc>
inline void MultiplyToLower(int64_t rows, int64_t depth, const Acc* a, int64_t lda, const Acc* b, int64_t ldb,
                            Acc* target, int64_t ldt) {
  for (int64_t r = 0; r < rows; r += kTriangleBlock) {
    const int64_t end = TriangleWidth(r, rows);
    Multiply<kInto>(end - r, end, depth, a + r * lda, lda, 1, b, ldb, target + r * ldt, ldt);
  }
}

// target (op)= lower b: lower [rows, rows], b [rows, columns].
template <Into kInto, class Acc>
inline void MultiplyLower(int64_t rows, int64_t columns, const Acc* lower, int64_t ldl, const Acc* b, int64_t ldb,
                          Acc* target, int64_t ldt) {
  for (int64_t r = 0; r < rows; r += kTriangleBlock) {
    const int64_t end = TriangleWidth(r, rows);
    Multiply<kInto>(end - r, columns, end, lower + r * ldl, ldl, 1, b, ldb, target + r * ldt, ldt);
  }
}

// target (op)= lower^T b.
template <Into kInto, class Acc>
inline void MultiplyLowerTransposed(int64_t rows, int64_t columns, const Acc* lower, int64_t ldl, const Acc* b,
                                    int64_t ldb, Acc* target, int64_t ldt) {
  for (int64_t r = 0; r < rows; r += kTriangleBlock) {
    const int64_t end = TriangleWidth(r, rows);
    Multiply<kInto>(end - r, columns, rows - r, lower + r * ldl + r, 1, ldl, b + r * ldb, ldb, target + r * ldt, ldt);
  }
}

// x = (I + a)^-1 x for kRegisters registers of columns, by forward substitution: x_i -= sum over j < i of a_ij x_j.
template <class Acc, int kRegisters>
PACKFREE_INLINE void SubstituteColumns(int64_t rows, const Acc* a, int64_t row_a, int64_t col_a, Acc* x, int64_t ldx) {
  constexpr int L = kLanes<Acc>;
  for (int64_t i = 1; i < rows; ++i) {
    Vec<Acc> sum[kRegisters];
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) sum[m] = Load<Acc>(x + i * ldx + m * L);
    for (int64_t j = 0; j < i; ++j) {
      const Vec<Acc> left = Set<Acc>(-a[i * row_a + j * col_a]);
#pragma GCC unroll 8
      for (int m = 0; m < kRegisters; ++m) sum[m] = MulAdd(left, Load<Acc>(x + j * ldx + m * L), sum[m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) Store(x + i * ldx + m * L, sum[m]);
  }
}

// x = (I + a)^-1 x, x [rows, columns]. Of a only what lies below the diagonal is read; a(i, j) lies at
// a[i * row_a + j * col_a]. Rows go in blocks: what earlier blocks contribute is one product.
template <class Acc>
inline void SolveUnitLower(int64_t rows, int64_t columns, const Acc* a, int64_t row_a, int64_t col_a, Acc* x,
                           int64_t ldx) {
  constexpr int L = kLanes<Acc>;
  for (int64_t r = 0; r < rows; r += kTriangleBlock) {
    const int64_t count = TriangleWidth(r, rows) - r;
    if (r > 0) Multiply<Into::kSubtract>(count, columns, r, a + r * row_a, row_a, col_a, x, ldx, x + r * ldx, ldx);
    const Acc* corner = a + r * row_a + r * col_a;
    int64_t c = 0;
    for (; c + 8 * L <= columns; c += 8 * L) {
      SubstituteColumns<Acc, 8>(count, corner, row_a, col_a, x + r * ldx + c, ldx);
    }
    for (; c + 2 * L <= columns; c += 2 * L) {
      SubstituteColumns<Acc, 2>(count, corner, row_a, col_a, x + r * ldx + c, ldx);
    }
    for (; c < columns; c += L) SubstituteColumns<Acc, 1>(count, corner, row_a, col_a, x + r * ldx + c, ldx);
  }
}

// x = (I + a)^-T x for a row-major a. Read from its last row and column backwards, (I + a)^T is lower again.
template <class Acc>
inline void SolveUnitLowerTransposed(int64_t rows, int64_t columns, const Acc* a, int64_t lda, Acc* x, int64_t ldx) {
  const int64_t last = rows - 1;
  SolveUnitLower<Acc>(rows, columns, a + last * lda + last, -1, -lda, x + last * ldx, -ldx);
}
