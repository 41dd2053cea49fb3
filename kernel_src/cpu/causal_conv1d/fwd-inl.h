// Forward source of the causal convolution. It serves both memory orders of x: registers run along whichever axis
// is contiguous. Channel-last, a register is kLanes channels of one token; else it is kLanes tokens of one channel. In
// both, tap j of a register lies j tokens before it in memory, so the inner arithmetic is the same.

template <class Acc, int W>
struct ConvFilter {
  Vec<Acc> tap[W];  // tap[k] multiplies the token W - 1 - k places back
  Vec<Acc> bias;
};

// The filter of `lanes` channels from `channel` on, or of the one channel `channel` in every lane.
template <class Acc, int W, bool kChannelsLast>
PACKFREE_INLINE ConvFilter<Acc, W> LoadFilter(const ConvArgs& args, int64_t channel, int lanes) {
  const Acc* weight = static_cast<const Acc*>(args.weight) + channel;
  const Acc* bias = static_cast<const Acc*>(args.bias);
  ConvFilter<Acc, W> filter;
  for (int k = 0; k < W; ++k) {
    const Acc* tap = weight + k * args.channels;
    filter.tap[k] = kChannelsLast ? LoadUpTo<Acc>(tap, lanes) : Set<Acc>(*tap);
  }
  filter.bias = Zero<Acc>();
  if (bias != nullptr) {
    filter.bias = kChannelsLast ? LoadUpTo<Acc>(bias + channel, lanes) : Set<Acc>(bias[channel]);
  }
  return filter;
}

// z[t] = bias + sum over k of tap[k] x[t - (W - 1) + k]; `lag` is the distance of neighbouring tokens.
template <class Acc, int W, class Source>
PACKFREE_INLINE Vec<Acc> Convolve(const ConvFilter<Acc, W>& filter, const Source* x, int64_t lag, int lanes) {
  Vec<Acc> z = filter.bias;
  for (int k = 0; k < W; ++k) z = MulAdd(filter.tap[k], LoadUpTo<Acc>(x - (W - 1 - k) * lag, lanes), z);
  return z;
}

// How many lanes of the register at token t are in use.
template <class Acc, bool kChannelsLast>
PACKFREE_INLINE int LanesAt(int64_t t, int64_t tokens, int channels) {
  if (kChannelsLast) return channels;
  return tokens - t < kLanes<Acc> ? static_cast<int>(tokens - t) : kLanes<Acc>;
}

// y of `tokens` consecutive tokens of one lane group. x[-1], ..., x[-(W - 1)] (in tokens) are readable.
template <class Acc, int W, bool kChannelsLast, class Source, class Elem>
PACKFREE_INLINE void ForwardTokens(const ConvFilter<Acc, W>& filter, bool silu, const Source* x, int64_t x_token,
                                   Elem* y, int64_t y_token, int64_t tokens, int channels) {
  constexpr int64_t kStep = kChannelsLast ? 1 : kLanes<Acc>;
  for (int64_t t = 0; t < tokens; t += kStep) {
    const int lanes = LanesAt<Acc, kChannelsLast>(t, tokens, channels);
    Vec<Acc> z = Convolve<Acc, W>(filter, x + t * x_token, x_token, lanes);
    if (silu) z = z * Sigmoid<Acc>(z);
    StoreUpTo(y + t * y_token, z, lanes);
  }
}

// The first tokens of a sequence see its initial state. `window` gets the state's W - 1 tokens and then the first
// `tokens` tokens of x, so that the same arithmetic runs over it; neighbouring tokens lie `kWindowToken` apart.
template <class Acc, bool kChannelsLast>
constexpr int64_t kWindowToken = kChannelsLast ? kLanes<Acc> : 1;
// Registers of a window: W - 1 tokens of state and as many of x, and room for a whole register behind them.
template <int W>
constexpr int kWindowRegisters = 2 * (W - 1) + 1;

template <class Acc, int W, bool kChannelsLast, class Elem>
PACKFREE_INLINE void LoadWindow(const ConvArgs& args, int64_t sequence, int64_t channel, int channels, const Elem* x,
                                int64_t tokens, Acc* window) {
  constexpr int64_t kToken = kWindowToken<Acc, kChannelsLast>;
  const Acc* state = static_cast<const Acc*>(args.initial_state);
  if (state != nullptr) state += (sequence * args.channels + channel) * (W - 1);
  for (int i = 0; i < W - 1; ++i) {
    for (int c = 0; c < channels; ++c) window[i * kToken + c] = state == nullptr ? Acc(0) : state[c * (W - 1) + i];
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int c = 0; c < channels; ++c) {
      window[(W - 1 + t) * kToken + c] = LoadOne<Acc>(x + t * args.x_strides.token + c * args.x_strides.channel);
    }
  }
}

// First element of token `token` of a sequence in a tensor with these strides.
template <class Elem>
PACKFREE_INLINE Elem* TokenAt(Elem* data, const ConvStrides& strides, const ConvArgs& args, int64_t sequence,
                              int64_t token, int64_t channel) {
  const int64_t index = args.packing.bos(sequence) + token;
  return data + index / args.row_tokens * strides.row + index % args.row_tokens * strides.token +
         channel * strides.channel;
}

// State after the sequence's last token: its last W - 1 tokens, older ones from the initial state.
template <class Acc, int W, class Elem>
inline void StoreFinalState(const ConvForwardArgs& args, int64_t sequence, int64_t channel, int64_t channels) {
  const Elem* x = static_cast<const Elem*>(args.x);
  const Acc* initial = static_cast<const Acc*>(args.initial_state);
  Elem* final_state = static_cast<Elem*>(args.final_state);
  const int64_t length = args.packing.length(sequence);
  for (int64_t c = channel; c < channel + channels; ++c) {
    const int64_t row = (sequence * args.channels + c) * (W - 1);
    for (int i = 0; i < W - 1; ++i) {
      const int64_t token = length - (W - 1) + i;
      if (token >= 0) {
        final_state[row + i] = *TokenAt(x, args.x_strides, args, sequence, token, c);
      } else {
        StoreOne(final_state + row + i, initial == nullptr ? Acc(0) : initial[row + length + i]);
      }
    }
  }
}

// Outputs of tokens [begin, end) of a sequence for `channels` channels from `channel` on.
template <class Acc, int W, bool kChannelsLast, class Elem>
inline void ForwardBlock(const ConvForwardArgs& args, const SequenceBlock& block, int64_t channel, int64_t channels) {
  constexpr int64_t kGroup = kChannelsLast ? kLanes<Acc> : 1;
  const int64_t x_token = args.x_strides.token, y_token = args.y_strides.token;
  const Elem* x = TokenAt(static_cast<const Elem*>(args.x), args.x_strides, args, block.sequence, 0, channel);
  Elem* y = TokenAt(static_cast<Elem*>(args.y), args.y_strides, args, block.sequence, 0, channel);
  for (int64_t c = 0; c < channels; c += kGroup) {
    const int present = channels - c < kGroup ? static_cast<int>(channels - c) : static_cast<int>(kGroup);
    const ConvFilter<Acc, W> filter = LoadFilter<Acc, W, kChannelsLast>(args, channel + c, present);
    const Elem* x_c = x + c * args.x_strides.channel;
    Elem* y_c = y + c * args.y_strides.channel;
    int64_t begin = block.begin;
    if (begin == 0) {
      const int64_t head = block.end < W - 1 ? block.end : W - 1;
      Acc window[kWindowRegisters<W> * kLanes<Acc>] = {};
      LoadWindow<Acc, W, kChannelsLast>(args, block.sequence, channel + c, present, x_c, head, window);
      constexpr int64_t kToken = kWindowToken<Acc, kChannelsLast>;
      ForwardTokens<Acc, W, kChannelsLast>(filter, args.silu, static_cast<const Acc*>(window) + (W - 1) * kToken,
                                           kToken, y_c, y_token, head, present);
      begin = head;
    }
    ForwardTokens<Acc, W, kChannelsLast>(filter, args.silu, x_c + begin * x_token, x_token, y_c + begin * y_token,
                                         y_token, block.end - begin, present);
  }
}
