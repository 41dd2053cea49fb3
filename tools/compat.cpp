// Local definitions of the newer libstdc++ and glibc symbols that recent compilers' headers refer to, so that a variant
// built on a recent system still needs nothing newer than manylinux_2_28 (GLIBC 2.28, GLIBCXX 3.4.24). Linked by
// tools/build.py only: kernel-builder compiles against an old system and needs none of it.
#include <new>
#include <sstream>

// Read by every std::shared_ptr; exported by libc from 2.32 on. 0 means "may be multi-threaded", which is always safe.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace std {
// GLIBCXX_3.4.29
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
// Their constructors and str() carry GLIBCXX_3.4.26 and 3.4.29.
template class basic_stringbuf<char>;
template class basic_istringstream<char>;
template class basic_ostringstream<char>;
template class basic_stringstream<char>;
}  // namespace std
