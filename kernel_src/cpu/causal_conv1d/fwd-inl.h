// Forward source of the causal convolution. It serves both memory orders of x: registers run along whichever axis
// is contiguous. Channel-last, a register is kLanes channels of one token; else it is kLanes tokens of one channel. In
// both, tap j of a register lies j tokens before it in memory, so the inner arithmetic is the same.
//
// The pack is walked block by block, whatever its samples: each token knows how far it may look back.

template <class Acc, int W>
struct ConvFilter {
  Vec<Acc> tap[W];  // tap[k] multiplies the token W - 1 - k places back
  Vec<Acc> bias;
};

// A register's place in a block: `lanes` channels of token t from `channel` on, or of `channel` tokens t, t + 1, ...
struct ConvPlace {
  int64_t t;
  int64_t channel;
  int lanes;
};

// The filter of a register's channels, or of its one channel in every lane.
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

// First element of token `token` of the pack in a tensor with these strides.
template <class Elem>
PACKFREE_INLINE Elem* TokenAt(Elem* data, const ConvStrides& strides, const ConvArgs& args, int64_t token,
                              int64_t channel) {
  return data + token / args.row_tokens * strides.row + token % args.row_tokens * strides.token +
         channel * strides.channel;
}

// How far each lane of a register of tokens may look back.
template <class Acc>
PACKFREE_INLINE IntVec<Acc> LoadReach(const int32_t* reach) {
  IntVec<Acc> lanes;
  for (int i = 0; i < kLanes<Acc>; ++i) lanes[i] = reach[i];
  return lanes;
}

// What token t of the block sees `lag` tokens back: a token of its sample, or what its initial state says, or 0.
template <class Acc, int W, class Elem>
inline Acc SeenOne(const ConvArgs& args, const ConvBlock& block, const Elem* x, int64_t t, int64_t channel, int lag) {
  const int reach = block.reach[t];
  if (lag <= reach) return LoadOne<Acc>(x - lag * args.x_strides.token);
  const Acc* state = static_cast<const Acc*>(args.initial_state);
  if (state == nullptr) return Acc(0);
  const int64_t sequence = SequenceOf(args.packing, block.first + t);
  return state[(sequence * args.channels + channel) * (W - 1) + (W - 1) - (lag - reach)];
}

// seen[k] = x of W - 1 - k tokens before each lane of the register at `x`, where every lane may look that far back.
template <class Acc, int W, class Elem>
PACKFREE_INLINE void LoadSeen(const Elem* x, int64_t x_token, Vec<Acc> (&seen)[W]) {
  for (int k = 0; k < W; ++k) seen[k] = Load<Acc>(x - (W - 1 - k) * x_token);
}

// One register of it, lane by lane: for tokens that may see an initial state or stand at the beginning of a row.
template <class Acc, int W, bool kChannelsLast, class Elem>
inline __attribute__((noinline)) Vec<Acc> SeenLanes(const ConvArgs& args, const ConvBlock& block, const Elem* x,
                                                    const ConvPlace& place, int lag) {
  Acc lanes[kLanes<Acc>] = {};
  for (int i = 0; i < place.lanes; ++i) {
    const int64_t t = kChannelsLast ? place.t : place.t + i;
    const int64_t channel = kChannelsLast ? place.channel + i : place.channel;
    lanes[i] = SeenOne<Acc, W>(args, block, x + i, t, channel, lag);
  }
  return Load<Acc>(static_cast<const Acc*>(lanes));
}

// The same for any register.
template <class Acc, int W, bool kChannelsLast, class Elem>
PACKFREE_INLINE void LoadSeenAnywhere(const ConvArgs& args, const ConvBlock& block, const Elem* x,
                                      const ConvPlace& place, Vec<Acc> (&seen)[W]) {
  const int32_t* reach = block.reach + place.t;
  const IntVec<Acc> reaches = LoadReach<Acc>(reach);
  // What lies before the row is not read, not even to be left out.
  const bool by_lanes = args.initial_state != nullptr || (!kChannelsLast && block.row_place + place.t < W - 1);
  for (int k = 0; k < W; ++k) {
    const int lag = W - 1 - k;
    const Elem* source = x - lag * args.x_strides.token;
    if (lag == 0 || (kChannelsLast && lag <= reach[0])) {
      seen[k] = LoadUpTo<Acc>(source, place.lanes);
    } else if (by_lanes) {
      seen[k] = SeenLanes<Acc, W, kChannelsLast>(args, block, x, place, lag);
    } else if (kChannelsLast) {
      seen[k] = Zero<Acc>();
    } else {
      seen[k] = Select(reaches >= lag, LoadUpTo<Acc>(source, place.lanes), Zero<Acc>());
    }
  }
}

// z[t] = bias + sum over k of tap[k] x[t - (W - 1) + k]
template <class Acc, int W>
PACKFREE_INLINE Vec<Acc> Convolve(const ConvFilter<Acc, W>& filter, const Vec<Acc> (&seen)[W]) {
  Vec<Acc> z = filter.bias;
  for (int k = 0; k < W; ++k) z = MulAdd(filter.tap[k], seen[k], z);
  return z;
}

// Marks the tokens (channel-last) or the registers of tokens from which `ahead` tokens on every token may look W - 1
// tokens back. Registers that are not full are not marked.
template <class Acc, int W, bool kChannelsLast>
inline void MarkFar(const ConvBlock& block, int ahead, bool* far) {
  constexpr int kStep = kChannelsLast ? 1 : kLanes<Acc>;
  const int64_t tokens = block.last - block.first;
  for (int64_t t = 0; t < tokens; t += kStep) {
    bool all = t + kStep <= tokens;
    for (int64_t i = t + ahead; all && i < t + ahead + kStep; ++i) all = block.reach[i] == W - 1;
    far[t / kStep] = all;
  }
}

// Where a row of registers lies: channel-last, a row is a token and its registers hold channels; else the other way.
template <class Acc, bool kChannelsLast>
PACKFREE_INLINE ConvPlace PlaceAt(int64_t row, int64_t column, int64_t columns, int64_t channel) {
  const int lanes = columns - column < kLanes<Acc> ? static_cast<int>(columns - column) : kLanes<Acc>;
  return kChannelsLast ? ConvPlace{row, channel + column, lanes} : ConvPlace{column, channel + row, lanes};
}

// Outputs of the tokens of a block for `channels` channels from `channel` on.
template <class Acc, int W, bool kChannelsLast, class Elem>
inline void ForwardBlock(const ConvForwardArgs& args, const ConvBlock& block, int64_t channel, int64_t channels) {
  constexpr int L = kLanes<Acc>;
  const int64_t tokens = block.last - block.first, x_token = args.x_strides.token;
  const int64_t rows = kChannelsLast ? tokens : channels, columns = kChannelsLast ? channels : tokens;
  const int64_t x_row = kChannelsLast ? x_token : args.x_strides.channel;
  const int64_t y_row = kChannelsLast ? args.y_strides.token : args.y_strides.channel;
  const Elem* x = TokenAt(static_cast<const Elem*>(args.x), args.x_strides, args, block.first, channel);
  Elem* y = TokenAt(static_cast<Elem*>(args.y), args.y_strides, args, block.first, channel);
  bool far[kConvGroupTokens];
  MarkFar<Acc, W, kChannelsLast>(block, 0, far);
  ConvFilter<Acc, W> filter;
  for (int64_t row = 0; row < rows; ++row) {
    if (!kChannelsLast) filter = LoadFilter<Acc, W, false>(args, channel + row, L);
    for (int64_t column = 0; column < columns; column += L) {
      const ConvPlace place = PlaceAt<Acc, kChannelsLast>(row, column, columns, channel);
      const Elem* x_at = x + row * x_row + column;
      if (kChannelsLast) filter = LoadFilter<Acc, W, true>(args, place.channel, place.lanes);
      Vec<Acc> seen[W];
      if (place.lanes == L && far[kChannelsLast ? row : column / L]) {
        LoadSeen<Acc, W>(x_at, x_token, seen);
      } else {
        LoadSeenAnywhere<Acc, W, kChannelsLast>(args, block, x_at, place, seen);
      }
      Vec<Acc> z = Convolve<Acc, W>(filter, seen);
      if (args.silu) z = z * Sigmoid<Acc>(z);
      StoreUpTo(y + row * y_row + column, z, place.lanes);
    }
  }
}

// State after the sequence's last token: its last W - 1 tokens, older ones from the initial state.
template <class Acc, int W, class Elem>
inline void StoreFinalState(const ConvForwardArgs& args, int64_t sequence, int64_t channel, int64_t channels) {
  const Elem* x = static_cast<const Elem*>(args.x);
  const Acc* initial = static_cast<const Acc*>(args.initial_state);
  Elem* final_state = static_cast<Elem*>(args.final_state);
  const int64_t length = args.packing.length(sequence), bos = args.packing.bos(sequence);
  for (int64_t c = channel; c < channel + channels; ++c) {
    const int64_t row = (sequence * args.channels + c) * (W - 1);
    for (int i = 0; i < W - 1; ++i) {
      const int64_t token = length - (W - 1) + i;
      if (token >= 0) {
        final_state[row + i] = *TokenAt(x, args.x_strides, args, bos + token, c);
      } else {
        StoreOne(final_state + row + i, initial == nullptr ? Acc(0) : initial[row + length + i]);
      }
    }
  }
}
