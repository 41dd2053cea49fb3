// Errors of the bindings: in the words of the package's other errors, without the place in the source that PyTorch's
// own macro puts in front.
#pragma once

#include <sstream>
#include <stdexcept>

namespace packfree {

template <class... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

}  // namespace packfree

#define PACKFREE_CHECK(holds, ...)     \
  do {                                 \
    if (!(holds)) [[unlikely]]         \
      ::packfree::Refuse(__VA_ARGS__); \
  } while (false)
