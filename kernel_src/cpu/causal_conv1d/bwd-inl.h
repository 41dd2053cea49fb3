// Backward source of the causal convolution, in the order of fwd-inl.h.
//
// z is recomputed from x. With dz = dy silu'(z) and w[j] the weight of the token j places back:
//   dx[t] = sum over j of w[j] dz[t + j],   dw[j] = sum over t of dz[t] x[t - j],   dbias = sum over t of dz[t].

// Gradients of the parameters, summed over the tokens of a block.
template <class Acc, int W>
struct ConvFilterGradient {
  Vec<Acc> tap[W];
  Vec<Acc> bias;
};

// silu'(z) = s + z s (1 - s) with s = sigmoid(z)
template <class Acc>
PACKFREE_INLINE Vec<Acc> SiluDerivative(Vec<Acc> z) {
  const Vec<Acc> s = Sigmoid<Acc>(z);
  return MulAdd(z * s, Acc(1) - s, s);
}

// dz of `tokens` consecutive tokens of one lane group, written to `dz`. kSum adds them to the parameter gradients too:
// a block sums its own tokens only, not the ones that it borrows from the next block.
template <class Acc, int W, bool kChannelsLast, bool kSum, class Source, class Elem>
PACKFREE_INLINE void BackwardTokens(const ConvFilter<Acc, W>& filter, bool silu, const Source* x, int64_t x_token,
                                    const Elem* dy, int64_t dy_token, Acc* dz, int64_t tokens, int channels,
                                    ConvFilterGradient<Acc, W>* gradient) {
  constexpr int64_t kStep = kChannelsLast ? 1 : kLanes<Acc>;
  constexpr int64_t kToken = kWindowToken<Acc, kChannelsLast>;
  for (int64_t t = 0; t < tokens; t += kStep) {
    const int lanes = LanesAt<Acc, kChannelsLast>(t, tokens, channels);
    Vec<Acc> d = LoadUpTo<Acc>(dy + t * dy_token, lanes);
    if (silu) d = d * SiluDerivative<Acc>(Convolve<Acc, W>(filter, x + t * x_token, x_token, lanes));
    StoreUpTo(dz + t * kToken, d, lanes);
    if (kSum) {
      for (int k = 0; k < W; ++k) {
        const Vec<Acc> seen = LoadUpTo<Acc>(x + (t - (W - 1 - k)) * x_token, lanes);
        gradient->tap[k] = MulAdd(d, seen, gradient->tap[k]);
      }
      gradient->bias = gradient->bias + d;
    }
  }
}

// dx of `tokens` consecutive tokens from dz, plus `extra` where given (laid out like dz).
template <class Acc, int W, bool kChannelsLast, class Elem>
PACKFREE_INLINE void InputGradient(const ConvFilter<Acc, W>& filter, const Acc* dz, const Acc* extra, Elem* dx,
                                   int64_t dx_token, int64_t tokens, int channels) {
  constexpr int64_t kStep = kChannelsLast ? 1 : kLanes<Acc>;
  constexpr int64_t kToken = kWindowToken<Acc, kChannelsLast>;
  for (int64_t t = 0; t < tokens; t += kStep) {
    const int lanes = LanesAt<Acc, kChannelsLast>(t, tokens, channels);
    Vec<Acc> sum = extra == nullptr ? Zero<Acc>() : LoadUpTo<Acc>(extra + t * kToken, lanes);
    for (int j = 0; j < W; ++j) {
      sum = MulAdd(filter.tap[W - 1 - j], LoadUpTo<Acc>(dz + (t + j) * kToken, lanes), sum);
    }
    StoreUpTo(dx + t * dx_token, sum, lanes);
  }
}

// Gradient of the initial state of one lane group: it stands W - 1 tokens before the sequence, and in a sequence that
// is shorter than that, some of it is the final state too.
template <class Acc, int W, bool kChannelsLast>
inline void StateGradient(const ConvBackwardArgs& args, int64_t sequence, int64_t channel, int channels,
                          const Acc* dz) {
  constexpr int64_t kToken = kWindowToken<Acc, kChannelsLast>;
  const Acc* weight = static_cast<const Acc*>(args.weight) + channel;
  const int64_t row = (sequence * args.channels + channel) * (W - 1);
  Acc* out = static_cast<Acc*>(args.dinitial_state) + row;
  const Acc* dfinal = static_cast<const Acc*>(args.dfinal_state);
  const int64_t length = args.packing.length(sequence);
  for (int c = 0; c < channels; ++c) {
    for (int i = 0; i < W - 1; ++i) {
      Acc sum = dfinal != nullptr && i >= length ? dfinal[row + c * (W - 1) + i - length] : Acc(0);
      for (int j = W - 1 - i; j < W && i + j - (W - 1) < length; ++j) {
        sum += weight[(W - 1 - j) * args.channels + c] * dz[(i + j - (W - 1)) * kToken + c];
      }
      out[c * (W - 1) + i] = sum;
    }
  }
}

// Gradients of tokens [begin, end) of a sequence for `channels` channels from `channel` on. `dz` has room for
// the block's tokens and W - 1 more, of one lane group. `partials` [W + 1, D] is added to.
template <class Acc, int W, bool kChannelsLast, class Elem>
inline void BackwardBlock(const ConvBackwardArgs& args, const SequenceBlock& block, int64_t channel, int64_t channels,
                          Acc* dz, Acc* partials) {
  constexpr int64_t kGroup = kChannelsLast ? kLanes<Acc> : 1;
  constexpr int64_t kToken = kWindowToken<Acc, kChannelsLast>;
  const int64_t x_token = args.x_strides.token, dy_token = args.dy_strides.token, dx_token = args.dx_strides.token;
  const Elem* x = TokenAt(static_cast<const Elem*>(args.x), args.x_strides, args, block.sequence, 0, channel);
  const Elem* dy = TokenAt(static_cast<const Elem*>(args.dy), args.dy_strides, args, block.sequence, 0, channel);
  Elem* dx = TokenAt(static_cast<Elem*>(args.dx), args.dx_strides, args, block.sequence, 0, channel);
  const Acc* dfinal = static_cast<const Acc*>(args.dfinal_state);
  const int64_t length = args.packing.length(block.sequence);
  const int64_t reach = block.end + W - 1 < length ? block.end + W - 1 : length;
  for (int64_t c = 0; c < channels; c += kGroup) {
    const int present = channels - c < kGroup ? static_cast<int>(channels - c) : static_cast<int>(kGroup);
    const ConvFilter<Acc, W> filter = LoadFilter<Acc, W, kChannelsLast>(args, channel + c, present);
    const Elem* x_c = x + c * args.x_strides.channel;
    const Elem* dy_c = dy + c * args.dy_strides.channel;
    ConvFilterGradient<Acc, W> gradient;
    for (int k = 0; k < W; ++k) gradient.tap[k] = Zero<Acc>();
    gradient.bias = Zero<Acc>();

    // dz of the block's own tokens, the first of which see the initial state; then of up to W - 1 tokens behind it.
    int64_t begin = block.begin;
    if (begin == 0) {
      const int64_t head = block.end < W - 1 ? block.end : W - 1;
      Acc window[kWindowRegisters<W> * kLanes<Acc>] = {};
      LoadWindow<Acc, W, kChannelsLast>(args, block.sequence, channel + c, present, x_c, head, window);
      const Acc* window_x = window + (W - 1) * kToken;
      BackwardTokens<Acc, W, kChannelsLast, true>(filter, args.silu, window_x, kToken, dy_c, dy_token, dz, head,
                                                  present, &gradient);
      begin = head;
    }
    BackwardTokens<Acc, W, kChannelsLast, true>(filter, args.silu, x_c + begin * x_token, x_token,
                                                dy_c + begin * dy_token, dy_token, dz + (begin - block.begin) * kToken,
                                                block.end - begin, present, &gradient);
    BackwardTokens<Acc, W, kChannelsLast, false>(
        filter, args.silu, x_c + block.end * x_token, x_token, dy_c + block.end * dy_token, dy_token,
        dz + (block.end - block.begin) * kToken, reach - block.end, present, &gradient);
    for (int64_t t = reach - block.begin; t < block.end - block.begin + W - 1; ++t) {
      for (int lane = 0; lane < present; ++lane) dz[t * kToken + lane] = Acc(0);
    }

    // dx, in two stretches: the last W - 1 tokens of the sequence are also its final state.
    Elem* dx_c = dx + c * args.dx_strides.channel;
    const int64_t tail = length - (W - 1) > block.begin ? length - (W - 1) : block.begin;
    const int64_t split = dfinal == nullptr || tail > block.end ? block.end : tail;
    InputGradient<Acc, W, kChannelsLast>(filter, dz, static_cast<const Acc*>(nullptr), dx_c + block.begin * dx_token,
                                         dx_token, split - block.begin, present);
    if (split < block.end) {
      Acc extra[kWindowRegisters<W> * kLanes<Acc>] = {};
      for (int64_t t = split; t < block.end; ++t) {
        for (int lane = 0; lane < present; ++lane) {
          const int64_t row = (block.sequence * args.channels + channel + c + lane) * (W - 1);
          extra[(t - split) * kToken + lane] = dfinal[row + t - (length - (W - 1))];
        }
      }
      InputGradient<Acc, W, kChannelsLast>(filter, dz + (split - block.begin) * kToken, extra, dx_c + split * dx_token,
                                           dx_token, block.end - split, present);
    }
    if (block.begin == 0 && args.dinitial_state != nullptr) {
      StateGradient<Acc, W, kChannelsLast>(args, block.sequence, channel + c, present, dz);
    }

    for (int k = 0; k <= W; ++k) {
      Acc* target = partials + k * args.channels + channel + c;
      const Vec<Acc> sum = k < W ? gradient.tap[k] : gradient.bias;
      if (kChannelsLast) {
        StoreUpTo(target, LoadUpTo<Acc>(target, present) + sum, present);
      } else {
        *target += ReduceSum<Acc>(sum);
      }
    }
  }
}
