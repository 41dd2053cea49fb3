// What causal_conv1d.cpp calls in a tier: one function per direction and dtype, with the width turned into a constant.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/causal_conv1d/fwd-inl.h"
#include "cpu/causal_conv1d/bwd-inl.h"
#include "cpu/causal_conv1d/update-inl.h"

// Runs the statement with the constant W equal to `width`, one of kConvMinWidth to kConvMaxWidth.
#define PACKFREE_CONV_CASE(N, ...) \
  case N: {                        \
    constexpr int W = N;           \
    __VA_ARGS__;                   \
    break;                         \
  }
#define PACKFREE_WITH_CONV_WIDTH(width, ...) \
  switch (width) {                           \
    PACKFREE_CONV_CASE(2, __VA_ARGS__)       \
    PACKFREE_CONV_CASE(3, __VA_ARGS__)       \
    PACKFREE_CONV_CASE(4, __VA_ARGS__)       \
    PACKFREE_CONV_CASE(5, __VA_ARGS__)       \
    PACKFREE_CONV_CASE(6, __VA_ARGS__)       \
    PACKFREE_CONV_CASE(7, __VA_ARGS__)       \
    PACKFREE_CONV_CASE(8, __VA_ARGS__)       \
  }
static_assert(kConvMinWidth == 2 && kConvMaxWidth == 8);

template <class Acc, class Elem>
void ConvForwardItem(const ConvForwardArgs& args, const ConvBlock& block, int64_t channel, int64_t channels) {
  if (args.channels_last) {
    PACKFREE_WITH_CONV_WIDTH(args.width, ForwardBlock<Acc, W, true, Elem>(args, block, channel, channels))
  } else {
    PACKFREE_WITH_CONV_WIDTH(args.width, ForwardBlock<Acc, W, false, Elem>(args, block, channel, channels))
  }
}

template <class Acc, class Elem>
void ConvFinalStateItem(const ConvForwardArgs& args, int64_t sequence, int64_t channel, int64_t channels) {
  PACKFREE_WITH_CONV_WIDTH(args.width, StoreFinalState<Acc, W, Elem>(args, sequence, channel, channels))
}

template <class Acc, class Elem>
void ConvBackwardItem(const ConvBackwardArgs& args, const ConvBlock& block, int64_t channel, int64_t channels,
                      void* partials) {
  Acc* sums = static_cast<Acc*>(partials);
  if (args.channels_last) {
    PACKFREE_WITH_CONV_WIDTH(args.width, BackwardChannelLast<Acc, W, Elem>(args, block, channel, channels, sums))
  } else {
    PACKFREE_WITH_CONV_WIDTH(args.width, BackwardTokenLast<Acc, W, Elem>(args, block, channel, channels, sums))
  }
}

template <class Acc, class Elem>
void ConvUpdateItem(const ConvUpdateArgs& args, int64_t batch, int64_t channel, int64_t channels) {
  for (int64_t c = 0; c < channels; c += kLanes<Acc>) {
    const int present = channels - c < kLanes<Acc> ? static_cast<int>(channels - c) : kLanes<Acc>;
    PACKFREE_WITH_CONV_WIDTH(args.width, UpdateChannels<Acc, W, Elem>(args, batch, channel + c, present))
  }
}

#undef PACKFREE_WITH_CONV_WIDTH
#undef PACKFREE_CONV_CASE

template <class Elem, class Acc>
constexpr ConvKernels TierKernels() {
  return {&ConvForwardItem<Acc, Elem>, &ConvFinalStateItem<Acc, Elem>, &ConvBackwardItem<Acc, Elem>,
          &ConvUpdateItem<Acc, Elem>};
}
