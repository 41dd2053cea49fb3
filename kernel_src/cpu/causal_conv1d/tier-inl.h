// What causal_conv1d.cpp calls in a tier: one function per direction and dtype, with the width turned into a constant.

template <class Acc, class Elem>
void ConvForwardItem(const ConvForwardArgs& args, const SequenceBlock& block, int64_t channel, int64_t channels) {
#define PACKFREE_CONV_WIDTH(W)                                                                   \
  case W:                                                                                        \
    if (args.channels_last) return ForwardBlock<Acc, W, true, Elem>(args, block, channel, channels); \
    return ForwardBlock<Acc, W, false, Elem>(args, block, channel, channels);
  switch (args.width) {
    PACKFREE_CONV_WIDTH(2)
    PACKFREE_CONV_WIDTH(3)
    PACKFREE_CONV_WIDTH(4)
  }
#undef PACKFREE_CONV_WIDTH
}

template <class Acc, class Elem>
void ConvFinalStateItem(const ConvForwardArgs& args, int64_t sequence, int64_t channel, int64_t channels) {
  switch (args.width) {
    case 2:
      return StoreFinalState<Acc, 2, Elem>(args, sequence, channel, channels);
    case 3:
      return StoreFinalState<Acc, 3, Elem>(args, sequence, channel, channels);
    case 4:
      return StoreFinalState<Acc, 4, Elem>(args, sequence, channel, channels);
  }
}

template <class Acc, class Elem>
void ConvBackwardItem(const ConvBackwardArgs& args, const SequenceBlock& block, int64_t channel, int64_t channels,
                      void* partials) {
  constexpr int64_t kRows = (ConvBlockTokens(true) + kConvMaxWidth - 1) * kLanes<Acc>;
  constexpr int64_t kRow = ConvBlockTokens(false) + kConvMaxWidth - 1;
  Acc dz[kRows > kRow ? kRows : kRow];
  Acc* sums = static_cast<Acc*>(partials);
#define PACKFREE_CONV_WIDTH(W)                                                                                   \
  case W:                                                                                                        \
    if (args.channels_last) return BackwardBlock<Acc, W, true, Elem>(args, block, channel, channels, dz, sums);  \
    return BackwardBlock<Acc, W, false, Elem>(args, block, channel, channels, dz, sums);
  switch (args.width) {
    PACKFREE_CONV_WIDTH(2)
    PACKFREE_CONV_WIDTH(3)
    PACKFREE_CONV_WIDTH(4)
  }
#undef PACKFREE_CONV_WIDTH
}

template <class Acc, class Elem>
void ConvUpdateItem(const ConvUpdateArgs& args, int64_t batch, int64_t channel, int64_t channels) {
  for (int64_t c = 0; c < channels; c += kLanes<Acc>) {
    const int present = channels - c < kLanes<Acc> ? static_cast<int>(channels - c) : kLanes<Acc>;
    switch (args.width) {
      case 2:
        UpdateChannels<Acc, 2, Elem>(args, batch, channel + c, present);
        break;
      case 3:
        UpdateChannels<Acc, 3, Elem>(args, batch, channel + c, present);
        break;
      case 4:
        UpdateChannels<Acc, 4, Elem>(args, batch, channel + c, present);
        break;
    }
  }
}

template <class Acc, class Elem>
constexpr ConvKernels MakeConvKernels() {
  return {&ConvForwardItem<Acc, Elem>, &ConvFinalStateItem<Acc, Elem>, &ConvBackwardItem<Acc, Elem>,
          &ConvUpdateItem<Acc, Elem>};
}
