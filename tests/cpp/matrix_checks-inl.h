// The checks of test_simd.cpp for the matrix unit's tier, included after matrix-inl.h.

float RandomFloat() { return std::ldexp(static_cast<float>(std::rand()) / RAND_MAX - 0.5f, std::rand() % 12 - 6); }

// A float is the exact sum of its parts; what is not finite stays so.
void CheckSplit(const char* tier) {
  for (int trial = 0; trial < 100000; ++trial) {
    const float x = std::ldexp(static_cast<float>(std::rand()) / RAND_MAX - 0.5f, std::rand() % 160 - 80);
    BitsVec parts[3];
    SplitFloats<false>(Set<float>(x), parts);
    float sum = 0;
    for (int p = 2; p >= 0; --p) sum += BitsToFloat(parts[p][0] & 0xffff0000u);
    Check(sum == x, tier, "SplitFloats", x);
  }
  BitsVec parts[3];
  SplitFloats<false>(Set<float>(std::numeric_limits<float>::infinity()), parts);
  Check(parts[0][0] == 0x7f800000u && parts[1][0] == 0 && parts[2][0] == 0, tier, "SplitFloats(inf)", 0);
  // A NaN whose payload lies in the lower half only.
  SplitFloats<false>(Set<float>(BitsToFloat(0x7f800001u)), parts);
  const float sum = BitsToFloat(parts[0][0]) + BitsToFloat(parts[1][0] & 0xffff0000u);
  Check(std::isnan(sum), tier, "SplitFloats(NaN)", sum);
}

// Products of floats by parts, at sizes around a tile: within the 2^-21 of |a| |b| that may be left out and an eps of
// rounding, and the same bits whatever the tile an element falls into. An average error is a tenth of that.
void CheckFloatProducts(const char* tier) {
  constexpr int64_t kColumns = kMatrixColumns, kMaxRows = 96, kMaxDepth = 128;
  std::vector<bf16> a_parts(3 * kMaxRows * kMaxDepth), b_parts(3 * kMaxDepth * kColumns);
  for (const int64_t rows : {1, 15, 16, 17, 33, 80}) {
    for (const int64_t depth : {32, 64, 128}) {
      std::vector<float> a(rows * depth), b(depth * kColumns), c(kMaxRows * kColumns, 1.0f), moved(kMaxRows * kColumns);
      for (float& x : a) x = RandomFloat();
      for (float& x : b) x = RandomFloat();
      CopyRows(rows, depth, a.data(), depth, a_parts.data(), depth, kMaxRows * kMaxDepth);
      for (int64_t k = 0; k < depth; k += 2) {
        for (int64_t j = 0; j < kColumns; j += kLanes<float>) {
          StorePairParts<3>(b_parts.data() + k * kColumns + 2 * j, kMaxDepth * kColumns,
                            Load<float>(b.data() + k * kColumns + j), Load<float>(b.data() + (k + 1) * kColumns + j));
        }
      }
      const MatrixOperand left{a_parts.data(), depth, kMaxRows * kMaxDepth};
      struct {
        void Step() {}
      } nothing;
      MultiplyMatrix<Into::kAdd, 3>(rows, depth, left, b_parts.data(), kMaxDepth * kColumns, c.data(), kColumns,
                                    kColumns, nothing);
      double squares = 0;
      for (int64_t i = 0; i < rows; ++i) {
        MatrixOperand one = left;
        one.data += i * depth;
        MultiplyMatrix<Into::kOverwrite, 3>(1, depth, one, b_parts.data(), kMaxDepth * kColumns, moved.data(), kColumns,
                                            kColumns, nothing);
        for (int64_t j = 0; j < kColumns; ++j) {
          double truth = 1, size = 1;
          for (int64_t k = 0; k < depth; ++k) {
            const double term = static_cast<double>(a[i * depth + k]) * b[k * kColumns + j];
            truth += term;
            size += std::fabs(term);
          }
          const float ours = c[i * kColumns + j];
          const double bound = std::ldexp(size, -21) + std::ldexp(size, -23);
          Check(std::fabs(ours - truth) <= bound, tier, "product by parts", (ours - truth) / size);
          squares += std::pow((ours - truth) / bound, 2);
          Check(1.0f + moved[j] == ours, tier, "product by parts in another tile", ours);
        }
      }
      const double average = std::sqrt(squares / (rows * kColumns));
      Check(average < 0.15, tier, "average product by parts", average);
    }
  }
}

void CheckMatrixUnit(const char* tier) {
  CheckSplit(tier);
  OpenMatrixUnit();
  CheckFloatProducts(tier);
  CloseMatrixUnit();
}
