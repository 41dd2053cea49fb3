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
unsigned wave_lanes = 32;

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
  const unsigned* waits = nullptr;  // the round of what this fiber waits for, and which round it came in
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

void WaitFor(const unsigned& round) {
  current->waits = &round;
  current->round = round;
  GiveWay();
  current->waits = nullptr;
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

void RunBlock(Block& block, const std::vector<Fiber*>& fibers) {
  for (bool left = true; left;) {
    left = false;
    bool moved = false;
    for (Fiber* fiber : fibers) {
      if (fiber->done) continue;
      left = true;
      if (fiber->waits != nullptr && *fiber->waits == fiber->round) continue;
      Resume(*fiber);
      moved = true;
    }
    if (moved) continue;
    for (Wave& wave : block.waves) moved = wave.Meet() || moved;
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
  for (unsigned first = 0; first < count; first += wave_lanes) waves.emplace_back(wave_lanes);
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
  const void* call = __builtin_return_address(0);
  if (arrived_ > 0 && call != call_) Fail("threads of a block wait at different barriers");
  call_ = call;
  Before(&order_[mine % 2]);
  if (++arrived_ == threads_) {
    arrived_ = 0;
    ++round_;
  } else {
    WaitFor(round_);
  }
  After(&order_[mine % 2]);
}

uint64_t Wave::Exchange(uint64_t value, unsigned source, bool whole) {
  Waiting& own = waits_[OwnLane()];
  own = {__builtin_return_address(0), value, ~uint64_t{0}, source, whole};
  WaitFor(round_);
  return own.got;
}

bool Wave::Meet() {
  bool any = false, same = true;
  for (Waiting& own : waits_) {
    if (own.call == nullptr) continue;
    any = true;
    if (own.source < waits_.size() && waits_[own.source].call == own.call) own.got = waits_[own.source].given;
    if (!own.whole) continue;
    for (const Waiting& other : waits_) same = same && other.call == own.call;
  }
  if (!same) Fail("lanes of a warp are missing in an exchange of all of them");
  for (Waiting& own : waits_) own.call = nullptr;
  round_ += any;
  return any;
}

unsigned WidthOf(int width) {
  const unsigned lanes = static_cast<unsigned>(width);
  if (lanes == 0 || lanes > wave_lanes || (lanes & (lanes - 1)) != 0) Fail("an exchange of no width of a wave");
  return lanes;
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
    RunBlock(*made.back(), fibers.back());
    made.pop_back();
#endif
  }
#ifdef CUDA_HOST_RACES
  Before(&begun);
  for (unsigned number = 0; number < blocks; ++number) RunBlock(*made[number], fibers[number]);
  After(&ended);
#endif
  lane = nullptr;
}

}  // namespace cuda_host
