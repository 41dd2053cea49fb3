// One decode step: shift new tokens into the state and return the outputs there. Lanes are channels.

template <class Acc, int W, class Elem>
inline void UpdateChannels(const ConvUpdateArgs& args, int64_t batch, int64_t channel, int channels) {
  constexpr int L = kLanes<Acc>;
  const int64_t row = args.state_rows == nullptr ? batch : args.state_rows[batch];
  const Elem* x = static_cast<const Elem*>(args.x) + batch * args.x_strides.row + channel * args.x_strides.channel;
  Elem* state = static_cast<Elem*>(args.state) + row * args.state_strides.row + channel * args.state_strides.channel;
  Elem* y = static_cast<Elem*>(args.y) + (batch * args.channels + channel) * args.tokens;
  const int64_t length = args.state_length;
  // A plain state keeps its newest token last; a circular one keeps token number p at place p mod length.
  const bool circular = args.cache_seqlens != nullptr;
  // Counts near the end of int64 leave it when something is added.
  const int64_t seen = circular ? args.cache_seqlens[batch] % length : 0;
  const int64_t newest = circular ? (seen + length - 1) % length : length - 1;

  Vec<Acc> tap[W];
  const Acc* weight = static_cast<const Acc*>(args.weight) + channel;
  for (int k = 0; k < W; ++k) tap[k] = LoadUpTo<Acc>(weight + k * args.channels, channels);
  Vec<Acc> bias = Zero<Acc>();
  if (args.bias != nullptr) bias = LoadUpTo<Acc>(static_cast<const Acc*>(args.bias) + channel, channels);

  // The last W - 1 tokens before the step, oldest first; then each new token takes the last place.
  Acc window[W][L] = {};
  for (int i = 0; i < W - 1; ++i) {
    const int64_t place = (newest - (W - 2) + i + length) % length;
    for (int c = 0; c < channels; ++c) {
      window[i][c] = LoadOne<Acc>(state + c * args.state_strides.channel + place * args.state_strides.token);
    }
  }
  for (int64_t t = 0; t < args.tokens; ++t) {
    for (int c = 0; c < channels; ++c) {
      window[W - 1][c] = LoadOne<Acc>(x + c * args.x_strides.channel + t * args.x_strides.token);
    }
    Vec<Acc> z = bias;
    for (int k = 0; k < W; ++k) z = MulAdd(tap[k], Load<Acc>(static_cast<const Acc*>(window[k])), z);
    if (args.silu) z = z * Sigmoid<Acc>(z);
    Acc result[L];
    Store(result, z);
    for (int c = 0; c < channels; ++c) StoreOne(y + c * args.tokens + t, result[c]);
    for (int k = 0; k + 1 < W; ++k) {
      for (int c = 0; c < channels; ++c) window[k][c] = window[k + 1][c];
    }
  }

  for (int c = 0; c < channels; ++c) {
    Elem* s = state + c * args.state_strides.channel;
    const Elem* x_c = x + c * args.x_strides.channel;
    if (circular) {
      for (int64_t t = 0; t < args.tokens; ++t) {
        s[(seen + t) % length * args.state_strides.token] = x_c[t * args.x_strides.token];
      }
      continue;
    }
    for (int64_t i = 0; i < length; ++i) {
      const int64_t from = i + args.tokens;
      s[i * args.state_strides.token] =
          from < length ? s[from * args.state_strides.token] : x_c[(from - length) * args.x_strides.token];
    }
  }
}
