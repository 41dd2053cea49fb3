#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

// The linker sends the kernels' own allocations here (--wrap): their scratch gets the same ends and contents.
extern "C" {
void* __real_malloc(size_t bytes);
void* __real_aligned_alloc(size_t alignment, size_t bytes);
void __real_free(void* block);
}

namespace packfree::fuzz {
namespace {

constexpr size_t kPage = 4096;

Surroundings g_surroundings{0xff, false, 1};
bool g_guard_pages = false;

struct Mapping {
  char* start;   // of the page in front
  size_t bytes;  // with both forbidden pages
  char* data;
  size_t data_bytes;
  const char* name;
};
std::mutex g_mutex;
std::map<void*, Mapping> g_mappings;  // by data

std::vector<void*> g_guarded_blocks;  // what NewBlock made, by data
std::vector<void*> g_heap_blocks;     // by what malloc returned

size_t RoundUp(size_t x, size_t multiple) { return (x + multiple - 1) / multiple * multiple; }

void* MapBlock(const char* name, size_t bytes, size_t alignment) {
  const size_t inner = RoundUp(bytes == 0 ? 1 : bytes, kPage);
  void* start = mmap(nullptr, inner + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED || mprotect(static_cast<char*>(start) + kPage, inner, PROT_READ | PROT_WRITE) != 0) {
    std::perror("fuzz: mmap");
    std::abort();
  }
  char* first = static_cast<char*>(start) + kPage;
  // The last aligned place from which the block still fits.
  char* data = g_surroundings.flush_left ? first : first + (inner - bytes) / alignment * alignment;
  std::memset(first, g_surroundings.fill, inner);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_mappings[data] = {static_cast<char*>(start), inner + 2 * kPage, data, bytes, name};
  return data;
}

bool Unmap(void* data) {
  Mapping mapping;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = g_mappings.find(data);
    if (found == g_mappings.end()) return false;
    mapping = found->second;
    g_mappings.erase(found);
  }
  munmap(mapping.start, mapping.bytes);
  return true;
}

// Says which block was left by how much, and dies.
void OnFault(int, siginfo_t* info, void*) {
  const char* address = static_cast<const char*>(info->si_addr);
  for (const auto& [data, mapping] : g_mappings) {
    if (address < mapping.start || address >= mapping.start + mapping.bytes) continue;
    const char* end = mapping.data + mapping.data_bytes;
    std::printf("FINDING access of %s, which has %zu bytes: %td bytes %s\n", mapping.name, mapping.data_bytes,
                address < mapping.data ? mapping.data - address
                : address >= end       ? address - end
                                       : address - mapping.data,
                address < mapping.data ? "in front of it"
                : address >= end       ? "behind it"
                                       : "into it, but it is read-only");
    std::fflush(stdout);
    _exit(1);
  }
  std::printf("FINDING access of address %p, far from every block\n", static_cast<const void*>(address));
  std::fflush(stdout);
  _exit(1);
}

}  // namespace

void SetSurroundings(const Surroundings& surroundings, bool guard_pages) {
  g_surroundings = surroundings;
  g_guard_pages = guard_pages;
  if (!guard_pages) return;
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

int Threads() { return g_surroundings.threads; }
uint8_t FreshByte() { return g_surroundings.fill; }

void* NewBlock(const char* name, size_t bytes, size_t element_bytes) {
  if (bytes == 0) return nullptr;
  if (g_guard_pages) {
    void* data = MapBlock(name, bytes, element_bytes);
    g_guarded_blocks.push_back(data);
    return data;
  }
  // The heap aligns its blocks, tensors need not be aligned: one run has them an element off.
  const size_t offset = g_surroundings.flush_left ? 0 : element_bytes;
  char* start = static_cast<char*>(__real_malloc(offset + bytes));
  if (start == nullptr) std::abort();
  std::memset(start, g_surroundings.fill, offset + bytes);
  g_heap_blocks.push_back(start);
  return start + offset;
}

void Seal(void* block) {
  if (!g_guard_pages || block == nullptr) return;
  const std::lock_guard<std::mutex> lock(g_mutex);
  const Mapping& mapping = g_mappings.at(block);
  mprotect(mapping.start + kPage, mapping.bytes - 2 * kPage, PROT_READ);
}

void FreeBlocks() {
  for (void* block : g_guarded_blocks) Unmap(block);
  for (void* start : g_heap_blocks) __real_free(start);
  g_guarded_blocks.clear();
  g_heap_blocks.clear();
}

}  // namespace packfree::fuzz

// ---- the kernels' own memory ------------------------------------------------------------------------------------

using namespace packfree::fuzz;

extern "C" {

void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  if (g_guard_pages) return MapBlock("scratch", bytes, alignment);
  void* block = __real_aligned_alloc(alignment, bytes);
  if (block != nullptr) std::memset(block, g_surroundings.fill, bytes);
  return block;
}

void* __wrap_malloc(size_t bytes) {
  if (g_guard_pages) return MapBlock("scratch", bytes, 16);
  void* block = __real_malloc(bytes);
  if (block != nullptr) std::memset(block, g_surroundings.fill, bytes);
  return block;
}

void __wrap_free(void* block) {
  if (!g_guard_pages || !Unmap(block)) __real_free(block);
}

}  // extern "C"
