// One run of an op on one random input: draws, tensors, and what is checked of the results.
//
// An op's function draws a shape, makes its tensors and calls the kernels' entry points as the bindings would. It runs
// twice with the same draws in different surroundings (memory.h); the results must have the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtypes.h"
#include "common/packing.h"
#include "cpu/simd/tier.h"
#include "memory.h"

namespace packfree::fuzz {

// Faults put in on purpose, to see that they are found. The kernels stay as they are: they get wrong arguments, or
// their results are spoilt.
enum class Plant {
  kNone,
  kShort,          // the last element of every tensor that is read lies outside its block
  kUnwritten,      // an element of a result is as it was before the call
  kUninitialized,  // an element that is read was never written
  kPadding,        // an element of a row after the last boundary is not 0
  kRace,           // sequences overlap, so that several threads write the same rows
  kOverflow,       // strides so large that offsets leave 64 bits
};

// Random numbers that depend on the seed alone (those of <random> differ between libraries).
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t Bits();
  int64_t Between(int64_t low, int64_t high);  // both included
  bool Chance(int percent) { return Between(0, 99) < percent; }
  double Uniform(double low, double high);
  // A row of a cache for each entry of a batch, all different, or -1: padding.
  std::vector<int64_t> Slots(int64_t batch, int64_t rows);
  template <class T>
  T Pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(Between(0, static_cast<int64_t>(from.size()) - 1))];
  }

 private:
  uint64_t state_;
};

// Sizes of a tensor. One axis may count tokens: element [..., r, ..., t, ...] belongs to token r * sizes[token] + t,
// and what belongs to tokens from `owned` on is padding.
struct Axes {
  std::vector<int64_t> sizes;
  int token = -1;  // -1: none
  int row = -1;    // -1: all tokens lie in one row
  int64_t owned = 0;
};
// Axes of a tensor with a row for each token of a pack; its first axis counts them unless said otherwise.
inline Axes PerToken(const PackingView& packing, std::vector<int64_t> sizes, int token = 0, int row = -1) {
  return {std::move(sizes), token, row, packing.end()};
}

// How a tensor lies in memory. kLastDense: the last axis has stride 1, the others lie in any order with any gaps.
enum class Lies { kContiguous, kLastDense, kAnyhow };

struct Strided {
  void* data;
  std::vector<int64_t> strides;
};

struct Range {
  double low, high;
};

// What rows after the last boundary hold after the call.
enum class Padding { kZero, kUntouched };

class Trial {
 public:
  Trial(const char* op, uint64_t seed, Plant plant, bool describe);

  Draw draw;

  // ---- what most ops draw ----
  Tier DrawTier(Tier highest);
  Dtype DrawDtype();
  // At most `most`, often next to a multiple of `edge`, sometimes 0.
  int64_t DrawTokens(int64_t most, int64_t edge);
  // Boundaries of sequences none of which crosses a row. Empty sequences and padding after the last one occur.
  PackingView DrawPacking(int64_t rows, int64_t row_tokens, int64_t edge);
  PackingView NewPacking(const std::vector<int64_t>& lengths, int64_t tokens);

  // ---- tensors that are read ----
  // Elements of padding and gaps between elements stay as fresh memory is: no result may depend on them.
  Strided Read(const char* name, Dtype dtype, const Axes& axes, Lies lies, Range range = {-1, 1});
  const void* Read(const char* name, Dtype dtype, const Axes& axes, Range range = {-1, 1}) {
    return Read(name, dtype, axes, Lies::kContiguous, range).data;
  }
  template <class Int>
  const Int* ReadIntegers(const char* name, const std::vector<Int>& values);

  // ---- tensors that are written: every element of every token must be ----
  void* Write(const char* name, Dtype dtype, const Axes& axes, Padding padding = Padding::kZero);
  Strided Update(const char* name, Dtype dtype, const Axes& axes, Lies lies);

  // Says what was drawn, before a call that may end the process.
  void Describe(const char* format, ...) __attribute__((format(printf, 2, 3)));
  // Looks at all results and gives their bits; false, with a message, at a finding.
  bool Check(std::vector<std::string>* bits);
  const char* ResultName(size_t index) const { return results_[index].name; }

 private:
  struct Result {
    const char* name;
    Dtype dtype;
    Axes axes;
    std::vector<int64_t> strides;
    char* data;
    int64_t extent;  // elements of the block
    Padding padding;
  };
  std::vector<int64_t> DrawStrides(const std::vector<int64_t>& sizes, Lies lies, bool may_repeat);
  void Fill(char* data, Dtype dtype, const Axes& axes, const std::vector<int64_t>& strides, int64_t extent,
            Range range);
  bool CheckResult(const Result& result, std::string* bits) const;
  void Spoil();

  const char* op_;
  uint64_t seed_;
  Plant plant_;
  bool describe_;
  bool wild_;  // tensors hold a few NaN, infinities and the like
  std::string boundaries_;
  std::vector<Result> results_;
};

// What kernels compute in and keep states in.
inline Dtype Wide(Dtype dtype) { return dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32; }
const char* NameOf(Dtype dtype);

// ---- the ops ------------------------------------------------------------------------------------------------------

void FuzzConv(Trial& trial);
void FuzzConvUpdate(Trial& trial);
void FuzzAttention(Trial& trial);
void FuzzGatedDeltaRule(Trial& trial);
void FuzzKda(Trial& trial);
void FuzzMamba1(Trial& trial);
void FuzzMamba2(Trial& trial);
void FuzzStateUpdate(Trial& trial);

}  // namespace packfree::fuzz
