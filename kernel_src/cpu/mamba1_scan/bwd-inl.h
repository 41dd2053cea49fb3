// Backward source of the selective scan, in the order of fwd-inl.h. With g = dy silu(z) and x = delta u, from the last
// token to the first:
//   dh = g C + (dh of the next token, decayed),   dC += g h,   dB += dh x,   dx = sum of dh B,
//   dA += dh (a h_before) delta,   ddelta = sum of dh (a h_before) A + u dx,   dh carried = a dh,   a = exp(delta A).
// The states come from a checkpoint before each block and are run forward again inside it.

// Advances kStates states over the block. With kKeep, stores a in `decay` and a h_before in `decayed`,
// [tokens, kStates, L] each.
template <class Acc, int kStates, bool kFixedB, bool kKeep>
inline __attribute__((noinline)) void RecomputeTokens(int64_t tokens, const uint8_t* begins, const Acc* delta,
                                                      const Acc* input, const Acc* rate2, const Acc* B, int64_t stride,
                                                      const Acc* before, Acc* after, Acc* decay, Acc* decayed) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> rate[kStates], h[kStates], b[kStates];
#pragma GCC unroll 8
  for (int i = 0; i < kStates; ++i) {
    rate[i] = Load<Acc>(rate2 + i * L);
    h[i] = Load<Acc>(before + i * L);
    if (kFixedB) b[i] = Load<Acc>(B + i * L);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<Acc> step = Load<Acc>(delta + t * L), in = Load<Acc>(input + t * L);
    if (begins != nullptr && begins[t]) {
#pragma GCC unroll 8
      for (int i = 0; i < kStates; ++i) h[i] = Zero<Acc>();
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStates; ++i) {
      if (!kFixedB) b[i] = Set<Acc>(B[t * stride + i]);
      const Vec<Acc> a = Exp2Any<Acc>(step * rate[i]);
      const Vec<Acc> kept = a * h[i];
      h[i] = MulAdd(in, b[i], kept);
      if (kKeep) {
        Store(decay + (t * kStates + i) * L, a);
        Store(decayed + (t * kStates + i) * L, kept);
      }
    }
  }
  if (kKeep) return;
#pragma GCC unroll 8
  for (int i = 0; i < kStates; ++i) Store(after + i * L, h[i]);
}

// Where sequences begin in a block (null: nowhere), and one lane group's tiles of it, [kScanTokens, L] each; see
// ScanBackwardTiles.
template <class Acc>
struct ScanLaneGroup {
  const uint8_t* begins;
  const Acc* delta;
  const Acc* input;
  const Acc* dy;
  Acc* y;
  Acc* dinput;
  Acc* drate;
};

// target[i] += value, for accumulators in memory
template <class Acc>
PACKFREE_INLINE void AddTo(Acc* target, Vec<Acc> value) {
  Store(target, Load<Acc>(static_cast<const Acc*>(target)) + value);
}

// The way back through a block for kStates states. Adds to y, dinput, drate, and per token to dB and dC
// [tokens, kStates, L]; sets parameters [3, kStates, L]: the block's sums for dA, and for dB and dC where fixed.
template <class Acc, int kStates, bool kFixedB, bool kFixedC>
inline __attribute__((noinline)) void ReverseTokens(int64_t tokens, const ScanLaneGroup<Acc>& lanes, const Acc* rate,
                                                    const Acc* B, const Acc* C, int64_t stride, const Acc* decay,
                                                    const Acc* decayed, Acc* dstate, Acc* dB, Acc* dC,
                                                    Acc* parameters) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> A[kStates], dA[kStates], carried[kStates], b[kStates], c[kStates], db[kStates], dc[kStates];
#pragma GCC unroll 8
  for (int i = 0; i < kStates; ++i) {
    A[i] = Load<Acc>(rate + i * L);
    carried[i] = Load<Acc>(static_cast<const Acc*>(dstate) + i * L);
    dA[i] = db[i] = dc[i] = Zero<Acc>();
    if (kFixedB) b[i] = Load<Acc>(B + i * L);
    if (kFixedC) c[i] = Load<Acc>(C + i * L);
  }
  for (int64_t t = tokens - 1; t >= 0; --t) {
    const Vec<Acc> step = Load<Acc>(lanes.delta + t * L), in = Load<Acc>(lanes.input + t * L);
    const Vec<Acc> g = Load<Acc>(lanes.dy + t * L);
    Vec<Acc> y = Zero<Acc>(), din = Zero<Acc>(), drate = Zero<Acc>();
#pragma GCC unroll 8
    for (int i = 0; i < kStates; ++i) {
      const int64_t place = (t * kStates + i) * L;
      if (!kFixedB) b[i] = Set<Acc>(B[t * stride + i]);
      if (!kFixedC) c[i] = Set<Acc>(C[t * stride + i]);
      const Vec<Acc> kept = Load<Acc>(decayed + place);
      const Vec<Acc> h = MulAdd(in, b[i], kept);
      const Vec<Acc> dh = MulAdd(g, c[i], carried[i]);
      y = MulAdd(c[i], h, y);
      din = MulAdd(dh, b[i], din);
      if (kFixedB) {
        db[i] = MulAdd(dh, in, db[i]);
      } else {
        Store(dB + place, MulAdd(dh, in, Load<Acc>(static_cast<const Acc*>(dB) + place)));
      }
      if (kFixedC) {
        dc[i] = MulAdd(g, h, dc[i]);
      } else {
        Store(dC + place, MulAdd(g, h, Load<Acc>(static_cast<const Acc*>(dC) + place)));
      }
      const Vec<Acc> dexponent = dh * kept;
      drate = MulAdd(dexponent, A[i], drate);
      dA[i] = MulAdd(dexponent, step, dA[i]);
      carried[i] = dh * Load<Acc>(decay + place);
    }
    if (lanes.begins != nullptr && lanes.begins[t]) {
      // Not by a factor of 0: what another sequence carries may be no number.
#pragma GCC unroll 8
      for (int i = 0; i < kStates; ++i) carried[i] = Zero<Acc>();
    }
    AddTo(lanes.y + t * L, y);
    AddTo(lanes.dinput + t * L, din);
    AddTo(lanes.drate + t * L, drate);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kStates; ++i) {
    Store(dstate + i * L, carried[i]);
    Store(parameters + i * L, dA[i]);
    if (kFixedB) Store(parameters + (kStates + i) * L, db[i]);
    if (kFixedC) Store(parameters + (2 * kStates + i) * L, dc[i]);
  }
}

// Advances all states of the item over a block of full length, from `before` to `after`, [groups, N, L] each.
template <class Acc, bool kFixedB>
inline void AdvanceStates(const ScanBackwardArgs& args, const ScanItem& item, const ScanBackwardTiles<Acc>& tiles,
                          const uint8_t* begins, const Acc* before, Acc* after) {
  constexpr int L = kLanes<Acc>;
  constexpr int64_t kStep = kFixedB ? L : 1;
  const ScanTiles<Acc>& shared = tiles.shared;
  for (int64_t c = 0; c < item.channels; c += L) {
    const Acc* B = kFixedB ? shared.fixed_B + c * args.states : shared.B;
    const Acc* delta = tiles.delta + c * kScanTokens;
    const Acc* input = tiles.input + c * kScanTokens;
    int64_t n = 0;
    for (; n + kScanStatesTogether <= args.states; n += kScanStatesTogether) {
      const int64_t row = c * args.states + n * L;
      RecomputeTokens<Acc, kScanStatesTogether, kFixedB, false>(kScanTokens, begins, delta, input, shared.rate2 + row,
                                                                B + n * kStep, shared.stride, before + row, after + row,
                                                                nullptr, nullptr);
    }
    for (; n < args.states; ++n) {
      const int64_t row = c * args.states + n * L;
      RecomputeTokens<Acc, 1, kFixedB, false>(kScanTokens, begins, delta, input, shared.rate2 + row, B + n * kStep,
                                              shared.stride, before + row, after + row, nullptr, nullptr);
    }
  }
}

// target[channel ...] += the lanes of `sums`, in one row of a partial sum of the parameter gradients
template <class Acc>
PACKFREE_INLINE void AddToPartial(Acc* partial, Vec<Acc> sums, int lanes) {
  StoreUpTo(partial, LoadUpTo<Acc>(static_cast<const Acc*>(partial), lanes) + sums, lanes);
}

// This item's partial sum of the parameter gradients: Acc [ScanParameterRows, D].
template <class Acc>
inline Acc* PartialOf(const ScanBackwardArgs& args, const ScanItem& item) {
  return static_cast<Acc*>(args.parameter_partials) + item.partial * ScanParameterRows(args) * args.channels +
         item.channel;
}

// Sums dB or dC [tokens, kStates, L] over this item's channels, for states [n, n + kStates), into `partials`.
template <class Acc, int kStates>
inline void StoreTokenSums(const ScanBackwardArgs& args, const ScanItem& item, const ScanBackwardTiles<Acc>& tiles,
                           int64_t sequence, int64_t token, int64_t tokens, int64_t n, const Acc* lanes,
                           void* partials) {
  SumLanes<Acc>(tokens * kStates, lanes, tiles.sums);
  const int64_t row = item.block * args.packing.tokens + args.packing.bos(sequence) + token;
  Acc* target = static_cast<Acc*>(partials) + row * args.states + n;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < kStates; ++i) target[t * args.states + i] = tiles.sums[t * kStates + i];
  }
}

// States [n, n + kStates) of a block, all channels of the item.
template <class Acc, int kStates, bool kFixedB, bool kFixedC>
inline void ReverseStates(const ScanBackwardArgs& args, const ScanItem& item, const ScanBackwardTiles<Acc>& tiles,
                          int64_t sequence, int64_t token, int64_t tokens, int64_t n, const Acc* before) {
  constexpr int L = kLanes<Acc>;
  const ScanTiles<Acc>& shared = tiles.shared;
  Acc* partial = PartialOf<Acc>(args, item);
  if (!kFixedB) ClearTile<Acc>(tokens * kStates, L, tiles.dB, L);
  if (!kFixedC) ClearTile<Acc>(tokens * kStates, L, tiles.dC, L);
  for (int64_t c = 0; c < item.channels; c += L) {
    const int64_t row = c * args.states + n * L;
    const Acc* B = kFixedB ? shared.fixed_B + row : shared.B + n;
    const Acc* C = kFixedC ? shared.fixed_C + row : shared.C + n;
    const int64_t tile = c * kScanTokens;
    const uint8_t* begins = BeginsAt(args, item, sequence, token);
    const ScanLaneGroup<Acc> lanes = {begins,         tiles.delta + tile,  tiles.input + tile, tiles.dy + tile,
                                      tiles.y + tile, tiles.dinput + tile, tiles.drate + tile};
    RecomputeTokens<Acc, kStates, kFixedB, true>(tokens, begins, lanes.delta, lanes.input, shared.rate2 + row, B,
                                                 shared.stride, before + row, nullptr, tiles.decay, tiles.decayed);
    ReverseTokens<Acc, kStates, kFixedB, kFixedC>(tokens, lanes, shared.rate + row, B, C, shared.stride, tiles.decay,
                                                  tiles.decayed, tiles.dstate + row, tiles.dB, tiles.dC,
                                                  tiles.parameters);
    const int present = LanesOf<Acc>(item, c);
    for (int i = 0; i < kStates; ++i) {
      const Acc* sums = tiles.parameters + i * L;
      int64_t target = n + i;
      AddToPartial<Acc>(partial + target * args.channels + c, Load<Acc>(sums), present);
      if (kFixedB) {
        target += args.states;
        AddToPartial<Acc>(partial + target * args.channels + c, Load<Acc>(sums + kStates * L), present);
      }
      if (kFixedC) {
        target += args.states;
        AddToPartial<Acc>(partial + target * args.channels + c, Load<Acc>(sums + 2 * kStates * L), present);
      }
    }
  }
  if (!kFixedB) StoreTokenSums<Acc, kStates>(args, item, tiles, sequence, token, tokens, n, tiles.dB, args.dB_partials);
  if (!kFixedC) StoreTokenSums<Acc, kStates>(args, item, tiles, sequence, token, tokens, n, tiles.dC, args.dC_partials);
}

template <class Acc, bool kFixedB, bool kFixedC>
inline void ReverseBlock(const ScanBackwardArgs& args, const ScanItem& item, const ScanBackwardTiles<Acc>& tiles,
                         int64_t sequence, int64_t token, int64_t tokens, const Acc* before) {
  int64_t n = 0;
  for (; n + kScanStatesTogether <= args.states; n += kScanStatesTogether) {
    ReverseStates<Acc, kScanStatesTogether, kFixedB, kFixedC>(args, item, tiles, sequence, token, tokens, n, before);
  }
  for (; n < args.states; ++n) {
    ReverseStates<Acc, 1, kFixedB, kFixedC>(args, item, tiles, sequence, token, tokens, n, before);
  }
}

// The tiles of a block that do not depend on the states, for all lane groups; sums are set to 0.
template <class Acc>
inline void LoadBlock(const ScanBackwardArgs& args, const ScanItem& item, const ScanBackwardTiles<Acc>& tiles,
                      int64_t sequence, int64_t token, int64_t tokens) {
  constexpr int L = kLanes<Acc>;
  for (int64_t c = 0; c < item.channels; c += L) {
    const int lanes = LanesOf<Acc>(item, c);
    const int64_t channel = item.channel + c, tile = c * kScanTokens;
    LoadStep<Acc>(args, item, sequence, token, tokens, c, tiles.shared.bias, tiles.u + tile, tiles.delta + tile,
                  tiles.input + tile, tiles.slope + tile);
    Acc* dy = tiles.dy + tile;
    LoadTokens<Acc>(args.dy, TokenOffset(args, args.dy.strides, sequence, token, channel), tokens, lanes, dy);
    if (args.z.data != nullptr) {
      Acc* gate = tiles.dgate + tile;
      LoadTokens<Acc>(args.z, TokenOffset(args, args.z.strides, sequence, token, channel), tokens, lanes, gate);
      for (int64_t t = 0; t < tokens; ++t) {
        // silu(z) = z s and silu'(z) = s + z s (1 - s), s = sigmoid(z)
        const Vec<Acc> z = Load<Acc>(static_cast<const Acc*>(gate) + t * L);
        const Vec<Acc> d = Load<Acc>(static_cast<const Acc*>(dy) + t * L);
        const Vec<Acc> s = Sigmoid<Acc>(z);
        Store(gate + t * L, d * MulAdd(z * s, Acc(1) - s, s));
        Store(dy + t * L, d * (z * s));
      }
    }
    ClearTile<Acc>(tokens, L, tiles.y + tile, L);
    ClearTile<Acc>(tokens, L, tiles.dinput + tile, L);
    ClearTile<Acc>(tokens, L, tiles.drate + tile, L);
  }
}

// From the sums over the states to du, ddelta, dz, dD and ddelta_bias of a block.
template <class Acc>
inline void FinishBlock(const ScanBackwardArgs& args, const ScanItem& item, const ScanBackwardTiles<Acc>& tiles,
                        int64_t sequence, int64_t token, int64_t tokens) {
  constexpr int L = kLanes<Acc>;
  Acc* dskip_row = PartialOf<Acc>(args, item) + (ScanParameterRows(args) - 2) * args.channels;
  for (int64_t c = 0; c < item.channels; c += L) {
    const int lanes = LanesOf<Acc>(item, c);
    const int64_t channel = item.channel + c, tile = c * kScanTokens;
    const Vec<Acc> skip = Load<Acc>(static_cast<const Acc*>(tiles.shared.skip) + c);
    Vec<Acc> dskip = Zero<Acc>(), dbias = Zero<Acc>();
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t place = tile + t * L;
      const Vec<Acc> u = Load<Acc>(static_cast<const Acc*>(tiles.u) + place);
      const Vec<Acc> g = Load<Acc>(static_cast<const Acc*>(tiles.dy) + place);
      const Vec<Acc> din = Load<Acc>(static_cast<const Acc*>(tiles.dinput) + place);
      const Vec<Acc> step = Load<Acc>(static_cast<const Acc*>(tiles.delta) + place);
      Vec<Acc> y = Load<Acc>(static_cast<const Acc*>(tiles.y) + place);
      Vec<Acc> du = step * din;
      if (args.D != nullptr) {
        y = MulAdd(skip, u, y);
        du = MulAdd(skip, g, du);
      }
      const Vec<Acc> ddelta = MulAdd(u, din, Load<Acc>(static_cast<const Acc*>(tiles.drate) + place)) *
                              Load<Acc>(static_cast<const Acc*>(tiles.slope) + place);
      dskip = MulAdd(g, u, dskip);
      dbias = dbias + ddelta;
      // The inputs are used up: their tiles take the gradients.
      Store(tiles.u + place, du);
      Store(tiles.delta + place, ddelta);
      if (args.z.data != nullptr) {
        Store(tiles.dgate + place, y * Load<Acc>(static_cast<const Acc*>(tiles.dgate) + place));
      }
    }
    StoreTokens<Acc>(args.du, TokenOffset(args, args.du.strides, sequence, token, channel), tokens, lanes,
                     tiles.u + tile);
    StoreTokens<Acc>(args.ddelta, TokenOffset(args, args.ddelta.strides, sequence, token, channel), tokens, lanes,
                     tiles.delta + tile);
    if (args.z.data != nullptr) {
      StoreTokens<Acc>(args.dz, TokenOffset(args, args.dz.strides, sequence, token, channel), tokens, lanes,
                       tiles.dgate + tile);
    }
    AddToPartial<Acc>(dskip_row + c, dskip, lanes);
    AddToPartial<Acc>(dskip_row + args.channels + c, dbias, lanes);
  }
}

// Checkpoints of a span: the states before each block, of which the first stands in `checkpoints` already.
template <class Acc>
inline void RecomputeCheckpoints(const ScanBackwardArgs& args, const ScanItem& item,
                                 const ScanBackwardTiles<Acc>& tiles, int64_t sequence, int64_t length) {
  constexpr int L = kLanes<Acc>;
  const int64_t size = args.states * kScanChannels;
  Acc* before = tiles.checkpoints;
  for (int64_t token = 0; token + kScanTokens < length; token += kScanTokens) {
    LoadCoefficients<Acc>(args, args.B, item, sequence, token, kScanTokens, tiles.shared.B, tiles.shared.stride);
    for (int64_t c = 0; c < item.channels; c += L) {
      const int64_t tile = c * kScanTokens;
      LoadStep<Acc>(args, item, sequence, token, kScanTokens, c, tiles.shared.bias, tiles.u + tile, tiles.delta + tile,
                    tiles.input + tile, nullptr);
    }
    const uint8_t* begins = BeginsAt(args, item, sequence, token);
    if (args.B.fixed) {
      AdvanceStates<Acc, true>(args, item, tiles, begins, before, before + size);
    } else {
      AdvanceStates<Acc, false>(args, item, tiles, begins, before, before + size);
    }
    before += size;
  }
}

template <class Acc>
void ScanBackwardItem(const ScanBackwardArgs& args, const ScanItem& item, int64_t longest, void* scratch) {
  constexpr int L = kLanes<Acc>;
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const ScanBackwardTiles<Acc> tiles(args, longest, pieces);
  const ScanTiles<Acc>& shared = tiles.shared;
  LoadParameters<Acc>(args, item, shared);
  Acc* partial = PartialOf<Acc>(args, item);
  for (int64_t row = 0; row < ScanParameterRows(args); ++row) {
    for (int64_t c = 0; c < item.channels; c += L) {
      StoreUpTo(partial + row * args.channels + c, Zero<Acc>(), LanesOf<Acc>(item, c));
    }
  }
  for (int64_t n = item.first, end; n < item.last; n = end) {
    end = SpanEnd(args, item, n);
    const int64_t length = args.packing.eos(end - 1) - args.packing.bos(n), state_size = args.channels * args.states;
    const Acc* dfinal = static_cast<const Acc*>(args.dfinal_state);
    if (dfinal != nullptr) dfinal += n * state_size;
    LoadChannelRows<Acc>(args, item, dfinal, tiles.dstate);
    if (length > 0) {
      LoadInitialState<Acc>(args, item, n, tiles.checkpoints);
      RecomputeCheckpoints<Acc>(args, item, tiles, n, length);
    }
    for (int64_t block = (length + kScanTokens - 1) / kScanTokens - 1; block >= 0; --block) {
      const int64_t token = block * kScanTokens;
      const int64_t tokens = length - token < kScanTokens ? length - token : kScanTokens;
      const Acc* before = tiles.checkpoints + block * args.states * kScanChannels;
      LoadCoefficients<Acc>(args, args.B, item, n, token, tokens, shared.B, shared.stride);
      LoadCoefficients<Acc>(args, args.C, item, n, token, tokens, shared.C, shared.stride);
      LoadBlock<Acc>(args, item, tiles, n, token, tokens);
      if (args.B.fixed && args.C.fixed) {
        ReverseBlock<Acc, true, true>(args, item, tiles, n, token, tokens, before);
      } else if (args.B.fixed) {
        ReverseBlock<Acc, true, false>(args, item, tiles, n, token, tokens, before);
      } else if (args.C.fixed) {
        ReverseBlock<Acc, false, true>(args, item, tiles, n, token, tokens, before);
      } else {
        ReverseBlock<Acc, false, false>(args, item, tiles, n, token, tokens, before);
      }
      FinishBlock<Acc>(args, item, tiles, n, token, tokens);
    }
    if (args.dinitial_state != nullptr) {
      StoreChannelRows<Acc>(args, item, tiles.dstate, static_cast<Acc*>(args.dinitial_state) + n * state_size);
    }
  }
}

// dB or dC of tokens [first, last) of all rows: the sums of the channel blocks of each group, in order.
template <class Acc, class Elem>
inline void ReduceTokensAs(const ScanBackwardArgs& args, const void* partials, void* target, int64_t first,
                           int64_t last) {
  constexpr int L = kLanes<Acc>;
  const int64_t blocks = ScanChannelBlocks(args) / args.groups;
  const Acc* source = static_cast<const Acc*>(partials);
  for (int64_t token = first; token < last; ++token) {
    for (int64_t g = 0; g < args.groups; ++g) {
      Elem* out = static_cast<Elem*>(target) + (token * args.groups + g) * args.states;
      for (int64_t n = 0; n < args.states; n += L) {
        const int lanes = args.states - n < L ? static_cast<int>(args.states - n) : L;
        Vec<Acc> sum = Zero<Acc>();
        for (int64_t b = g * blocks; b < (g + 1) * blocks; ++b) {
          sum = sum + LoadUpTo<Acc>(source + (b * args.packing.tokens + token) * args.states + n, lanes);
        }
        StoreUpTo(out + n, sum, lanes);
      }
    }
  }
}
template <class Acc>
void ScanReduceTokens(const ScanBackwardArgs& args, const ScanCoefficients& input, const void* partials, void* target,
                      int64_t first, int64_t last) {
  if constexpr (std::is_same_v<Acc, double>) {
    ReduceTokensAs<double, double>(args, partials, target, first, last);
  } else {
    if (input.dtype == Dtype::kFloat32) ReduceTokensAs<float, float>(args, partials, target, first, last);
    if (input.dtype == Dtype::kBFloat16) ReduceTokensAs<float, bf16>(args, partials, target, first, last);
    if (input.dtype == Dtype::kFloat16) ReduceTokensAs<float, fp16>(args, partials, target, first, last);
  }
}
