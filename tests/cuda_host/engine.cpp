#include "engine.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef CUDA_HOST_RACES  // The program is under the thread sanitizer; this file is not, or it would watch itself
#include <sanitizer/tsan_interface.h>
#endif

namespace cuda_host {

Lane* lane = nullptr;
Faults faults;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

#ifdef CUDA_HOST_RACES
void Before(void* order) { __tsan_release(order); }
void After(void* order) { __tsan_acquire(order); }
#else
void Before(void*) {}
void After(void*) {}
#endif

// swapcontext makes a system call each time; a jump between the same stacks does not. Sanitizers cannot follow jumps.
#if defined(CUDA_HOST_RACES) || defined(CUDA_HOST_BOUNDS)
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;
#endif

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Lane lane;
  const Barrier* waits = nullptr;
  unsigned round = 0;
  bool started = false, done = false;
#ifdef CUDA_HOST_RACES
  void* watched = __tsan_create_fiber(0);
  ~Fiber() { __tsan_destroy_fiber(watched); }
#endif
};

Fiber* current = nullptr;
const std::function<void()>* work = nullptr;
ucontext_t scheduler;
jmp_buf scheduler_jump;
char begun, ended;  // what the sanitizer knows launches by

void Fail(const char* text) {
  std::fprintf(stderr, "cuda_host: %s\n", text);
  std::abort();
}

void Resume(Fiber& fiber) {
  current = &fiber;
  lane = &fiber.lane;
#ifdef CUDA_HOST_RACES
  void* self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.watched, __tsan_switch_to_fiber_no_sync);
#endif
  if (!kJumps) {
    swapcontext(&scheduler, &fiber.context);
  } else if (_setjmp(scheduler_jump) == 0) {
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
#ifdef CUDA_HOST_RACES
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
#endif
}

void GiveWay() {
  if (!kJumps) {
    swapcontext(&current->context, &scheduler);
  } else if (_setjmp(current->jump) == 0) {
    _longjmp(scheduler_jump, 1);
  }
}

// A fiber's life: one CUDA thread after another.
void Live() {
  for (;;) {
    After(&begun);
    (*work)();
    current->done = true;
    Before(&ended);
    GiveWay();
  }
}

void RunBlock(const std::vector<Fiber*>& fibers) {
  for (bool left = true; left;) {
    left = false;
    bool moved = false;
    for (Fiber* fiber : fibers) {
      if (fiber->done) continue;
      left = true;
      if (fiber->waits != nullptr && fiber->waits->round() == fiber->round) continue;
      Resume(*fiber);
      moved = true;
    }
    if (left && !moved) Fail("threads wait at a barrier that others never reach");
  }
}

std::vector<std::unique_ptr<Fiber>> pool;

// The pool's fibers from `first` on for the threads of a block. Under the thread sanitizer the blocks of a launch have
// fibers of their own, or threads of two blocks would be taken for one.
std::vector<Fiber*> TakeFibers(Block& block, unsigned count, size_t first) {
  while (pool.size() < first + count) {
    pool.push_back(std::make_unique<Fiber>());
    ucontext_t& context = pool.back()->context;
    getcontext(&context);
    context.uc_stack.ss_sp = pool.back()->stack.get();
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, &Live, 0);
  }
  std::vector<Fiber*> taken;
  for (unsigned thread = 0; thread < count; ++thread) {
    Fiber& fiber = *pool[first + thread];
    fiber.lane = {{thread}, &block};
    fiber.done = false;
    fiber.waits = nullptr;
    taken.push_back(&fiber);
  }
  return taken;
}

}  // namespace

Block::Block(unsigned number, unsigned blocks, unsigned count)
    : index{number}, grid{blocks}, threads{count}, all(static_cast<int>(count)) {
  for (unsigned first = 0; first < count; first += 32) {
    warps.emplace_back(static_cast<int>(std::min(32u, count - first)));
  }
}

Block::~Block() { std::free(shared_); }

void* Block::Shared(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (shared_ == nullptr) {
    shared_bytes_ = bytes;
    shared_ = static_cast<char*>(std::malloc(bytes - faults.short_shared));
    std::memset(shared_, 0xff, bytes - faults.short_shared);
  }
  if (shared_bytes_ != bytes) Fail("a kernel declares shared memory twice");
  return shared_;
}

void Barrier::Wait() {
  const unsigned mine = round_;
  Before(&order_[mine % 2]);
  if (++arrived_ == threads_) {
    arrived_ = 0;
    ++round_;
  } else {
    current->waits = this;
    current->round = mine;
    GiveWay();
    current->waits = nullptr;
  }
  After(&order_[mine % 2]);
}

void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  work = &body;
  std::vector<std::unique_ptr<Block>> made;
  std::vector<std::vector<Fiber*>> fibers;
  for (unsigned number = 0; number < blocks; ++number) {
    made.push_back(std::make_unique<Block>(number, blocks, threads));
#ifdef CUDA_HOST_RACES
    fibers.push_back(TakeFibers(*made.back(), threads, size_t{number} * threads));
#else
    fibers.push_back(TakeFibers(*made.back(), threads, 0));
    RunBlock(fibers.back());
    made.pop_back();
#endif
  }
#ifdef CUDA_HOST_RACES
  Before(&begun);
  for (const std::vector<Fiber*>& block : fibers) RunBlock(block);
  After(&ended);
#endif
  lane = nullptr;
}

}  // namespace cuda_host
