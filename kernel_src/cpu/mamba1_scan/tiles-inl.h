// What both directions of the selective scan read and write: tiles of [tokens, kLanes] in Acc, lanes being channels.
// Absent lanes are 0 in every input, so they stay 0 in every state.

// First element of a sequence's token `token` in a tensor [B, D, T].
PACKFREE_INLINE int64_t TokenOffset(const ScanArgs& args, const ScanStrides& strides, int64_t sequence, int64_t token,
                                    int64_t channel) {
  const int64_t index = args.packing.bos(sequence) + token;
  return index / args.row_tokens * strides.row + index % args.row_tokens * strides.token + channel * strides.channel;
}

template <class Acc, class Elem>
inline void LoadTokensAs(const ScanInput& input, int64_t offset, int64_t tokens, int channels, Acc* tile) {
  const Elem* source = static_cast<const Elem*>(input.data) + offset;
  if (input.strides.channel == 1) {
    LoadTile<Acc, Elem>(tokens, channels, source, input.strides.token, tile, kLanes<Acc>);
  } else {
    LoadTileTransposed<Acc, Elem>(channels, tokens, source, input.strides.channel, tile, kLanes<Acc>);
  }
}
template <class Acc>
inline void LoadTokens(const ScanInput& input, int64_t offset, int64_t tokens, int channels, Acc* tile) {
  if constexpr (std::is_same_v<Acc, double>) {
    LoadTokensAs<double, double>(input, offset, tokens, channels, tile);
  } else {
    if (input.dtype == Dtype::kFloat32) LoadTokensAs<float, float>(input, offset, tokens, channels, tile);
    if (input.dtype == Dtype::kBFloat16) LoadTokensAs<float, bf16>(input, offset, tokens, channels, tile);
    if (input.dtype == Dtype::kFloat16) LoadTokensAs<float, fp16>(input, offset, tokens, channels, tile);
  }
}

template <class Acc, class Elem>
inline void StoreTokensAs(const ScanOutput& output, int64_t offset, int64_t tokens, int channels, const Acc* tile) {
  Elem* target = static_cast<Elem*>(output.data) + offset;
  if (output.strides.channel == 1) {
    StoreTile<Acc, Elem>(tokens, channels, tile, kLanes<Acc>, target, output.strides.token);
  } else {
    StoreTileTransposed<Acc, Elem>(tokens, channels, tile, kLanes<Acc>, target, output.strides.channel);
  }
}
template <class Acc>
inline void StoreTokens(const ScanOutput& output, int64_t offset, int64_t tokens, int channels, const Acc* tile) {
  if constexpr (std::is_same_v<Acc, double>) {
    StoreTokensAs<double, double>(output, offset, tokens, channels, tile);
  } else {
    if (output.dtype == Dtype::kFloat32) StoreTokensAs<float, float>(output, offset, tokens, channels, tile);
    if (output.dtype == Dtype::kBFloat16) StoreTokensAs<float, bf16>(output, offset, tokens, channels, tile);
    if (output.dtype == Dtype::kFloat16) StoreTokensAs<float, fp16>(output, offset, tokens, channels, tile);
  }
}

template <class Acc, class Elem>
inline void LoadCoefficientsAs(const ScanCoefficients& source, int64_t offset, int64_t tokens, int64_t states,
                               Acc* tile, int64_t stride) {
  const Elem* data = static_cast<const Elem*>(source.data) + offset;
  if (source.state == 1) {
    LoadTile<Acc, Elem>(tokens, states, data, source.token, tile, stride);
  } else {
    LoadTileTransposed<Acc, Elem>(states, tokens, data, source.state, tile, stride);
  }
}
// tile[token, state] of B or C from token `token` of a sequence on; nothing where they are fixed.
template <class Acc>
inline void LoadCoefficients(const ScanArgs& args, const ScanCoefficients& source, const ScanItem& item,
                             int64_t sequence, int64_t token, int64_t tokens, Acc* tile, int64_t stride) {
  if (source.fixed) return;
  const int64_t index = args.packing.bos(sequence) + token;
  const int64_t offset =
      index / args.row_tokens * source.row + index % args.row_tokens * source.token + item.group * source.group;
  if constexpr (std::is_same_v<Acc, double>) {
    LoadCoefficientsAs<double, double>(source, offset, tokens, args.states, tile, stride);
  } else {
    if (source.dtype == Dtype::kFloat32) {
      LoadCoefficientsAs<float, float>(source, offset, tokens, args.states, tile, stride);
    }
    if (source.dtype == Dtype::kBFloat16) {
      LoadCoefficientsAs<float, bf16>(source, offset, tokens, args.states, tile, stride);
    }
    if (source.dtype == Dtype::kFloat16) {
      LoadCoefficientsAs<float, fp16>(source, offset, tokens, args.states, tile, stride);
    }
  }
}

// Where sequences begin among the tokens from `token` of a sequence on; null: nowhere.
PACKFREE_INLINE const uint8_t* BeginsAt(const ScanArgs& args, const ScanItem& item, int64_t sequence, int64_t token) {
  return item.begins == nullptr ? nullptr : item.begins + args.packing.bos(sequence) + token;
}

// Channels of the lane group that starts at channel `c` of an item.
template <class Acc>
PACKFREE_INLINE int LanesOf(const ScanItem& item, int64_t c) {
  return item.channels - c < kLanes<Acc> ? static_cast<int>(item.channels - c) : kLanes<Acc>;
}

// tile [groups, N, L] = source [D, N], or 0 if null.
template <class Acc>
inline void LoadChannelRows(const ScanArgs& args, const ScanItem& item, const Acc* source, Acc* tile) {
  constexpr int L = kLanes<Acc>;
  for (int64_t c = 0; c < item.channels; c += L) {
    Acc* target = tile + c * args.states;
    if (source == nullptr) {
      ClearTile<Acc>(args.states, L, target, L);
    } else {
      LoadTileTransposed<Acc, Acc>(LanesOf<Acc>(item, c), args.states, source + (item.channel + c) * args.states,
                                   args.states, target, L);
    }
  }
}
// The inverse: target [D, N] = tile [groups, N, L].
template <class Acc>
inline void StoreChannelRows(const ScanArgs& args, const ScanItem& item, const Acc* tile, Acc* target) {
  constexpr int L = kLanes<Acc>;
  for (int64_t c = 0; c < item.channels; c += L) {
    StoreTileTransposed<Acc, Acc>(args.states, LanesOf<Acc>(item, c), tile + c * args.states, L,
                                  target + (item.channel + c) * args.states, args.states);
  }
}

// What an item's sequences share: A, D, delta_bias, and B and C where fixed.
template <class Acc>
inline void LoadParameters(const ScanArgs& args, const ScanItem& item, const ScanTiles<Acc>& tiles) {
  constexpr int L = kLanes<Acc>;
  LoadChannelRows<Acc>(args, item, static_cast<const Acc*>(args.A), tiles.rate);
  if (args.B.fixed) LoadChannelRows<Acc>(args, item, static_cast<const Acc*>(args.B.data), tiles.fixed_B);
  if (args.C.fixed) LoadChannelRows<Acc>(args, item, static_cast<const Acc*>(args.C.data), tiles.fixed_C);
  const Acc* skip = static_cast<const Acc*>(args.D);
  const Acc* bias = static_cast<const Acc*>(args.delta_bias);
  for (int64_t c = 0; c < item.channels; c += L) {
    const int lanes = LanesOf<Acc>(item, c);
    Store(tiles.skip + c, skip == nullptr ? Zero<Acc>() : LoadUpTo<Acc>(skip + item.channel + c, lanes));
    Store(tiles.bias + c, bias == nullptr ? Zero<Acc>() : LoadUpTo<Acc>(bias + item.channel + c, lanes));
    for (int64_t row = c * args.states; row < (c + L) * args.states; row += L) {
      Store(tiles.rate2 + row, Load<Acc>(static_cast<const Acc*>(tiles.rate) + row) * Acc(1.44269504088896340736));
    }
  }
}

// The states before the sequence's first token.
template <class Acc>
inline void LoadInitialState(const ScanArgs& args, const ScanItem& item, int64_t sequence, Acc* state) {
  const Acc* source = static_cast<const Acc*>(args.initial_state);
  if (source != nullptr) source += sequence * args.channels * args.states;
  LoadChannelRows<Acc>(args, item, source, state);
}

// u, delta and delta u of one lane group from token `token` on; with `slope` also the derivative of softplus there.
template <class Acc>
inline void LoadStep(const ScanArgs& args, const ScanItem& item, int64_t sequence, int64_t token, int64_t tokens,
                     int64_t c, const Acc* bias, Acc* u, Acc* delta, Acc* input, Acc* slope) {
  constexpr int L = kLanes<Acc>;
  const int lanes = LanesOf<Acc>(item, c);
  const int64_t channel = item.channel + c;
  LoadTokens<Acc>(args.u, TokenOffset(args, args.u.strides, sequence, token, channel), tokens, lanes, u);
  LoadTokens<Acc>(args.delta, TokenOffset(args, args.delta.strides, sequence, token, channel), tokens, lanes, delta);
  const Vec<Acc> offset = Load<Acc>(bias + c);
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<Acc> raw = Load<Acc>(static_cast<const Acc*>(delta) + t * L) + offset;
    const Vec<Acc> step = args.softplus ? Softplus<Acc>(raw) : raw;
    Store(delta + t * L, step);
    Store(input + t * L, step * Load<Acc>(static_cast<const Acc*>(u) + t * L));
    if (slope != nullptr) {
      // Softplus is the identity above 20.
      Store(slope + t * L, args.softplus ? Select(raw > Acc(20), Set<Acc>(1), Sigmoid<Acc>(raw)) : Set<Acc>(1));
    }
  }
}
