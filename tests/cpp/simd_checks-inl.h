// The checks of test_simd.cpp, included once per tier.

template <class Acc>
double RelativeError(Acc ours, double truth) {
  return std::fabs(static_cast<double>(ours) - truth) / std::fmax(std::fabs(truth), 1e-300);
}

template <class Acc>
void CheckMath(const char* tier) {
  const double eps = std::numeric_limits<Acc>::epsilon();
  const Acc inf = std::numeric_limits<Acc>::infinity(), nan = std::numeric_limits<Acc>::quiet_NaN();
  double exp_error = 0, tanh_error = 0, sigmoid_error = 0, log_error = 0, exp2_error = 0, softplus_error = 0;
  for (double step = -80; step < 80; step += 0.0137) {
    const Acc x = static_cast<Acc>(step), small = static_cast<Acc>(step / 20);
    exp_error = std::fmax(exp_error, RelativeError(Exp<Acc>(Set<Acc>(x))[0], std::exp(double(x))));
    tanh_error = std::fmax(tanh_error, RelativeError(Tanh<Acc>(Set<Acc>(small))[0], std::tanh(double(small))));
    sigmoid_error = std::fmax(sigmoid_error, RelativeError(SigmoidOne<Acc>(x), 1 / (1 + std::exp(-double(x)))));
    exp2_error = std::fmax(exp2_error, RelativeError(Exp2Any<Acc>(Set<Acc>(x))[0], std::exp2(double(x))));
    const double softplus = x > 20 ? double(x) : std::log1p(std::exp(double(x)));
    softplus_error = std::fmax(softplus_error, RelativeError(Softplus<Acc>(Set<Acc>(x))[0], softplus));
    // Near 1 the logarithm is small, so its error is measured against 1.
    if (x > 0)
      log_error =
          std::fmax(log_error, std::fabs(LogOne<Acc>(x) - std::log(double(x))) / (1 + std::fabs(std::log(double(x)))));
  }
  Check(exp_error < 2 * eps, tier, "Exp", exp_error / eps);
  Check(tanh_error < 8 * eps, tier, "Tanh", tanh_error / eps);
  Check(sigmoid_error < 3 * eps, tier, "Sigmoid", sigmoid_error / eps);
  Check(log_error < 2 * eps, tier, "Log", log_error / eps);
  Check(exp2_error < 2 * eps, tier, "Exp2Any", exp2_error / eps);
  Check(softplus_error < 4 * eps, tier, "Softplus", softplus_error / eps);
  const Acc largest = Acc(sizeof(Acc) == 4 ? 128 : 1024);
  Check(Exp2Any<Acc>(Set<Acc>(-inf))[0] == 0, tier, "Exp2Any(-inf)", Exp2Any<Acc>(Set<Acc>(-inf))[0]);
  Check(Exp2Any<Acc>(Set<Acc>(-2 * largest))[0] == 0, tier, "Exp2Any(low)", Exp2Any<Acc>(Set<Acc>(-2 * largest))[0]);
  Check(Exp2Any<Acc>(Set<Acc>(largest))[0] == inf, tier, "Exp2Any(high)", Exp2Any<Acc>(Set<Acc>(largest))[0]);
  Check(Exp2Any<Acc>(Set<Acc>(9 * largest))[0] == inf, tier, "Exp2Any(higher)", Exp2Any<Acc>(Set<Acc>(9 * largest))[0]);
  Check(std::isnan(Exp2Any<Acc>(Set<Acc>(nan))[0]), tier, "Exp2Any(nan)", Exp2Any<Acc>(Set<Acc>(nan))[0]);
  Check(Exp2Any<Acc>(Set<Acc>(0))[0] == 1, tier, "Exp2Any(0)", Exp2Any<Acc>(Set<Acc>(0))[0]);
  Check(Softplus<Acc>(Set<Acc>(-inf))[0] == 0, tier, "Softplus(-inf)", Softplus<Acc>(Set<Acc>(-inf))[0]);
  Check(Softplus<Acc>(Set<Acc>(inf))[0] == inf, tier, "Softplus(inf)", Softplus<Acc>(Set<Acc>(inf))[0]);
  Check(std::isnan(Softplus<Acc>(Set<Acc>(nan))[0]), tier, "Softplus(nan)", Softplus<Acc>(Set<Acc>(nan))[0]);
  Check(ExpOne<Acc>(-inf) == 0, tier, "Exp(-inf)", ExpOne<Acc>(-inf));
  Check(ExpOne<Acc>(inf) == inf, tier, "Exp(inf)", ExpOne<Acc>(inf));
  Check(std::isnan(ExpOne<Acc>(nan)), tier, "Exp(nan)", ExpOne<Acc>(nan));
  Check(ExpOne<Acc>(0) == 1, tier, "Exp(0)", ExpOne<Acc>(0));
  Check(LogOne<Acc>(0) == -inf, tier, "Log(0)", LogOne<Acc>(0));
  Check(LogOne<Acc>(1) == 0, tier, "Log(1)", LogOne<Acc>(1));
  Check(std::isnan(LogOne<Acc>(-1)), tier, "Log(-1)", LogOne<Acc>(-1));
}

// Every bf16 and fp16 value survives widening and narrowing; floats between two of them round to the nearest.
void CheckHalves(const char* tier) {
  constexpr int L = kLanes<float>;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    bf16 b[L], b_back[L];
    fp16 h[L], h_back[L];
    for (int i = 0; i < L; ++i) b[i].bits = h[i].bits = static_cast<uint16_t>(bits);
    const Vec<float> wide_b = Load<float>(b), wide_h = Load<float>(h);
    Store(b_back, wide_b);
    Store(h_back, wide_h);
    const bool b_nan = (bits & 0x7fffu) > 0x7f80u, h_nan = (bits & 0x7fffu) > 0x7c00u;
#if PACKFREE_BF16 && PACKFREE_AVX512
    const bool b_flushed = (bits & 0x7f80u) == 0;  // subnormal
#else
    const bool b_flushed = false;
#endif
    if (b_nan) {
      Check(std::isnan(wide_b[0]) && (b_back[0].bits & 0x7fffu) > 0x7f80u, tier, "bf16 NaN", bits);
    } else if (!b_flushed) {
      Check(b_back[0].bits == bits && b_back[L - 1].bits == bits, tier, "bf16 round trip", bits);
    }
    if (h_nan) {
      Check(std::isnan(wide_h[0]) && (h_back[0].bits & 0x7fffu) > 0x7c00u, tier, "fp16 NaN", bits);
    } else {
      Check(h_back[0].bits == bits && Rounder<fp16>::From(ToFloat(h[0])).bits == bits, tier, "fp16 round trip", bits);
      Check(FloatToBits(ToFloat(h[0])) == FloatToBits(wide_h[0]), tier, "fp16 widening of one", bits);
    }
  }
  std::srand(1);
  for (int trial = 0; trial < 100000; ++trial) {
    const float x = std::ldexp(static_cast<float>(std::rand()) / RAND_MAX - 0.5f, std::rand() % 40 - 20);
    bf16 b[L];
    fp16 h[L];
    Store(b, Set<float>(x));
    Store(h, Set<float>(x));
    Check(b[0].bits == Rounder<bf16>::From(x).bits, tier, "bf16 rounding", x);
    Check(h[0].bits == Rounder<fp16>::From(x).bits, tier, "fp16 rounding", x);
    Check(std::fabs(ToFloat(b[0]) - x) <= std::ldexp(std::fabs(x), -8), tier, "bf16 distance", x);
  }
}

// Lanes that are not named are 0 and are neither read nor written.
template <class Acc>
void CheckPartial(const char* tier) {
  constexpr int L = kLanes<Acc>;
  for (int n = 0; n <= L; ++n) {
    std::vector<Acc> source(n), target(L + 1, Acc(-1));
    for (int i = 0; i < n; ++i) source[i] = Acc(i + 1);
    const Vec<Acc> v = LoadN<Acc>(static_cast<const Acc*>(source.data()), n);
    for (int i = 0; i < L; ++i) Check(v[i] == (i < n ? Acc(i + 1) : Acc(0)), tier, "LoadN", i);
    StoreN(target.data(), v, n);
    for (int i = 0; i <= L; ++i) Check(target[i] == (i < n ? Acc(i + 1) : Acc(-1)), tier, "StoreN", i);
  }
  Vec<Acc> v;
  for (int i = 0; i < L; ++i) v[i] = Acc(i);
  Check(ReduceSum<Acc>(v) == Acc(L * (L - 1) / 2), tier, "ReduceSum", ReduceSum<Acc>(v));
  Check(ReduceMax<Acc>(v) == Acc(L - 1), tier, "ReduceMax", ReduceMax<Acc>(v));
}

template <class Acc>
void CheckTiles(const char* tier) {
  const double eps = std::numeric_limits<Acc>::epsilon();
  std::srand(2);
  const int sizes[] = {1, 2, 5, 6, 7, 13, 16, 17, 33, 64, 65};
  for (int rows : sizes) {
    for (int columns : sizes) {
      const int64_t depth = (rows * 7 + columns) % 40 + 1, ld = PadColumns<Acc>(columns), ldt = PadColumns<Acc>(rows);
      std::vector<Acc> a(rows * depth), b(depth * columns), b_tile(depth * ld), c(rows * ld, Acc(3)), t(depth * ldt);
      for (Acc& x : a) x = Acc(std::rand()) / RAND_MAX - Acc(0.5);
      for (Acc& x : b) x = Acc(std::rand()) / RAND_MAX - Acc(0.5);
      LoadTile<Acc, Acc>(depth, columns, b.data(), columns, b_tile.data(), ld);
      LoadTileTransposed<Acc, Acc>(rows, depth, a.data(), depth, t.data(), ldt);
      Multiply<Into::kOverwrite, Acc>(rows, columns, depth, a.data(), depth, 1, b_tile.data(), ld, c.data(), ld);
      std::vector<Acc> first = c;
      // The transposed tile read transposed is the tile: adding and subtracting that product changes nothing but bits.
      Multiply<Into::kAdd, Acc>(rows, columns, depth, t.data(), 1, ldt, b_tile.data(), ld, c.data(), ld);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
          double truth = 0;
          for (int k = 0; k < depth; ++k) truth += double(a[i * depth + k]) * b[k * columns + j];
          Check(std::fabs(first[i * ld + j] - truth) < 40 * eps, tier, "Multiply", i);
          Check(std::fabs(c[i * ld + j] - 2 * truth) < 80 * eps, tier, "Multiply, adding a transposed tile", i);
        }
      }
      std::vector<Acc> back(rows * depth, Acc(7));
      StoreTileTransposed<Acc, Acc>(depth, rows, t.data(), ldt, back.data(), depth);
      Check(back == a, tier, "StoreTileTransposed", rows);
      constexpr int L = kLanes<Acc>;
      std::vector<Acc> lanes((rows + L) * L, Acc(columns)), sums(rows + L);
      for (int i = 0; i < rows; ++i) lanes[i * L + i % L] += Acc(i);
      SumLanes<Acc>(rows, lanes.data(), sums.data());
      for (int i = 0; i < rows; ++i) Check(sums[i] == Acc(i + L * columns), tier, "SumLanes", i);
      Multiply<Into::kSubtract, Acc>(rows, columns, depth, t.data(), 1, ldt, b_tile.data(), ld, c.data(), ld);
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
          Check(std::fabs(c[i * ld + j] - first[i * ld + j]) < 80 * eps, tier, "Multiply, subtracting", i);
        }
      }
    }
  }
}

template <class Acc>
void CheckAll(const char* tier) {
  CheckMath<Acc>(tier);
  if constexpr (sizeof(Acc) == 4) CheckHalves(tier);
  CheckPartial<Acc>(tier);
  CheckTiles<Acc>(tier);
}
