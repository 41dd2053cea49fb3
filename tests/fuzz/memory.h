// Memory of the fuzzer: blocks of exactly the size that a tensor has, so that one element read past either end is seen,
// and fresh memory whose contents are known, so that results which depend on memory that nobody wrote are seen.
//
// A block comes from the heap, where the address sanitizer watches its ends, or lies between pages that cannot be
// accessed, which needs no sanitizer. The second sees what compilers do not instrument: masked loads and stores of
// vectors, and the loads of the matrix unit.
#pragma once

#include <cstddef>
#include <cstdint>

namespace packfree::fuzz {

// The state of memory and threads that one run finds. Its results must not depend on it.
struct Surroundings {
  uint8_t fill;     // every byte of fresh memory, the kernels' scratch included
  bool flush_left;  // a block begins at the page it must not leave (else it ends there), or at an aligned address
  int threads;
};

// For everything that follows. `guard_pages` says where blocks come from.
void SetSurroundings(const Surroundings& surroundings, bool guard_pages);

int Threads();
uint8_t FreshByte();

// A filled block that lives until FreeBlocks; null for 0 bytes, as an empty tensor has no address. `name` must live as
// long.
void* NewBlock(const char* name, size_t bytes, size_t element_bytes);
// No one may write to the block any more. Only guard pages can tell.
void Seal(void* block);
void FreeBlocks();

}  // namespace packfree::fuzz
