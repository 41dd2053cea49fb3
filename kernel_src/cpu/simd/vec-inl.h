// The verbs of the SIMD layer. Included once per tier, between begin_<tier>.h and end_tier.h.
//
// Acc is the type a kernel computes in: float, or double in the scalar tier. Vec<Acc> is one register of it. Elem is
// the type a tensor is stored in: float, double, bf16 or fp16; loads widen to Acc, stores round to nearest even.
// All loads and stores may be unaligned. Arithmetic operators + - * / work on vectors; comparisons give lane masks for
// Select. No verb depends on neighbours in memory: the lanes a LoadN does not name are 0 and are not read.

template <class Acc>
struct VecTraits;
template <>
struct VecTraits<float> {
  typedef float Type __attribute__((vector_size(PACKFREE_VECTOR_BYTES)));
  typedef int32_t Int __attribute__((vector_size(PACKFREE_VECTOR_BYTES)));
  typedef int32_t IntLane;
};
template <>
struct VecTraits<double> {
  typedef double Type __attribute__((vector_size(PACKFREE_VECTOR_BYTES)));
  typedef int64_t Int __attribute__((vector_size(PACKFREE_VECTOR_BYTES)));
  typedef int64_t IntLane;
};

template <class Acc>
using Vec = typename VecTraits<Acc>::Type;
template <class Acc>
using IntVec = typename VecTraits<Acc>::Int;
// Lanes of a register.
template <class Acc>
constexpr int kLanes = PACKFREE_VECTOR_BYTES / static_cast<int>(sizeof(Acc));

template <class Acc>
PACKFREE_INLINE Vec<Acc> Zero() {
  return Vec<Acc>{};
}
template <class Acc>
PACKFREE_INLINE Vec<Acc> Set(Acc x) {
  return x - Vec<Acc>{};
}
template <class V>
PACKFREE_INLINE V Max(V a, V b) {
  return a > b ? a : b;
}
template <class V>
PACKFREE_INLINE V Min(V a, V b) {
  return a < b ? a : b;
}
// The instruction takes b where a lane is NaN, as the text above does; compilers do not always see that.
#if PACKFREE_AVX512
PACKFREE_INLINE Vec<float> Max(Vec<float> a, Vec<float> b) { return _mm512_maskz_max_ps((__mmask16)0xffff, a, b); }
PACKFREE_INLINE Vec<float> Min(Vec<float> a, Vec<float> b) { return _mm512_maskz_min_ps((__mmask16)0xffff, a, b); }
#elif PACKFREE_AVX2
PACKFREE_INLINE Vec<float> Max(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a, b); }
PACKFREE_INLINE Vec<float> Min(Vec<float> a, Vec<float> b) { return _mm256_min_ps(a, b); }
#endif
// mask ? a : b, lane by lane. `mask` is the result of a comparison of two vectors.
template <class Mask, class V>
PACKFREE_INLINE V Select(Mask mask, V a, V b) {
  return mask ? a : b;
}

// a * b + c: one rounding where the tier has FMA, two in the scalar tier.
PACKFREE_INLINE Vec<float> MulAdd(Vec<float> a, Vec<float> b, Vec<float> c) {
#if PACKFREE_AVX512
  return _mm512_fmadd_ps(a, b, c);
#elif PACKFREE_AVX2
  return _mm256_fmadd_ps(a, b, c);
#elif PACKFREE_NEON
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
PACKFREE_INLINE Vec<double> MulAdd(Vec<double> a, Vec<double> b, Vec<double> c) {
#if PACKFREE_AVX512
  return _mm512_fmadd_pd(a, b, c);
#elif PACKFREE_AVX2
  return _mm256_fmadd_pd(a, b, c);
#elif PACKFREE_NEON
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
}

// Sum of the lanes, in a fixed tree: lane i with lane i + half, then quarters, and so on.
template <class Acc>
PACKFREE_INLINE Acc ReduceSum(Vec<Acc> v) {
#if PACKFREE_NEON
  // The same tree; through memory, GCC takes it to the integer unit.
  if constexpr (std::is_same_v<Acc, float>) return vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)));
#endif
  Acc lane[kLanes<Acc>];
  __builtin_memcpy(lane, &v, sizeof(v));
  for (int half = kLanes<Acc> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}
template <class Acc>
PACKFREE_INLINE Acc ReduceMax(Vec<Acc> v) {
  Acc lane[kLanes<Acc>];
  __builtin_memcpy(lane, &v, sizeof(v));
  for (int half = kLanes<Acc> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  }
  return lane[0];
}

// ---- one element -----------------------------------------------------------------------------------------------

PACKFREE_INLINE float BitsToFloat(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}
PACKFREE_INLINE uint32_t FloatToBits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PACKFREE_INLINE float ToFloat(float x) { return x; }
PACKFREE_INLINE double ToFloat(double x) { return x; }
PACKFREE_INLINE float ToFloat(bf16 x) { return BitsToFloat(static_cast<uint32_t>(x.bits) << 16); }
PACKFREE_INLINE float ToFloat(fp16 x) {
  // Move exponent and mantissa to their float places, then scale by 2^112, the difference of the biases. A half with
  // the largest exponent (inf, NaN) ends below the float's largest, so its exponent is completed by hand.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  uint32_t bits = FloatToBits(BitsToFloat(magnitude) * BitsToFloat(0x77800000u));
  if (magnitude >= 0x0f800000u) bits |= 0x7f800000u;
  return BitsToFloat(bits | sign);
}

template <class Elem>
struct Rounder;
template <>
struct Rounder<float> {
  static PACKFREE_INLINE float From(float x) { return x; }
};
template <>
struct Rounder<double> {
  static PACKFREE_INLINE double From(double x) { return x; }
};
template <>
struct Rounder<bf16> {
  static PACKFREE_INLINE bf16 From(float x) {
    const uint32_t bits = FloatToBits(x);
    if (x != x) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
    return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};
template <>
struct Rounder<fp16> {
  static PACKFREE_INLINE fp16 From(float x) {
    const uint32_t bits = FloatToBits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return fp16{static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
    if (magnitude >= 0x477ff000u) return fp16{static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 rounds to infinity
    if (magnitude < 0x38800000u) {
      // Below 2^-14 the result is subnormal: adding 0.5 lets the float unit round at the half's last place, 2^-24.
      const uint32_t rounded = FloatToBits(BitsToFloat(magnitude) + 0.5f) - 0x3f000000u;
      return fp16{static_cast<uint16_t>(sign | rounded)};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return fp16{static_cast<uint16_t>(sign | (rounded >> 13))};
  }
};

template <class Acc, class Elem>
PACKFREE_INLINE Acc LoadOne(const Elem* p) {
  return static_cast<Acc>(ToFloat(*p));
}
template <class Elem, class Acc>
PACKFREE_INLINE void StoreOne(Elem* p, Acc x) {
  *p = Rounder<Elem>::From(x);
}

// ---- whole registers -------------------------------------------------------------------------------------------

typedef uint16_t HalfVec __attribute__((vector_size(PACKFREE_VECTOR_BYTES / 2)));
typedef uint32_t BitsVec __attribute__((vector_size(PACKFREE_VECTOR_BYTES)));

PACKFREE_INLINE Vec<float> WidenBf16(HalfVec half) {
#if PACKFREE_NEON
  return (Vec<float>)vshlq_n_u32(vmovl_u16((uint16x4_t)half), 16);
#else
  return (Vec<float>)(__builtin_convertvector(half, BitsVec) << 16);
#endif
}
PACKFREE_INLINE HalfVec NarrowBf16(Vec<float> v) {
#if PACKFREE_BF16 && PACKFREE_AVX512
  // The instruction flushes subnormals to zero; they lie below anything a bf16 tensor of a model tells apart from 0.
  return (HalfVec)_mm512_cvtneps_pbh(v);
#elif PACKFREE_BF16 && PACKFREE_NEON
  // Rounds as the text below does, subnormals too. (Compilers differ in where they offer the intrinsic.)
  HalfVec half;
  __asm__("bfcvtn %0.4h, %1.4s" : "=w"(half) : "w"(v));
  return half;
#else
  const BitsVec bits = (BitsVec)v;
  const BitsVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const BitsVec nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector((BitsVec)(v == v ? rounded : nan), HalfVec);
#endif
}
PACKFREE_INLINE Vec<float> WidenFp16(HalfVec half) {
#if PACKFREE_AVX512
  return _mm512_maskz_cvtph_ps((__mmask16)0xffff, (__m256i)half);
#elif PACKFREE_AVX2
  return _mm256_cvtph_ps((__m128i)half);
#elif PACKFREE_NEON
  return vcvt_f32_f16((float16x4_t)half);
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = ToFloat(fp16{half[i]});
  return v;
#endif
}
PACKFREE_INLINE HalfVec NarrowFp16(Vec<float> v) {
#if PACKFREE_AVX512
  return (HalfVec)_mm512_maskz_cvtps_ph((__mmask16)0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif PACKFREE_AVX2
  return (HalfVec)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif PACKFREE_NEON
  return (HalfVec)vcvt_f16_f32(v);
#else
  HalfVec half;
  for (int i = 0; i < kLanes<float>; ++i) half[i] = Rounder<fp16>::From(v[i]).bits;
  return half;
#endif
}

// The kLanes<Acc> elements at p.
template <class Acc>
PACKFREE_INLINE Vec<Acc> Load(const Acc* p) {
  Vec<Acc> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <class Acc>
PACKFREE_INLINE Vec<Acc> Load(const bf16* p) {
  HalfVec half;
  __builtin_memcpy(&half, p, sizeof(half));
  return WidenBf16(half);
}
template <class Acc>
PACKFREE_INLINE Vec<Acc> Load(const fp16* p) {
  HalfVec half;
  __builtin_memcpy(&half, p, sizeof(half));
  return WidenFp16(half);
}
template <class Acc>
PACKFREE_INLINE void Store(Acc* p, Vec<Acc> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
PACKFREE_INLINE void Store(bf16* p, Vec<float> v) {
  const HalfVec half = NarrowBf16(v);
  __builtin_memcpy(p, &half, sizeof(half));
}
PACKFREE_INLINE void Store(fp16* p, Vec<float> v) {
  const HalfVec half = NarrowFp16(v);
  __builtin_memcpy(p, &half, sizeof(half));
}

// The first n elements at p, 0 <= n <= kLanes<Acc>; the other lanes are 0 and their memory is not touched.
template <class Acc, class Elem>
PACKFREE_INLINE Vec<Acc> LoadN(const Elem* p, int n) {
#if PACKFREE_AVX512
  if constexpr (std::is_same_v<Elem, float>) return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
  if constexpr (sizeof(Elem) == 2) {
    const HalfVec half = (HalfVec)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1u), p);
    if constexpr (std::is_same_v<Elem, bf16>) return WidenBf16(half);
    if constexpr (std::is_same_v<Elem, fp16>) return WidenFp16(half);
  }
#elif PACKFREE_NEON
  // Lane by lane into a register: a buffer would be put together in the integer unit.
  if constexpr (std::is_same_v<Elem, float>) {
    Vec<float> v = {};
#pragma GCC unroll 4
    for (int i = 0; i < kLanes<float>; ++i) {
      if (i < n) v[i] = p[i];
    }
    return v;
  }
  if constexpr (sizeof(Elem) == 2) {
    HalfVec half = {};
#pragma GCC unroll 4
    for (int i = 0; i < kLanes<float>; ++i) {
      if (i < n) half[i] = p[i].bits;
    }
    if constexpr (std::is_same_v<Elem, bf16>) return WidenBf16(half);
    if constexpr (std::is_same_v<Elem, fp16>) return WidenFp16(half);
  }
#endif
  Elem buffer[kLanes<Acc>] = {};
  for (int i = 0; i < kLanes<Acc>; ++i) {
    if (i < n) buffer[i] = p[i];
  }
  return Load<Acc>(static_cast<const Elem*>(buffer));
}
template <class Elem, class V>
PACKFREE_INLINE void StoreN(Elem* p, V v, int n) {
#if PACKFREE_AVX512
  if constexpr (std::is_same_v<Elem, float>) return _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v);
  if constexpr (std::is_same_v<Elem, bf16>)
    return _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)NarrowBf16(v));
  if constexpr (std::is_same_v<Elem, fp16>)
    return _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1u), (__m256i)NarrowFp16(v));
#endif
  constexpr int L = sizeof(V) / sizeof(v[0]);
  Elem buffer[L];
  Store(buffer, v);
  for (int i = 0; i < L; ++i) {
    if (i < n) p[i] = buffer[i];
  }
}

// Load and Store of n <= kLanes<Acc> lanes where n is nearly always the whole register.
template <class Acc, class Elem>
PACKFREE_INLINE Vec<Acc> LoadUpTo(const Elem* p, int n) {
  return n == kLanes<Acc> ? Load<Acc>(p) : LoadN<Acc>(p, n);
}
template <class Elem, class V>
PACKFREE_INLINE void StoreUpTo(Elem* p, V v, int n) {
  if (n == static_cast<int>(sizeof(V) / sizeof(v[0]))) {
    Store(p, v);
  } else {
    StoreN(p, v, n);
  }
}
