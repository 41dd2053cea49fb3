#include "cuda/causal_conv1d/causal_conv1d.h"

#include <type_traits>

#include "cuda/causal_conv1d/bwd.cuh"
#include "cuda/causal_conv1d/fwd.cuh"
#include "cuda/causal_conv1d/update.cuh"

namespace packfree {
namespace {

// Blocks of a multiprocessor that are resident at once, about: they stride over the rest.
constexpr int kForwardResident = 12;
constexpr int kBackwardResident = 4;

// Calls body(width, channels_last) with constants. A narrower filter runs as the next of these widths: few kernels, and
// memory bounds them all.
template <class Body>
void WithConvForm(const ConvArgs& args, const Body& body) {
  if (!args.channels_last) {
    body(std::integral_constant<int, 8>{}, std::false_type{});
  } else if (args.width <= 4) {
    body(std::integral_constant<int, 4>{}, std::true_type{});
  } else {
    body(std::integral_constant<int, 8>{}, std::true_type{});
  }
}

}  // namespace

int64_t ConvTiles(int64_t rows, int64_t row_tokens, bool channels_last) {
  return rows * ConvRowTiles(row_tokens, channels_last);
}

const char* causal_conv1d_fwd_cuda(const ConvForwardArgs& args, int32_t* owners, void* stream) {
  Launcher launcher(stream);
  RunOwners(launcher, args.packing, owners);
  WithElement(args.dtype, [&](auto element) {
    using Elem = decltype(element);
    WithConvForm(args, [&](auto width, auto channels_last) {
      launcher.Run(&ConvForwardKernel<Elem, width(), channels_last()>, BlocksFor(ConvItems(args), kForwardResident),
                   kConvThreads, args, owners, ConvPairs<Elem>(args.x, args.x_strides),
                   ConvPairs<Elem>(args.y, args.y_strides));
    });
    if (args.final_state == nullptr) return;
    launcher.Run(&ConvFinalStateKernel<Elem>, ElementBlocks(args.packing.num_sequences * args.channels),
                 kElementThreads, args);
  });
  return launcher.error();
}

const char* causal_conv1d_bwd_cuda(const ConvBackwardArgs& args, int32_t* owners, float* dweight, float* dbias,
                                   void* stream) {
  Launcher launcher(stream);
  RunOwners(launcher, args.packing, owners);
  WithElement(args.dtype, [&](auto element) {
    using Elem = decltype(element);
    WithConvForm(args, [&](auto width, auto channels_last) {
      launcher.Run(&ConvBackwardKernel<Elem, width(), channels_last()>, BlocksFor(ConvItems(args), kBackwardResident),
                   kConvThreads, args, owners, ConvPairs<Elem>(args.x, args.x_strides),
                   ConvPairs<Elem>(args.dy, args.dy_strides), ConvPairs<Elem>(args.dx, args.dx_strides));
    });
    if (args.dinitial_state == nullptr) return;
    launcher.Run(&ConvStateGradientKernel<Elem>, ElementBlocks(args.packing.num_sequences * args.channels),
                 kElementThreads, args);
  });
  const int64_t rows = args.row_tokens == 0 ? 0 : args.packing.tokens / args.row_tokens;
  const Partials partials{static_cast<const float*>(args.partials),
                          ConvTiles(rows, args.row_tokens, args.channels_last), args.width + 1, args.channels};
  RunReduce(launcher, partials, 0, args.width, dweight);
  RunReduce(launcher, partials, args.width, 1, dbias);
  return launcher.error();
}

const char* causal_conv1d_update_cuda(const ConvUpdateArgs& args, int64_t rows, void* stream) {
  Launcher launcher(stream);
  WithElement(args.dtype, [&](auto element) {
    launcher.Run(&ConvUpdateKernel<decltype(element)>, ElementBlocks(args.batch * args.channels), kElementThreads,
                 args, rows);
  });
  return launcher.error();
}

}  // namespace packfree
