// Decay of each token and channel, from a log-decay or through a gate. Included once per tier, after math-inl.h.
//
// With x = g + dt_bias and rate = exp(a_log) the log-decay is -rate softplus(x), or lower_bound sigmoid(rate x) if the
// gate is bounded; without a gate it is g.
//
// The rate is cut at exp(kMostLogRate), which changes nothing that can be told apart. A product of 0 and infinity never
// arises then, and all gradients are finite. Sigmoid(rate x) is 0, 1/2 or 1 from there on: at 1/2 x is 0, and elsewhere
// |rate x| passes 88 unless |x| < 4e-29. Softplus(x) above kFarBelow gives a log-decay below -1e13, which is a decay of
// 0; below, where softplus(x) and its derivative are e^x to the last bit, what was cut goes into the exponent.

constexpr double kMostLogRate = 70;
constexpr double kFarBelow = -40;

// The gate of one value head.
template <class Acc>
struct Gate {
  bool present, bounded;
  Acc rate, lower_bound;
  Acc cut;          // how much larger a_log is than the rate's logarithm
  const Acc* bias;  // [K] or null

  Gate(const KdaInputs& in, int64_t hv)
      : present(in.a_log != nullptr),
        bounded(in.bounded),
        rate(0),
        lower_bound(static_cast<Acc>(in.lower_bound)),
        cut(0),
        bias(in.dt_bias == nullptr ? nullptr : static_cast<const Acc*>(in.dt_bias) + hv * in.key_dim) {
    if (!present) return;
    const Acc log_rate = static_cast<const Acc*>(in.a_log)[hv];
    if (log_rate > Acc(kMostLogRate)) cut = log_rate - Acc(kMostLogRate);
    rate = ExpOne<Acc>(cut > 0 ? Acc(kMostLogRate) : log_rate);
  }
};

// What the gate sees of channels [at, at + width).
template <class Acc>
PACKFREE_INLINE Vec<Acc> GateInput(const Gate<Acc>& gate, const Acc* g, int64_t at, int width) {
  const Vec<Acc> x = LoadUpTo<Acc>(g + at, width);
  return gate.bias == nullptr ? x : x + LoadUpTo<Acc>(gate.bias + at, width);
}

// e^x times what was cut off the rate, for x far below 0.
template <class Acc>
PACKFREE_INLINE Vec<Acc> ExpWithCut(const Gate<Acc>& gate, Vec<Acc> x) {
  return Exp<Acc>(Min(x + gate.cut, Zero<Acc>()));
}

// Softplus of the unbounded gate, and its derivative.
template <class Acc>
PACKFREE_INLINE Vec<Acc> GateSoftplus(const Gate<Acc>& gate, Vec<Acc> x) {
  const Vec<Acc> y = Softplus<Acc>(x);
  if (!(gate.cut > 0)) return y;
  return x < Acc(kFarBelow) ? ExpWithCut(gate, x) : y;
}

template <class Acc>
PACKFREE_INLINE Vec<Acc> GateSlope(const Gate<Acc>& gate, Vec<Acc> x) {
  const Vec<Acc> y = Sigmoid<Acc>(x);
  if (!(gate.cut > 0)) return y;
  return x < Acc(kFarBelow) ? ExpWithCut(gate, x) : y;
}

// decay[i, :] = exp(log-decay) of `rows` tokens, from rows of g that lie `stride` apart.
template <class Acc>
inline void LoadDecays(const Gate<Acc>& gate, int64_t rows, int64_t columns, const Acc* g, int64_t stride, Acc* decay,
                       int64_t ld) {
  constexpr int L = kLanes<Acc>;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t at = 0; at < columns; at += L) {
      const int width = columns - at < L ? static_cast<int>(columns - at) : L;
      Vec<Acc> x = LoadUpTo<Acc>(g + i * stride + at, width);
      if (gate.present) {
        x = GateInput<Acc>(gate, g + i * stride, at, width);
        x = gate.bounded ? Sigmoid<Acc>(x * gate.rate) * gate.lower_bound : GateSoftplus(gate, x) * -gate.rate;
      }
      Store(decay + i * ld + at, Exp<Acc>(x));
    }
  }
}

// Takes the gradients of the log-decays through the gate: writes those of g to dg, and of each token's share in a_log
// to d_rates.
template <class Acc>
inline void StoreDecayGradients(const Gate<Acc>& gate, int64_t rows, int64_t columns, const Acc* g, int64_t stride,
                                const Acc* d_decay, int64_t ld, Acc* dg, Acc* d_rates, int64_t rate_stride) {
  constexpr int L = kLanes<Acc>;
  if (!gate.present) return StoreTile<Acc>(rows, columns, d_decay, ld, dg, stride);
  for (int64_t i = 0; i < rows; ++i) {
    Vec<Acc> sum = Zero<Acc>();
    for (int64_t at = 0; at < columns; at += L) {
      const int width = columns - at < L ? static_cast<int>(columns - at) : L;
      const Vec<Acc> x = GateInput<Acc>(gate, g + i * stride, at, width);
      const Vec<Acc> d = LoadUpTo<Acc>(d_decay + i * ld + at, width);
      Vec<Acc> dx;
      if (gate.bounded) {
        const Vec<Acc> s = Sigmoid<Acc>(x * gate.rate);
        dx = d * s * (Acc(1) - s) * (gate.lower_bound * gate.rate);
        sum = MulAdd(dx, x, sum);
      } else {
        const Vec<Acc> scaled = d * -gate.rate;
        dx = scaled * GateSlope(gate, x);
        sum = MulAdd(scaled, GateSoftplus(gate, x), sum);
      }
      StoreUpTo(dg + i * stride + at, dx, width);
    }
    d_rates[i * rate_stride] = ReduceSum<Acc>(sum);
  }
}

// sums[x] = sum over t of rows[t, x], in blocks of kSumBlock tokens: the blocks keep the rounding of a long sum small.
constexpr int64_t kSumBlock = 256;
template <class Acc>
inline void SumTokens(int64_t tokens, int64_t columns, const Acc* rows, int64_t stride, Acc* sums) {
  constexpr int L = kLanes<Acc>;
  for (int64_t at = 0; at < columns; at += L) {
    const int width = columns - at < L ? static_cast<int>(columns - at) : L;
    Vec<Acc> total = Zero<Acc>();
    for (int64_t begin = 0; begin < tokens; begin += kSumBlock) {
      const int64_t end = begin + kSumBlock < tokens ? begin + kSumBlock : tokens;
      Vec<Acc> sum = Zero<Acc>();
      for (int64_t t = begin; t < end; ++t) sum = sum + LoadUpTo<Acc>(rows + t * stride + at, width);
      total = total + sum;
    }
    StoreUpTo(sums + at, total, width);
  }
}

// Gradients of the gate's parameters of one value head.
template <class Acc>
inline void GateParameterGradients(const KdaBackward& args, int64_t hv) {
  const KdaInputs& in = args.in;
  const int64_t HV = in.value_heads, K = in.key_dim, tokens = in.packing.end();
  SumTokens<Acc>(tokens, 1, static_cast<const Acc*>(args.d_rates) + hv, HV, static_cast<Acc*>(args.da_log) + hv);
  if (args.ddt_bias == nullptr) return;
  SumTokens<Acc>(tokens, K, static_cast<const Acc*>(args.dg) + hv * K, HV * K,
                 static_cast<Acc*>(args.ddt_bias) + hv * K);
}
