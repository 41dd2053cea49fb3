#include "cuda/mamba2_scan/mamba2_scan.h"

#include <type_traits>

#include "cuda/mamba2_scan/update.cuh"

namespace packfree {

const char* SelectiveStateUpdateCuda(const SelectiveStateUpdate& args, void* stream) {
  Launcher launcher(stream);
  const int64_t rows = args.batch * args.heads * args.head_dim;
  const int64_t blocks = BlocksFor((rows + 3) / 4, 16);
  WithElement(args.dtype, [&](auto element) {
    using Elem = decltype(element);
    if (args.wide_state && args.wide_coefficients) {
      launcher.Run(&StateUpdateKernel<Elem, float, float>, blocks, kUpdateThreads, args);
    } else if (args.wide_state) {
      launcher.Run(&StateUpdateKernel<Elem, float, Elem>, blocks, kUpdateThreads, args);
    } else if (args.wide_coefficients) {
      launcher.Run(&StateUpdateKernel<Elem, Elem, float>, blocks, kUpdateThreads, args);
    } else {
      launcher.Run(&StateUpdateKernel<Elem, Elem, Elem>, blocks, kUpdateThreads, args);
    }
  });
  return launcher.error();
}

}  // namespace packfree
