// Fuzzes the CPU kernels: random shapes, boundaries, strides and dtypes in every tier that this CPU has.
//
//   fuzz                                  lists the ops
//   fuzz OP [--inputs N] [--first SEED] [--seconds S] [--guard-pages] [--plant FAULT]
//
// Input number SEED is the same in every build of this program. Prints a line before each input, FINDING and what was
// found, and at the end how many were tried; exits with 1 after a finding. tools/sanitize.py builds and runs it.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "trial.h"

namespace packfree::fuzz {
namespace {

struct Op {
  const char* name;
  void (*run)(Trial&);
};
constexpr Op kOps[] = {
    {"causal_conv1d", FuzzConv},
    {"causal_conv1d_update", FuzzConvUpdate},
    {"flash_attn_varlen", FuzzAttention},
    {"gated_delta_rule", FuzzGatedDeltaRule},
    {"kda", FuzzKda},
    {"mamba1_scan", FuzzMamba1},
    {"mamba2_scan", FuzzMamba2},
    {"selective_state_update", FuzzStateUpdate},
};
constexpr const char* kPlants[] = {"none", "short", "unwritten", "uninitialized", "padding", "race", "overflow"};

struct Options {
  uint64_t inputs = 100;
  uint64_t first = 0;
  double seconds = 0;  // 0: no limit
  bool guard_pages = false;
  Plant plant = Plant::kNone;
};

// Fresh memory is NaN in the first run and holds plausible numbers in the second.
Surroundings SurroundingsOf(uint64_t seed, bool second) {
  constexpr int kThreads[][2] = {{1, 3}, {2, 4}, {4, 1}, {3, 2}};
  return {static_cast<uint8_t>(second ? 0x3e : 0xff), second, kThreads[seed % 4][second ? 1 : 0]};
}

bool TryInput(const Op& op, uint64_t seed, const Options& options) {
  std::vector<std::string> bits[2];
  for (int second = 0; second < 2; ++second) {
    SetSurroundings(SurroundingsOf(seed, second == 1), options.guard_pages);
    Trial trial(op.name, seed, options.plant, second == 0);
    op.run(trial);
    const bool good = trial.Check(&bits[second]);
    if (good && second == 1) {
      for (size_t i = 0; i < bits[0].size(); ++i) {
        if (bits[0][i] == bits[1][i]) continue;
        std::printf("FINDING bits of %s depend on memory that was not written, on alignment or on threads\n",
                    trial.ResultName(i));
        return false;
      }
    }
    FreeBlocks();
    if (!good) return false;
  }
  return true;
}

int Run(const Op& op, const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  uint64_t tried = 0;
  for (; tried < options.inputs; ++tried) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (options.seconds > 0 && passed.count() > options.seconds) break;
    if (!TryInput(op, options.first + tried, options)) return 1;
  }
  std::printf("TRIED %llu\n", static_cast<unsigned long long>(tried));
  return 0;
}

[[noreturn]] void Refuse(const char* what, const char* got) {
  std::fprintf(stderr, "fuzz: unknown %s %s\n", what, got);
  std::exit(2);
}

}  // namespace
}  // namespace packfree::fuzz

int main(int count, char** words) {
  using namespace packfree::fuzz;
  if (count < 2) {
    for (const Op& op : kOps) std::puts(op.name);
    return 0;
  }
  Options options;
  for (int i = 2; i < count; ++i) {
    const char* word = words[i];
    if (std::strcmp(word, "--guard-pages") == 0) {
      options.guard_pages = true;
      continue;
    }
    if (i + 1 == count) Refuse("option, or one without its value:", word);
    const char* value = words[++i];
    if (std::strcmp(word, "--inputs") == 0) {
      options.inputs = std::strtoull(value, nullptr, 10);
    } else if (std::strcmp(word, "--first") == 0) {
      options.first = std::strtoull(value, nullptr, 10);
    } else if (std::strcmp(word, "--seconds") == 0) {
      options.seconds = std::strtod(value, nullptr);
    } else if (std::strcmp(word, "--plant") == 0) {
      int plant = 0;
      while (plant < static_cast<int>(std::size(kPlants)) && std::strcmp(value, kPlants[plant]) != 0) ++plant;
      if (plant == static_cast<int>(std::size(kPlants))) Refuse("fault", value);
      options.plant = static_cast<Plant>(plant);
    } else {
      Refuse("option", word);
    }
  }
  for (const Op& op : kOps) {
    if (std::strcmp(op.name, words[1]) == 0) return Run(op, options);
  }
  Refuse("op", words[1]);
}
