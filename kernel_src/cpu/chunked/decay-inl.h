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

// Gradient of the log-decays g of a chunk of c tokens, from the gradients of all exponents that g_l is a term of:
//   dg_l = sum over j < l <= i of pairs_ij + sum over i >= l of d_from_start_i + sum over j < l of d_to_end_j
//          + d_over_chunk.
// `pairs` is a lower tile (its diagonal is not read) with the gradients of the exponents from j to i; `d_from_start`,
// `d_to_end` and `d_over_chunk` are those of the exponents from the chunk's start to i, from j to its end, and over the
// whole chunk. Rows are added from the last up, so no term is added and taken away again. `columns` is scratch of
// kChunk elements.
template <class Acc>
inline void GatherDecayGradients(int64_t c, const Acc* pairs, int64_t ld, const Acc* d_from_start, const Acc* d_to_end,
                                 Acc d_over_chunk, Acc* columns, Acc* dg, int64_t stride) {
  constexpr int L = kLanes<Acc>;
  for (int64_t j = 0; j < kChunk; ++j) columns[j] = 0;
  Acc after = 0;
  for (int64_t l = c - 1; l >= 0; --l) {
    const Acc* pair = pairs + l * ld;
    Vec<Acc> sum = Zero<Acc>();
    for (int64_t j = 0; j < l; j += L) {
      const Vec<Acc> column = Load<Acc>(columns + j) + Load<Acc>(pair + j);
      Store(columns + j, column);
      // Column l and those right of it stand for pairs that begin at token l or later.
      sum = sum + (l - j >= L ? column : LoadN<Acc>(columns + j, static_cast<int>(l - j)));
    }
    after += d_from_start[l];
    dg[l * stride] = ReduceSum<Acc>(sum) + after + d_over_chunk;
  }
  Acc before = 0;
  for (int64_t l = 0; l < c; ++l) {
    dg[l * stride] += before;
    before += d_to_end[l];
  }
}
