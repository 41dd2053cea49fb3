#include "engine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#ifndef CUDA_HOST_THREADS
#include <setjmp.h>
#include <ucontext.h>
#endif

namespace cuda_host {

thread_local Lane* lane = nullptr;
Faults faults;

static void Fail(const char* text) {
  std::fprintf(stderr, "cuda_host: %s\n", text);
  std::abort();
}

Block::Block(unsigned number, unsigned blocks, unsigned count)
    : index{number}, grid{blocks}, threads{count}, all(static_cast<int>(count)) {
  for (unsigned first = 0; first < count; first += 32) warps.emplace_back(static_cast<int>(std::min(32u, count - first)));
}

Block::~Block() { std::free(shared_); }

void* Block::Shared(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (shared_ == nullptr) {
    shared_ = static_cast<char*>(std::malloc(bytes - faults.short_shared));
    shared_bytes_ = bytes;
    std::memset(shared_, 0xff, bytes - faults.short_shared);
  }
  if (shared_bytes_ != bytes) Fail("a kernel declares shared memory twice");
  return shared_;
}

#ifdef CUDA_HOST_THREADS

void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  std::vector<std::unique_ptr<Block>> running;
  std::vector<std::thread> workers;
  for (unsigned number = 0; number < blocks; ++number) {
    running.push_back(std::make_unique<Block>(number, blocks, threads));
    for (unsigned thread = 0; thread < threads; ++thread) {
      workers.emplace_back([&body, block = running.back().get(), thread] {
        Lane own{{thread}, block};
        lane = &own;
        body();
      });
    }
  }
  for (std::thread& worker : workers) worker.join();
}

#else

namespace {

constexpr size_t kStackBytes = 128 * 1024;

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  std::unique_ptr<char[]> stack;
  Lane lane;
  const Barrier* waits = nullptr;
  unsigned round = 0;
  bool started = false, done = true;
};

std::vector<std::unique_ptr<Fiber>> fibers;
ucontext_t scheduler;
jmp_buf scheduler_jump;
Fiber* current = nullptr;
const std::function<void()>* work = nullptr;

// swapcontext makes a system call each time; a jump between the same stacks does not. The address sanitizer cannot
// follow such jumps.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kJumps = false;
#else
constexpr bool kJumps = true;
#endif

void Resume(Fiber& fiber) {
  current = &fiber;
  lane = &fiber.lane;
  if (!kJumps) {
    swapcontext(&scheduler, &fiber.context);
  } else if (_setjmp(scheduler_jump) == 0) {
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
}

void Yield() {
  if (!kJumps) {
    swapcontext(&current->context, &scheduler);
  } else if (_setjmp(current->jump) == 0) {
    _longjmp(scheduler_jump, 1);
  }
}

void Enter() {
  for (;;) {
    (*work)();
    current->done = true;
    Yield();
  }
}

void RunBlock(Block& block, unsigned threads) {
  while (fibers.size() < threads) {
    fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers.back();
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.get(), 0, kStackBytes};
    makecontext(&fiber.context, &Enter, 0);
  }
  for (unsigned thread = 0; thread < threads; ++thread) {
    fibers[thread]->lane = {{thread}, &block};
    fibers[thread]->done = false;
    fibers[thread]->waits = nullptr;
  }
  for (bool left = true; left;) {
    left = false;
    bool moved = false;
    for (unsigned thread = 0; thread < threads; ++thread) {
      Fiber& fiber = *fibers[thread];
      if (fiber.done) continue;
      left = true;
      if (fiber.waits != nullptr && fiber.waits->round() == fiber.round) continue;
      Resume(fiber);
      moved = true;
    }
    if (left && !moved) Fail("threads wait at a barrier that others never reach");
  }
}

}  // namespace

void Barrier::Wait() {
  const unsigned mine = round_;
  if (++arrived_ == threads_) {
    arrived_ = 0;
    ++round_;
    return;
  }
  current->waits = this;
  current->round = mine;
  Yield();
  current->waits = nullptr;
}

void RunGrid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  work = &body;
  for (unsigned number = 0; number < blocks; ++number) {
    Block block(number, blocks, threads);
    RunBlock(block, threads);
  }
  lane = nullptr;
}

#endif

}  // namespace cuda_host
