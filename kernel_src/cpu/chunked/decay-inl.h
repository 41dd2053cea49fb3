// Decay of a scalar-gated recurrence inside a chunk. Included once per tier, after math-inl.h.

// From log-decays g (element i at g[i * stride]) of `rows` tokens:
//   decay[i, j] = exp(g_{j+1} + ... + g_i) for j <= i, 0 above the diagonal (a lower tile of triangular-inl.h),
//   from_start[i] = exp(g_0 + ... + g_i).
// Every exponent is a sum over exactly the tokens between i and j, grown row by row. A difference of cumulative sums
// would lose the small decays that follow a large one (g = -1e4 leaves 1e-3 of the next ones in float), and a quotient
// of decays overflows. `exponents` is scratch of kChunk elements.
template <class Acc>
inline void ChunkDecay(int64_t rows, const Acc* g, int64_t stride, Acc* decay, int64_t ld, Acc* from_start,
                       Acc* exponents) {
  constexpr int L = kLanes<Acc>;
  const Acc infinity = static_cast<Acc>(__builtin_inf());
  const int64_t padded = PadColumns<Acc>(rows);
  Acc sum = 0;
  for (int64_t i = 0; i < padded; ++i) {
    if (i < rows) sum += g[i * stride];
    exponents[i] = sum;
  }
  for (int64_t i = 0; i < padded; i += L) Store(from_start + i, Exp<Acc>(Load<Acc>(exponents + i)));

  // Places not reached yet hold -infinity, which stays what it is until the diagonal arrives.
  for (int64_t j = 0; j < padded; ++j) exponents[j] = -infinity;
  for (int64_t i = 0; i < rows; ++i) {
    const Acc step = g[i * stride];
    const int64_t width = PadColumns<Acc>(TriangleWidth(i, rows));
    for (int64_t j = 0; j <= i; j += L) Store(exponents + j, Load<Acc>(exponents + j) + step);
    exponents[i] = 0;
    int64_t j = 0;
    for (; j <= i; j += L) Store(decay + i * ld + j, Exp<Acc>(Load<Acc>(exponents + j)));
    for (; j < width; j += L) Store(decay + i * ld + j, Zero<Acc>());
  }
}
