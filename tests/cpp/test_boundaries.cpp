// The text of common/boundaries.h as a GPU runs it: all threads of a block at once, a barrier after each step.
//
//     test_boundaries RULE WIDE ROWS LENGTH < values    prints the offsets; RULE 0 steps, 1 falls, 2 labels
#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <vector>

#include "common/boundaries.h"

namespace packfree {

struct ThreadBlock {
  int64_t index;
  std::barrier<>* barrier;
  int own_thread;

  template <class Step>
  void ForEachThread(const Step& step) const {
    step(own_thread);
    barrier->arrive_and_wait();
  }
};

// Calls body(block) on every thread of one block after another.
template <class Body>
void RunGrid(int64_t blocks, const Body& body) {
  for (int64_t index = 0; index < blocks; ++index) {
    std::barrier<> barrier(kBoundaryThreads);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kBoundaryThreads; ++thread) {
      threads.emplace_back([&, thread] { body(ThreadBlock{index, &barrier, thread}); });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

template <class Int>
void Run(BoundaryRule rule, int64_t rows, int64_t length) {
  const int64_t tokens = rows * length;
  std::vector<Int> values(tokens);
  for (Int& value : values) std::cin >> value;
  const bool clip = rule == BoundaryRule::kLabels && rows == 1;
  const BoundarySource source{values.data(), sizeof(Int) == 8, rule, length, tokens, clip};
  const Marks<Int> marks{values.data(), length, rule};
  std::vector<BoundaryCount> counts(source.tiles());
  std::vector<int32_t> offsets(tokens + 1, -1);
  BoundaryScratch scratch;
  RunGrid(source.tiles(),
          [&](const ThreadBlock& block) { CountBoundaries(block, marks, tokens, counts.data(), scratch); });
  RunGrid(source.tiles(), [&](const ThreadBlock& block) {
    PlaceBoundaries(block, marks, tokens, source.tiles(), clip, counts.data(), offsets.data(), scratch);
  });
  for (const int32_t offset : offsets) std::cout << offset << ' ';
}

}  // namespace packfree

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const auto rule = static_cast<packfree::BoundaryRule>(std::atoi(arguments[1]));
  const int64_t rows = std::atoll(arguments[3]), length = std::atoll(arguments[4]);
  std::atoi(arguments[2]) ? packfree::Run<int64_t>(rule, rows, length) : packfree::Run<int32_t>(rule, rows, length);
}
