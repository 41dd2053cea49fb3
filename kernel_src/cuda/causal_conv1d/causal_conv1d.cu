#include "cuda/causal_conv1d/causal_conv1d.h"

#include <type_traits>

#include "cuda/causal_conv1d/bwd.cuh"
#include "cuda/causal_conv1d/fwd.cuh"
#include "cuda/causal_conv1d/update.cuh"

namespace packfree {
namespace {

// Calls body(Elem{}, width, channels_last) with types and constants. A narrower filter runs as the next of these
// widths. The form that models have gets a kernel for each dtype; the others are few kernels, because memory bounds
// them all.
template <class Body>
void WithConvForm(const ConvArgs& args, const Body& body) {
  if (!args.channels_last) {
    body(AnyElement{}, std::integral_constant<int, 8>{}, std::false_type{});
  } else if (args.width > 4) {
    body(AnyElement{}, std::integral_constant<int, 8>{}, std::true_type{});
  } else {
    WithElement(args.dtype, [&](auto element) { body(element, std::integral_constant<int, 4>{}, std::true_type{}); });
  }
}

}  // namespace

int64_t ConvTiles(int64_t rows, int64_t row_tokens, bool channels_last) {
  return rows * ConvRowTiles(row_tokens, channels_last);
}

const char* CausalConv1dForwardCuda(const ConvForwardArgs& args, int32_t* owners, void* stream) {
  Launcher launcher(stream);
  RunOwners(launcher, args.packing, owners);
  WithConvForm(args, [&](auto element, auto width, auto channels_last) {
    using Elements = ConvElements<decltype(element)>;
    launcher.Run(&ConvForwardKernel<decltype(element), width(), channels_last()>,
                 BlocksFor(ConvItems(args), kConvForwardResident), kConvThreads, args, owners,
                 Elements(args.x, args.dtype, args.x_strides), Elements(args.y, args.dtype, args.y_strides));
  });
  if (args.final_state != nullptr) {
    launcher.Run(&ConvFinalStateKernel, ElementBlocks(args.packing.num_sequences * args.channels), kElementThreads,
                 args);
  }
  return launcher.error();
}

const char* CausalConv1dBackwardCuda(const ConvBackwardArgs& args, int32_t* owners, void* stream) {
  Launcher launcher(stream);
  RunOwners(launcher, args.packing, owners);
  WithConvForm(args, [&](auto element, auto width, auto channels_last) {
    using Elements = ConvElements<decltype(element)>;
    launcher.Run(&ConvBackwardKernel<decltype(element), width(), channels_last()>,
                 BlocksFor(ConvItems(args), kConvBackwardResident), kConvThreads, args, owners,
                 Elements(args.x, args.dtype, args.x_strides), Elements(args.dy, args.dtype, args.dy_strides),
                 Elements(args.dx, args.dtype, args.dx_strides));
  });
  if (args.dinitial_state != nullptr) {
    launcher.Run(&ConvStateGradientKernel, ElementBlocks(args.packing.num_sequences * args.channels), kElementThreads,
                 args);
  }
  const int64_t rows = args.row_tokens == 0 ? 0 : args.packing.tokens / args.row_tokens;
  const Partials partials{static_cast<const float*>(args.partials),
                          ConvTiles(rows, args.row_tokens, args.channels_last), args.width + 1, args.channels};
  RunReduce(launcher, partials, 0, args.width, args.dweight);
  RunReduce(launcher, partials, args.width, 1, args.dbias);
  return launcher.error();
}

const char* CausalConv1dUpdateCuda(const ConvUpdateArgs& args, int64_t rows, void* stream) {
  Launcher launcher(stream);
  launcher.Run(&ConvUpdateKernel, ElementBlocks(args.batch * args.channels), kElementThreads, args, rows);
  return launcher.error();
}

}  // namespace packfree
