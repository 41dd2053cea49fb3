// Forward source of the selective scan. Lanes are channels; the tokens of a sequence, or of neighbours that form one
// span, are run through in order.

// y[t] += sum over kStates states of C h, with h = exp(delta A) h + (delta u) B; `state` [kStates, L] is advanced.
// B and C are rows [states] of a token, `stride` apart, or where fixed one register a state. A sequence starts from 0.
template <class Acc, int kStates, bool kFixedB, bool kFixedC>
inline __attribute__((noinline)) void ScanTokens(int64_t tokens, const uint8_t* begins, const Acc* delta,
                                                 const Acc* input, const Acc* rate2, const Acc* B, const Acc* C,
                                                 int64_t stride, Acc* state, Acc* y) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> rate[kStates], h[kStates], b[kStates], c[kStates];
#pragma GCC unroll 8
  for (int i = 0; i < kStates; ++i) {
    rate[i] = Load<Acc>(rate2 + i * L);
    h[i] = Load<Acc>(static_cast<const Acc*>(state) + i * L);
    if (kFixedB) b[i] = Load<Acc>(B + i * L);
    if (kFixedC) c[i] = Load<Acc>(C + i * L);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<Acc> step = Load<Acc>(delta + t * L), in = Load<Acc>(input + t * L);
    Vec<Acc> sum = Zero<Acc>();
    if (begins != nullptr && begins[t]) {
#pragma GCC unroll 8
      for (int i = 0; i < kStates; ++i) h[i] = Zero<Acc>();
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStates; ++i) {
      if (!kFixedB) b[i] = Set<Acc>(B[t * stride + i]);
      if (!kFixedC) c[i] = Set<Acc>(C[t * stride + i]);
      h[i] = MulAdd(in, b[i], Exp2Any<Acc>(step * rate[i]) * h[i]);
      sum = MulAdd(c[i], h[i], sum);
    }
    Store(y + t * L, Load<Acc>(static_cast<const Acc*>(y) + t * L) + sum);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kStates; ++i) Store(state + i * L, h[i]);
}

// All states of one lane group: four at a time, the rest one by one.
template <class Acc, bool kFixedB, bool kFixedC>
inline void ScanStates(const ScanArgs& args, const ScanTiles<Acc>& tiles, int64_t c, int64_t tokens,
                       const uint8_t* begins, const Acc* delta, const Acc* input, Acc* y) {
  constexpr int L = kLanes<Acc>;
  const Acc* rate2 = tiles.rate2 + c * args.states;
  const Acc* B = kFixedB ? tiles.fixed_B + c * args.states : tiles.B;
  const Acc* C = kFixedC ? tiles.fixed_C + c * args.states : tiles.C;
  constexpr int64_t kStepB = kFixedB ? L : 1, kStepC = kFixedC ? L : 1;
  Acc* state = tiles.state + c * args.states;
  int64_t n = 0;
  for (; n + kScanStatesTogether <= args.states; n += kScanStatesTogether) {
    ScanTokens<Acc, kScanStatesTogether, kFixedB, kFixedC>(tokens, begins, delta, input, rate2 + n * L, B + n * kStepB,
                                                           C + n * kStepC, tiles.stride, state + n * L, y);
  }
  for (; n < args.states; ++n) {
    ScanTokens<Acc, 1, kFixedB, kFixedC>(tokens, begins, delta, input, rate2 + n * L, B + n * kStepB, C + n * kStepC,
                                         tiles.stride, state + n * L, y);
  }
}

// y = (y + D u) silu(z); `skip` [L] is D or null, and z may be null.
template <class Acc>
inline void FinishOutput(int64_t tokens, const Acc* skip, const Acc* u, const Acc* z, Acc* y) {
  constexpr int L = kLanes<Acc>;
  for (int64_t t = 0; t < tokens; ++t) {
    Vec<Acc> out = Load<Acc>(static_cast<const Acc*>(y) + t * L);
    if (skip != nullptr) out = MulAdd(Load<Acc>(skip), Load<Acc>(u + t * L), out);
    if (z != nullptr) {
      const Vec<Acc> gate = Load<Acc>(z + t * L);
      out = out * (gate * Sigmoid<Acc>(gate));
    }
    Store(y + t * L, out);
  }
}

template <class Acc>
void ScanForwardItem(const ScanForwardArgs& args, const ScanItem& item, void* scratch) {
  constexpr int L = kLanes<Acc>;
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const ScanForwardTiles<Acc> tiles(args, pieces);
  const ScanTiles<Acc>& shared = tiles.shared;
  LoadParameters<Acc>(args, item, shared);
  for (int64_t n = item.first, end; n < item.last; n = end) {
    end = SpanEnd(args, item, n);
    const int64_t length = args.packing.eos(end - 1) - args.packing.bos(n);
    if (length == 0 && args.final_state == nullptr) continue;
    LoadInitialState<Acc>(args, item, n, shared.state);
    for (int64_t token = 0; token < length; token += kScanTokens) {
      const int64_t tokens = length - token < kScanTokens ? length - token : kScanTokens;
      const uint8_t* begins = BeginsAt(args, item, n, token);
      LoadCoefficients<Acc>(args, args.B, item, n, token, tokens, shared.B, shared.stride);
      LoadCoefficients<Acc>(args, args.C, item, n, token, tokens, shared.C, shared.stride);
      for (int64_t c = 0; c < item.channels; c += L) {
        const int lanes = LanesOf<Acc>(item, c);
        LoadStep<Acc>(args, item, n, token, tokens, c, shared.bias, tiles.u, tiles.delta, tiles.input, nullptr);
        ClearTile<Acc>(tokens, L, tiles.y, L);
        if (args.B.fixed && args.C.fixed) {
          ScanStates<Acc, true, true>(args, shared, c, tokens, begins, tiles.delta, tiles.input, tiles.y);
        } else if (args.B.fixed) {
          ScanStates<Acc, true, false>(args, shared, c, tokens, begins, tiles.delta, tiles.input, tiles.y);
        } else if (args.C.fixed) {
          ScanStates<Acc, false, true>(args, shared, c, tokens, begins, tiles.delta, tiles.input, tiles.y);
        } else {
          ScanStates<Acc, false, false>(args, shared, c, tokens, begins, tiles.delta, tiles.input, tiles.y);
        }
        const int64_t channel = item.channel + c;
        const Acc* z = nullptr;
        if (args.z.data != nullptr) {
          LoadTokens<Acc>(args.z, TokenOffset(args, args.z.strides, n, token, channel), tokens, lanes, tiles.z);
          z = tiles.z;
        }
        FinishOutput<Acc>(tokens, args.D == nullptr ? nullptr : shared.skip + c, tiles.u, z, tiles.y);
        StoreTokens<Acc>(args.y, TokenOffset(args, args.y.strides, n, token, channel), tokens, lanes, tiles.y);
      }
    }
    if (args.final_state != nullptr) {
      Acc* target = static_cast<Acc*>(args.final_state) + n * args.channels * args.states;
      StoreChannelRows<Acc>(args, item, shared.state, target);
    }
  }
}
