// Backward source of the causal convolution, in the order of fwd-inl.h.
//
// z is recomputed from x. With dz = dy silu'(z) and w[j] the weight of the token j places back:
//   dx[t] = sum over j of w[j] dz[t + j],   dw[j] = sum over t of dz[t] x[t - j],   dbias = sum over t of dz[t].
// A block sums the parameters' gradients over its own tokens only, not over those that it borrows from the next one.

// silu'(z) = s + z s (1 - s) with s = sigmoid(z)
template <class Acc>
PACKFREE_INLINE Vec<Acc> SiluDerivative(Vec<Acc> z) {
  const Vec<Acc> s = Sigmoid<Acc>(z);
  return MulAdd(z * s, Acc(1) - s, s);
}

// dz of the register at `place`, and what it saw. `whole`: it is full and every lane may look W - 1 tokens back.
template <class Acc, int W, bool kChannelsLast, class Elem>
PACKFREE_INLINE Vec<Acc> PreactivationGradient(const ConvBackwardArgs& args, const ConvBlock& block,
                                               const ConvFilter<Acc, W>& filter, const Elem* x, const Elem* dy,
                                               const ConvPlace& place, bool whole, Vec<Acc> (&seen)[W]) {
  if (whole) {
    LoadSeen<Acc, W>(x, args.x_strides.token, seen);
  } else {
    LoadSeenAnywhere<Acc, W, kChannelsLast>(args, block, x, place, seen);
  }
  const Vec<Acc> d = LoadUpTo<Acc>(dy, place.lanes);
  return args.silu ? d * SiluDerivative<Acc>(Convolve<Acc, W>(filter, seen)) : d;
}

// The gradient of the final states at the register at `place`: a sequence's last W - 1 tokens are its final state too.
template <class Acc, int W, bool kChannelsLast>
inline Vec<Acc> FinalStateGradient(const ConvBackwardArgs& args, const ConvBlock& block, const ConvPlace& place) {
  const Acc* dfinal = static_cast<const Acc*>(args.dfinal_state);
  Acc lanes[kLanes<Acc>] = {};
  for (int i = 0; dfinal != nullptr && i < place.lanes; ++i) {
    const int64_t token = block.first + place.t + (kChannelsLast ? 0 : i);
    const int64_t channel = place.channel + (kChannelsLast ? i : 0);
    const int64_t sequence = SequenceOf(args.packing, token);
    const int64_t behind = args.packing.eos(sequence) - token;  // 1 for the last token
    if (behind < W) lanes[i] = dfinal[(sequence * args.channels + channel) * (W - 1) + (W - 1) - behind];
  }
  return Load<Acc>(static_cast<const Acc*>(lanes));
}

// dx of the register at `place` from dz[j], the register j tokens behind it. `whole`: it is full, and the samples of
// all its tokens go on for W - 1 tokens.
template <class Acc, int W, bool kChannelsLast>
PACKFREE_INLINE Vec<Acc> InputGradient(const ConvBackwardArgs& args, const ConvBlock& block,
                                       const ConvFilter<Acc, W>& filter, const ConvPlace& place, bool whole,
                                       const Vec<Acc> (&dz)[W]) {
  const int32_t* reach = block.reach + place.t;
  Vec<Acc> sum = whole ? Zero<Acc>() : FinalStateGradient<Acc, W, kChannelsLast>(args, block, place);
  for (int j = 0; j < W; ++j) {
    Vec<Acc> d = dz[j];
    if (!whole && kChannelsLast) d = reach[j] >= j ? d : Zero<Acc>();
    if (!whole && !kChannelsLast) d = Select(LoadReach<Acc>(reach + j) >= j, d, Zero<Acc>());
    sum = MulAdd(filter.tap[W - 1 - j], d, sum);
  }
  return sum;
}

// Gradient of the initial state of the sequence that begins at a token: the state stands W - 1 tokens
// before it, and in a sequence that is shorter than that, some of it is the final state too. dz[i] are `channels`
// numbers of the sequence's token i.
template <class Acc, int W>
inline void InitialStateGradient(const ConvBackwardArgs& args, int64_t token, int64_t channel, int64_t channels,
                                 const Acc* const (&dz)[W]) {
  const int64_t sequence = SequenceOf(args.packing, token), length = args.packing.length(sequence);
  const Acc* weight = static_cast<const Acc*>(args.weight) + channel;
  const int64_t row = (sequence * args.channels + channel) * (W - 1);
  Acc* out = static_cast<Acc*>(args.dinitial_state) + row;
  const Acc* dfinal = static_cast<const Acc*>(args.dfinal_state);
  for (int64_t c = 0; c < channels; ++c) {
    for (int i = 0; i < W - 1; ++i) {
      Acc sum = dfinal != nullptr && i >= length ? dfinal[row + c * (W - 1) + i - length] : Acc(0);
      for (int j = W - 1 - i; j < W && i + j - (W - 1) < length; ++j) {
        sum += weight[(W - 1 - j) * args.channels + c] * dz[i + j - (W - 1)][c];
      }
      out[c * (W - 1) + i] = sum;
    }
  }
}

// Tokens behind the block, W - 1 at most, that its last ones are seen by if their samples go on.
template <int W>
inline int64_t BorrowedTokens(const ConvBlock& block) {
  int64_t more = 0;
  while (more < W - 1 && block.reach[block.last - block.first + more] > more) ++more;
  return more;
}

// Gradients of the tokens of a block, tokens side by side in memory: channel by channel. `partials` [W + 1, D] is
// added to.
template <class Acc, int W, class Elem>
inline void BackwardTokenLast(const ConvBackwardArgs& args, const ConvBlock& block, int64_t channel, int64_t channels,
                              Acc* partials) {
  constexpr int L = kLanes<Acc>;
  const int64_t tokens = block.last - block.first, more = BorrowedTokens<W>(block);
  const Elem* x = TokenAt(static_cast<const Elem*>(args.x), args.x_strides, args, block.first, channel);
  const Elem* dy = TokenAt(static_cast<const Elem*>(args.dy), args.dy_strides, args, block.first, channel);
  Elem* dx = TokenAt(static_cast<Elem*>(args.dx), args.dx_strides, args, block.first, channel);
  bool far[kConvGroupTokens], far_ahead[kConvGroupTokens];
  MarkFar<Acc, W, false>(block, 0, far);
  MarkFar<Acc, W, false>(block, W - 1, far_ahead);
  Acc dz[kConvGroupTokens + kConvMaxWidth + 2 * L];
  for (int64_t c = 0; c < channels; ++c) {
    const ConvFilter<Acc, W> filter = LoadFilter<Acc, W, false>(args, channel + c, L);
    const Elem* x_c = x + c * args.x_strides.channel;
    const Elem* dy_c = dy + c * args.dy_strides.channel;
    Elem* dx_c = dx + c * args.dx_strides.channel;
    Vec<Acc> dtap[W], dbias = Zero<Acc>(), seen[W];
    for (int k = 0; k < W; ++k) dtap[k] = Zero<Acc>();
    for (int64_t t = 0; t < tokens; t += L) {
      const ConvPlace place = PlaceAt<Acc, false>(c, t, tokens, channel);
      const bool whole = place.lanes == L && far[t / L];
      const Vec<Acc> d =
          PreactivationGradient<Acc, W, false>(args, block, filter, x_c + t, dy_c + t, place, whole, seen);
      Store(dz + t, d);
      for (int k = 0; k < W; ++k) dtap[k] = MulAdd(d, seen[k], dtap[k]);
      dbias = dbias + d;
    }
    for (int64_t t = tokens; t < tokens + W - 1; t += L) {
      Vec<Acc> d = Zero<Acc>();
      if (t < tokens + more) {
        const ConvPlace place = PlaceAt<Acc, false>(c, t, tokens + more, channel);
        d = PreactivationGradient<Acc, W, false>(args, block, filter, x_c + t, dy_c + t, place, false, seen);
      }
      Store(dz + t, d);
    }
    for (int64_t t = 0; t < tokens; t += L) {
      const ConvPlace place = PlaceAt<Acc, false>(c, t, tokens, channel);
      Vec<Acc> behind[W];
      for (int j = 0; j < W; ++j) behind[j] = Load<Acc>(static_cast<const Acc*>(dz + t + j));
      const bool whole = place.lanes == L && far_ahead[t / L];
      StoreUpTo(dx_c + t, InputGradient<Acc, W, false>(args, block, filter, place, whole, behind), place.lanes);
    }
    for (int64_t t = 0; args.dinitial_state != nullptr && t < tokens; ++t) {
      if (block.reach[t] != 0) continue;
      const Acc* first[W];
      for (int j = 0; j < W; ++j) first[j] = dz + t + j;
      InitialStateGradient<Acc, W>(args, block.first + t, channel + c, 1, first);
    }
    for (int k = 0; k < W; ++k) partials[k * args.channels + channel + c] += ReduceSum<Acc>(dtap[k]);
    partials[W * args.channels + channel + c] += ReduceSum<Acc>(dbias);
  }
}

// The same, channels side by side in memory: token by token, and dx follows W - 1 tokens behind dz.
template <class Acc, int W, class Elem>
inline void BackwardChannelLast(const ConvBackwardArgs& args, const ConvBlock& block, int64_t channel, int64_t channels,
                                Acc* partials) {
  constexpr int L = kLanes<Acc>;
  const int64_t tokens = block.last - block.first, more = BorrowedTokens<W>(block);
  const Elem* x = TokenAt(static_cast<const Elem*>(args.x), args.x_strides, args, block.first, channel);
  const Elem* dy = TokenAt(static_cast<const Elem*>(args.dy), args.dy_strides, args, block.first, channel);
  Elem* dx = TokenAt(static_cast<Elem*>(args.dx), args.dx_strides, args, block.first, channel);
  bool far[kConvGroupTokens], far_ahead[kConvGroupTokens];
  MarkFar<Acc, W, true>(block, 0, far);
  MarkFar<Acc, W, true>(block, W - 1, far_ahead);
  // dz of the last W tokens, and the sums; the columns behind `channels` are written and never used.
  Acc dz[W][kConvItemChannels] = {}, sums[W + 1][kConvItemChannels] = {};
  for (int64_t t = 0; t < tokens + W - 1; ++t) {
    for (int64_t column = 0; t < tokens + more && column < channels; column += L) {
      const ConvPlace place = PlaceAt<Acc, true>(t, column, channels, channel);
      const ConvFilter<Acc, W> filter = LoadFilter<Acc, W, true>(args, place.channel, place.lanes);
      const bool whole = t < tokens && place.lanes == L && far[t];
      Vec<Acc> seen[W];
      const Vec<Acc> d =
          PreactivationGradient<Acc, W, true>(args, block, filter, x + t * args.x_strides.token + column,
                                              dy + t * args.dy_strides.token + column, place, whole, seen);
      Store(dz[t % W] + column, d);
      if (t >= tokens) continue;
      for (int k = 0; k < W; ++k) {
        Acc* sum = sums[k] + column;
        Store(sum, MulAdd(d, seen[k], Load<Acc>(static_cast<const Acc*>(sum))));
      }
      Acc* sum = sums[W] + column;
      Store(sum, Load<Acc>(static_cast<const Acc*>(sum)) + d);
    }
    const int64_t done = t - (W - 1);
    if (done < 0) continue;
    const Acc* rows[W];
    for (int j = 0; j < W; ++j) rows[j] = dz[(done + j) % W];
    for (int64_t column = 0; column < channels; column += L) {
      const ConvPlace place = PlaceAt<Acc, true>(done, column, channels, channel);
      const ConvFilter<Acc, W> filter = LoadFilter<Acc, W, true>(args, place.channel, place.lanes);
      Vec<Acc> behind[W];
      for (int j = 0; j < W; ++j) behind[j] = Load<Acc>(rows[j] + column);
      const bool whole = place.lanes == L && far_ahead[done];
      StoreUpTo(dx + done * args.dx_strides.token + column,
                InputGradient<Acc, W, true>(args, block, filter, place, whole, behind), place.lanes);
    }
    if (args.dinitial_state != nullptr && block.reach[done] == 0) {
      InitialStateGradient<Acc, W>(args, block.first + done, channel, channels, rows);
    }
  }
  for (int k = 0; k <= W; ++k) {
    for (int64_t c = 0; c < channels; ++c) partials[k * args.channels + channel + c] += sums[k][c];
  }
}
