// Elementary functions on vectors, float and double by one text. Included once per tier, after vec-inl.h.
// Relative error, held by tests/cpp: Exp and Exp2Any below 2 eps, Sigmoid below 3, Softplus below 4, Tanh below 8; Log
// below 2 eps of 1 + |log|.

// 1 / k! for k = 0, 1, ...: |r| <= ln(2) / 2 needs terms up to r^7 for float (5e-9) and r^13 for double (4e-18).
constexpr double kInverseFactorial[] = {
    1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
    1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
template <class Acc>
constexpr int kExpDegree = sizeof(Acc) == 4 ? 7 : 13;

// sum over k >= first of r^(k - first) / k!, by Horner's rule.
template <class Acc, int kFirst>
PACKFREE_INLINE Vec<Acc> ExpSeries(Vec<Acc> r) {
  Vec<Acc> sum = Set<Acc>(static_cast<Acc>(kInverseFactorial[kExpDegree<Acc>]));
  for (int k = kExpDegree<Acc> - 1; k >= kFirst; --k) {
    sum = MulAdd(sum, r, Set<Acc>(static_cast<Acc>(kInverseFactorial[k])));
  }
  return sum;
}

// e^x. 0 below the smallest normal result, infinity above the largest, NaN for NaN.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Exp(Vec<Acc> x) {
  constexpr bool kSingle = sizeof(Acc) == 4;
  constexpr Acc kLowest = kSingle ? Acc(-87.33654) : Acc(-708.396418532264);
  constexpr Acc kHighest = kSingle ? Acc(88.72283) : Acc(709.782712893384);
  // ln(2) split so that count * kLn2High is exact.
  constexpr Acc kLn2High = kSingle ? Acc(0.693359375) : Acc(6.93147180369123816490e-01);
  constexpr Acc kLn2Low = kSingle ? Acc(-2.12194440e-4) : Acc(1.90821492927058770002e-10);
  constexpr Acc kInverseLn2 = Acc(1.44269504088896340736);
  // Adding 1.5 * 2^(mantissa bits) leaves the nearest integer in the low bits.
  constexpr Acc kRound = kSingle ? Acc(12582912.0) : Acc(6755399441055744.0);
  using Int = IntVec<Acc>;
  constexpr int kMantissa = kSingle ? 23 : 52;
#if PACKFREE_AVX512
  if constexpr (kSingle) {
    // The scaling instruction saturates, so only the integer needs a limit. Constants stand first in comparisons that
    // must let a NaN through.
    const Vec<float> limited = Min(Set<float>(kHighest + 1), x);
    const Vec<float> count = _mm512_maskz_roundscale_ps((__mmask16)0xffff, limited * kInverseLn2,
                                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Vec<float> r = MulAdd(count, Set<float>(-kLn2High), limited);
    r = MulAdd(count, Set<float>(-kLn2Low), r);
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, Set<float>(kLowest), _CMP_NLT_UQ), ExpSeries<float, 0>(r),
                                  count);
  }
#endif

  const Vec<Acc> clamped = Min(Max(x, Set<Acc>(kLowest)), Set<Acc>(kHighest));
  const Vec<Acc> shifted = MulAdd(clamped, Set<Acc>(kInverseLn2), Set<Acc>(kRound));
  const Vec<Acc> count = shifted - kRound;
  Vec<Acc> r = MulAdd(count, Set<Acc>(-kLn2High), clamped);
  r = MulAdd(count, Set<Acc>(-kLn2Low), r);
  // Two factors of 2^(count / 2), because 2^count alone can pass the largest exponent.
  const Int exponent = (Int)shifted - (Int)Set<Acc>(kRound);
  const Int half = exponent >> 1;
  const Int one = (Int)Set<Acc>(Acc(1));
  const Vec<Acc> scale_a = (Vec<Acc>)(one + (half << kMantissa));
  const Vec<Acc> scale_b = (Vec<Acc>)(one + ((exponent - half) << kMantissa));
  Vec<Acc> y = ExpSeries<Acc, 0>(r) * scale_a * scale_b;
  y = x < kLowest ? Zero<Acc>() : y;
  y = x > kHighest ? Set<Acc>(static_cast<Acc>(__builtin_inf())) : y;
  return x == x ? y : x;
}

// Coefficients of 2^r on |r| <= 1/2 with the first one exactly 1, so that 2^0 is exactly 1. Float: weighted
// least-squares fit of the relative error, 2e-9. Double: ln(2)^k / k!, 4e-18.
template <class Acc>
constexpr int kExp2Degree = sizeof(Acc) == 4 ? 6 : 13;
template <class Acc>
constexpr Acc Exp2Coefficient(int k) {
  constexpr double kFitted[] = {1.0,
                                0.6931471824645996,
                                0.24022646248340607,
                                0.05550328642129898,
                                0.009618489071726799,
                                0.0013399930903688073,
                                0.00015345774590969086};
  if (sizeof(Acc) == 4) return static_cast<Acc>(kFitted[k]);
  double term = 1.0;
  for (int i = 1; i <= k; ++i) term *= 0.69314718055994530942 / i;
  return static_cast<Acc>(term);
}

// 2^x for x <= 100, the softmax's exponential: about half the work of Exp. 0 for -infinity and below the smallest
// normal result, NaN for NaN.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Exp2(Vec<Acc> x) {
  constexpr bool kSingle = sizeof(Acc) == 4;
  constexpr Acc kLowest = kSingle ? Acc(-127) : Acc(-1023);
  constexpr Acc kRound = kSingle ? Acc(12582912.0) : Acc(6755399441055744.0);
  // The constant stands first because the comparison then lets a NaN through.
  const Vec<Acc> clamped = Max(Set<Acc>(kLowest), x);
  const Vec<Acc> shifted = clamped + kRound;
  const Vec<Acc> r = clamped - (shifted - kRound);
  Vec<Acc> y = Set<Acc>(Exp2Coefficient<Acc>(kExp2Degree<Acc>));
#pragma GCC unroll 16
  for (int k = kExp2Degree<Acc> - 1; k >= 0; --k) y = MulAdd(y, r, Set<Acc>(Exp2Coefficient<Acc>(k)));
  // The low bits of `shifted` are the nearest integer, moved into the exponent of 1. The lowest integer makes it 0.
  const IntVec<Acc> one = (IntVec<Acc>)Set<Acc>(Acc(1));
  return y * (Vec<Acc>)(one + ((IntVec<Acc>)shifted << (kSingle ? 23 : 52)));
}

// 2^x for every x: 0 below the smallest normal result, NaN for NaN; from 2^128 (2^1024) on infinity, except that
// +infinity itself may give NaN. With AVX-512 the scaling instruction saturates, which saves the clamps of Exp2.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Exp2Any(Vec<Acc> x) {
#if PACKFREE_AVX512
  if constexpr (std::is_same_v<Acc, float>) {
    const Vec<float> count =
        _mm512_maskz_roundscale_ps((__mmask16)0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec<float> r = x - count;
    Vec<float> y = Set<float>(Exp2Coefficient<float>(kExp2Degree<float>));
#pragma GCC unroll 16
    for (int k = kExp2Degree<float> - 1; k >= 0; --k) y = MulAdd(y, r, Set<float>(Exp2Coefficient<float>(k)));
    // "Not less than" is true for a NaN and lets it through.
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, Set<float>(-126), _CMP_NLT_UQ), y, count);
  }
#endif
  // The constant stands first because the comparison then lets a NaN through.
  return Exp2<Acc>(Min(Set<Acc>(sizeof(Acc) == 4 ? Acc(128) : Acc(1024)), x));
}

// 1 / x for x in [1, 2], to 1 eps.
template <class Acc>
PACKFREE_INLINE Vec<Acc> InverseNearOne(Vec<Acc> x) {
#if PACKFREE_AVX512
  // An estimate of 14 bits and one step of Newton: a quarter of the division's time.
  if constexpr (std::is_same_v<Acc, float>) {
    const Vec<float> y = _mm512_maskz_rcp14_ps((__mmask16)0xffff, x);
    return MulAdd(y, MulAdd(-x, y, Set<float>(1)), y);
  }
#endif
  return Acc(1) / x;
}

// e^-|x|: with no large result to mind it takes two thirds of Exp's work. 0 below the smallest normal result, NaN for
// NaN.
template <class Acc>
PACKFREE_INLINE Vec<Acc> ExpMinusAbs(Vec<Acc> x) {
  constexpr bool kSingle = sizeof(Acc) == 4;
  using Int = IntVec<Acc>;
  const Vec<Acc> y = (Vec<Acc>)((Int)x | (Int)Set<Acc>(Acc(-0.0)));
#if PACKFREE_AVX512
  if constexpr (kSingle) return Exp<Acc>(y);
#endif
  constexpr Acc kLowest = kSingle ? Acc(-87.33654) : Acc(-708.396418532264);
  constexpr Acc kLn2High = kSingle ? Acc(0.693359375) : Acc(6.93147180369123816490e-01);
  constexpr Acc kLn2Low = kSingle ? Acc(-2.12194440e-4) : Acc(1.90821492927058770002e-10);
  constexpr Acc kInverseLn2 = Acc(1.44269504088896340736);
  constexpr Acc kRound = kSingle ? Acc(12582912.0) : Acc(6755399441055744.0);
  // As in Exp, but 2^count alone is in range: the constant stands first because a NaN then stays one.
  const Vec<Acc> clamped = Max(Set<Acc>(kLowest), y);
  const Vec<Acc> shifted = MulAdd(clamped, Set<Acc>(kInverseLn2), Set<Acc>(kRound));
  const Vec<Acc> count = shifted - kRound;
  Vec<Acc> r = MulAdd(count, Set<Acc>(-kLn2High), clamped);
  r = MulAdd(count, Set<Acc>(-kLn2Low), r);
  const Vec<Acc> scale = (Vec<Acc>)((Int)Set<Acc>(Acc(1)) + ((Int)shifted << (kSingle ? 23 : 52)));
  const Vec<Acc> power = ExpSeries<Acc, 0>(r) * scale;
  return y < kLowest ? Zero<Acc>() : power;
}

// 1 / (1 + e^-x), from e^-|x| so that nothing overflows.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Sigmoid(Vec<Acc> x) {
  const Vec<Acc> p = ExpMinusAbs<Acc>(x);
  const Vec<Acc> upper = InverseNearOne<Acc>(p + Acc(1));
  return x < Acc(0) ? p * upper : upper;
}

// (e^2x - 1) / (e^2x + 1). Near 0 the numerator comes from its own series, which keeps the relative error small.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Tanh(Vec<Acc> x) {
  const Vec<Acc> twice = x + x;
  const Vec<Acc> expm1 = twice * ExpSeries<Acc, 1>(twice);
  const Vec<Acc> near = expm1 / (expm1 + Acc(2));
  const Vec<Acc> far = Acc(1) - Acc(2) / (Exp<Acc>(twice) + Acc(1));
  const Vec<Acc> magnitude = twice < Acc(0) ? -twice : twice;
  return magnitude < Acc(0.34) ? near : far;
}

// ln(x) for positive normal x; -infinity for 0, NaN below.
// x = m 2^e with m in [sqrt(1/2), sqrt(2)), ln(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| <= 0.172.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Log(Vec<Acc> x) {
  constexpr bool kSingle = sizeof(Acc) == 4;
  constexpr int kMantissa = kSingle ? 23 : 52;
  constexpr int kTerms = kSingle ? 5 : 11;
  using Int = IntVec<Acc>;
  using IntLane = typename VecTraits<Acc>::IntLane;
  const Int root_half = (Int)Set<Acc>(Acc(0.70710678118654752440));
  const Int bits = (Int)x;
  const Int exponent = (bits - root_half) >> kMantissa;
  const Vec<Acc> m = (Vec<Acc>)(bits - (exponent << kMantissa));
  const Vec<Acc> e = __builtin_convertvector(exponent, Vec<Acc>);
  const Vec<Acc> s = (m - Acc(1)) / (m + Acc(1));
  const Vec<Acc> s2 = s * s;
  Vec<Acc> sum = Set<Acc>(Acc(1) / Acc(2 * kTerms + 1));
  for (int k = kTerms - 1; k >= 0; --k) sum = MulAdd(sum, s2, Set<Acc>(Acc(1) / Acc(2 * k + 1)));
  Vec<Acc> y = MulAdd(e, Set<Acc>(Acc(0.69314718055994530942)), Acc(2) * s * sum);
  y = x == Acc(0) ? Set<Acc>(-static_cast<Acc>(__builtin_inf())) : y;
  y = x < Acc(0) ? Set<Acc>(static_cast<Acc>(__builtin_nan(""))) : y;
  const Vec<Acc> infinity = Set<Acc>(static_cast<Acc>(__builtin_inf()));
  static_assert(sizeof(IntLane) == sizeof(Acc));
  return x == x ? (x == infinity ? infinity : y) : x;
}

// ln(1 + e^x), taken as x above 20 as PyTorch's softplus is.
// = max(x, 0) + ln(1 + p), p = e^-|x|; ln(1 + p) = 2 atanh(s), s = p / (2 + p) <= 1/3, keeps its relative precision
// where p is small.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Softplus(Vec<Acc> x) {
  constexpr int kTerms = sizeof(Acc) == 4 ? 7 : 16;
  const Vec<Acc> p = ExpMinusAbs<Acc>(x);
  const Vec<Acc> s = p / (p + Acc(2));
  const Vec<Acc> s2 = s * s;
  Vec<Acc> sum = Set<Acc>(Acc(1) / Acc(2 * kTerms + 1));
#pragma GCC unroll 16
  for (int k = kTerms - 1; k >= 0; --k) sum = MulAdd(sum, s2, Set<Acc>(Acc(1) / Acc(2 * k + 1)));
  const Vec<Acc> y = MulAdd(s + s, sum, Max(x, Zero<Acc>()));
  return x > Acc(20) ? x : y;
}

// One element, through lane 0 of the vector function, so that every path of a kernel rounds alike.
template <class Acc>
PACKFREE_INLINE Acc ExpOne(Acc x) {
  return Exp<Acc>(Set<Acc>(x))[0];
}
template <class Acc>
PACKFREE_INLINE Acc SigmoidOne(Acc x) {
  return Sigmoid<Acc>(Set<Acc>(x))[0];
}
template <class Acc>
PACKFREE_INLINE Acc LogOne(Acc x) {
  return Log<Acc>(Set<Acc>(x))[0];
}
