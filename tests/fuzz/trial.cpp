#include "trial.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>

namespace packfree::fuzz {
namespace {

// Calls body(index, offset, is_padding) for every element.
template <class Body>
void ForEach(const Axes& axes, const std::vector<int64_t>& strides, const Body& body) {
  const size_t count = axes.sizes.size();
  if (std::any_of(axes.sizes.begin(), axes.sizes.end(), [](int64_t size) { return size == 0; })) return;
  std::vector<int64_t> index(count, 0);
  while (true) {
    int64_t offset = 0, token = 0;
    for (size_t a = 0; a < count; ++a) offset += index[a] * strides[a];
    if (axes.token >= 0) token = index[axes.token] + (axes.row < 0 ? 0 : index[axes.row] * axes.sizes[axes.token]);
    body(index, offset, axes.token >= 0 && token >= axes.owned);
    size_t a = count;
    while (a > 0 && ++index[a - 1] == axes.sizes[a - 1]) index[--a] = 0;
    if (a == 0) return;
  }
}

std::vector<int64_t> ContiguousStrides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t a = sizes.size(); a-- > 1;) strides[a - 1] = strides[a] * std::max<int64_t>(sizes[a], 1);
  return strides;
}

int64_t Extent(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t last = 0;
  for (size_t a = 0; a < sizes.size(); ++a) {
    if (sizes[a] == 0) return 0;
    last += (sizes[a] - 1) * strides[a];
  }
  return last + 1;
}

void Store(char* target, Dtype dtype, double value) {
  const float narrow = static_cast<float>(value);
  switch (dtype) {
    case Dtype::kFloat64:
      std::memcpy(target, &value, 8);
      break;
    case Dtype::kFloat32:
      std::memcpy(target, &narrow, 4);
      break;
    case Dtype::kBFloat16: {
      uint32_t bits;
      std::memcpy(&bits, &narrow, 4);
      if (narrow != narrow) bits |= 1u << 22;  // stays NaN without the lower half
      const uint16_t upper = static_cast<uint16_t>(bits >> 16);
      std::memcpy(target, &upper, 2);
      break;
    }
    case Dtype::kFloat16: {
      const _Float16 half = static_cast<_Float16>(narrow);
      std::memcpy(target, &half, 2);
      break;
    }
  }
}

bool IsNan(const char* source, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: {
      double value;
      std::memcpy(&value, source, 8);
      return value != value;
    }
    case Dtype::kFloat32: {
      float value;
      std::memcpy(&value, source, 4);
      return value != value;
    }
    default: {
      uint16_t bits;
      std::memcpy(&bits, source, 2);
      const uint16_t infinity = dtype == Dtype::kBFloat16 ? 0x7f80 : 0x7c00;
      return (bits & 0x7fff) > infinity;
    }
  }
}

// FNV-1a: each op has draws of its own.
uint64_t HashOf(const char* text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *text != '\0'; ++text) hash = (hash ^ static_cast<uint8_t>(*text)) * 0x100000001b3u;
  return hash;
}

std::string Text(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(values[i]);
  return text + "]";
}

}  // namespace

// splitmix64
uint64_t Draw::Bits() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

int64_t Draw::Between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
}

std::vector<int64_t> Draw::Slots(int64_t batch, int64_t rows) {
  std::vector<int64_t> slots(static_cast<size_t>(rows));
  std::iota(slots.begin(), slots.end(), 0);
  for (int64_t i = rows; i > 1; --i) std::swap(slots[i - 1], slots[Between(0, i - 1)]);
  slots.resize(static_cast<size_t>(batch));
  for (int64_t& slot : slots) slot = Chance(15) ? -1 : slot;
  return slots;
}

double Draw::Uniform(double low, double high) {
  return low + (high - low) * static_cast<double>(Bits() >> 11) / 9007199254740992.0;
}

const char* NameOf(Dtype dtype) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "float64"};
  return kNames[static_cast<int>(dtype)];
}

Trial::Trial(const char* op, uint64_t seed, Plant plant, bool describe)
    : draw(HashOf(op) + seed), op_(op), seed_(seed), plant_(plant), describe_(describe), wild_(draw.Chance(10)) {}

Tier Trial::DrawTier(Tier highest) {
  return static_cast<Tier>(draw.Between(0, static_cast<int64_t>(std::min(highest, BestTier()))));
}

Dtype Trial::DrawDtype() {
  return draw.Pick<Dtype>(
      {Dtype::kFloat32, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat64});
}

int64_t Trial::DrawTokens(int64_t most, int64_t edge) {
  most = std::max<int64_t>(most, 1);
  if (draw.Chance(3)) return 0;
  if (draw.Chance(30)) return draw.Between(1, std::min<int64_t>(most, 8));
  if (draw.Chance(50))
    return std::clamp<int64_t>(draw.Between(1, 1 + most / edge) * edge + draw.Between(-1, 1), 1, most);
  return draw.Between(1, most);
}

PackingView Trial::NewPacking(const std::vector<int64_t>& lengths, int64_t tokens) {
  const size_t count = lengths.size() + 1;
  int32_t* offsets = static_cast<int32_t*>(NewBlock("boundaries", count * sizeof(int32_t), sizeof(int32_t)));
  offsets[0] = 0;
  for (size_t n = 0; n + 1 < count; ++n) offsets[n + 1] = offsets[n] + static_cast<int32_t>(lengths[n]);
  Seal(offsets);
  boundaries_ += " boundaries " + Text(std::vector<int64_t>(offsets, offsets + std::min<size_t>(count, 40)));
  if (count > 40) boundaries_ += " and so on, " + std::to_string(count - 1) + " sequences";
  boundaries_ += " of " + std::to_string(tokens) + " tokens";
  return {offsets, static_cast<int64_t>(lengths.size()), tokens};
}

PackingView Trial::DrawPacking(int64_t rows, int64_t row_tokens, int64_t edge) {
  std::vector<int64_t> lengths;
  const int64_t style = draw.Between(0, 3);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t left = row_tokens; left > 0; left -= lengths.back()) {
      const int64_t near = draw.Between(1, 2) * edge + draw.Between(-1, 1);
      lengths.push_back(style == 0   ? left
                        : style == 1 ? 1
                        : style == 2 ? std::clamp<int64_t>(near, 1, left)
                                     : draw.Between(1, left));
    }
  }
  if (draw.Chance(30) && !lengths.empty()) {  // padding
    lengths.resize(static_cast<size_t>(draw.Between(0, static_cast<int64_t>(lengths.size()))));
    if (!lengths.empty()) lengths.back() = draw.Between(1, lengths.back());
  }
  if (draw.Chance(40)) {
    for (int64_t empty = draw.Between(1, 3); empty > 0; --empty) {
      lengths.insert(lengths.begin() + draw.Between(0, static_cast<int64_t>(lengths.size())), 0);
    }
  }
  // As many offsets as the form with a static shape has.
  if (draw.Chance(5)) lengths.resize(std::max<size_t>(lengths.size(), static_cast<size_t>(rows * row_tokens)), 0);
  if (plant_ == Plant::kRace) lengths = {row_tokens, -row_tokens, row_tokens};
  return NewPacking(lengths, rows * row_tokens);
}

std::vector<int64_t> Trial::DrawStrides(const std::vector<int64_t>& sizes, Lies lies, bool may_repeat) {
  std::vector<int64_t> strides = ContiguousStrides(sizes);
  if (lies == Lies::kContiguous) return strides;
  std::vector<size_t> order(sizes.size());  // the innermost axis last
  std::iota(order.begin(), order.end(), 0);
  if (draw.Chance(40)) {
    const size_t movable = order.size() - (lies == Lies::kLastDense ? 1 : 0);
    for (size_t i = movable; i > 1; --i) std::swap(order[i - 1], order[draw.Between(0, static_cast<int64_t>(i) - 1)]);
  }
  const bool gaps = draw.Chance(40);
  int64_t reach = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t a = order[i];
    const bool dense = lies == Lies::kLastDense && a + 1 == sizes.size();
    if (gaps && !dense) reach += draw.Between(0, 3);
    strides[a] = reach;
    if (sizes[a] <= 1 && draw.Chance(30)) strides[a] = draw.Pick<int64_t>({0, 1, 999983});
    if (may_repeat && !dense && draw.Chance(4)) {
      strides[a] = 0;
    } else {
      reach *= std::max<int64_t>(sizes[a], 1);
    }
  }
  return strides;
}

void Trial::Fill(char* data, Dtype dtype, const Axes& axes, const std::vector<int64_t>& strides, int64_t extent,
                 Range range) {
  const std::vector<double> odd = {0.0,
                                   -0.0,
                                   1e-42,
                                   3e38,
                                   -3e38,
                                   65504.0,
                                   std::numeric_limits<double>::infinity(),
                                   -std::numeric_limits<double>::infinity(),
                                   std::nan("")};
  bool skip = plant_ == Plant::kUninitialized;
  ForEach(axes, strides, [&](const std::vector<int64_t>&, int64_t offset, bool padding) {
    if (padding) return;
    const double value = wild_ && draw.Chance(3) ? draw.Pick(odd) : draw.Uniform(range.low, range.high);
    if (offset < extent && !skip) Store(data + offset * ElementBytes(dtype), dtype, value);
    skip = false;
  });
}

Strided Trial::Read(const char* name, Dtype dtype, const Axes& axes, Lies lies, Range range) {
  std::vector<int64_t> strides = DrawStrides(axes.sizes, lies, true);
  int64_t extent = Extent(axes.sizes, strides);
  if (plant_ == Plant::kShort && extent > 1) --extent;
  const int64_t bytes = ElementBytes(dtype);
  char* data = static_cast<char*>(NewBlock(name, static_cast<size_t>(extent * bytes), static_cast<size_t>(bytes)));
  Fill(data, dtype, axes, strides, extent, range);
  Seal(data);
  if (plant_ == Plant::kOverflow && lies != Lies::kContiguous) strides[0] = int64_t{1} << 62;
  return {data, strides};
}

template <class Int>
const Int* Trial::ReadIntegers(const char* name, const std::vector<Int>& values) {
  Int* data = static_cast<Int*>(NewBlock(name, values.size() * sizeof(Int), sizeof(Int)));
  std::copy(values.begin(), values.end(), data);
  Seal(data);
  return data;
}
template const int32_t* Trial::ReadIntegers(const char*, const std::vector<int32_t>&);
template const int64_t* Trial::ReadIntegers(const char*, const std::vector<int64_t>&);

void* Trial::Write(const char* name, Dtype dtype, const Axes& axes, Padding padding) {
  const std::vector<int64_t> strides = ContiguousStrides(axes.sizes);
  const int64_t extent = Extent(axes.sizes, strides), bytes = ElementBytes(dtype);
  char* data = static_cast<char*>(NewBlock(name, static_cast<size_t>(extent * bytes), static_cast<size_t>(bytes)));
  results_.push_back({name, dtype, axes, strides, data, extent, padding});
  return data;
}

Strided Trial::Update(const char* name, Dtype dtype, const Axes& axes, Lies lies) {
  const std::vector<int64_t> strides = DrawStrides(axes.sizes, lies, false);
  const int64_t extent = Extent(axes.sizes, strides), bytes = ElementBytes(dtype);
  char* data = static_cast<char*>(NewBlock(name, static_cast<size_t>(extent * bytes), static_cast<size_t>(bytes)));
  Fill(data, dtype, axes, strides, extent, {-1, 1});
  results_.push_back({name, dtype, axes, strides, data, extent, Padding::kUntouched});
  return {data, strides};
}

void Trial::Describe(const char* format, ...) {
  if (!describe_) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  std::printf("INPUT %s %llu: %s%s%s\n", op_, static_cast<unsigned long long>(seed_), text, boundaries_.c_str(),
              wild_ ? ", with NaN and infinities" : "");
  std::fflush(stdout);
}

// Plants a fault in the first result that has room for it.
void Trial::Spoil() {
  if (plant_ != Plant::kUnwritten && plant_ != Plant::kPadding) return;
  for (const Result& result : results_) {
    bool done = false;
    const int64_t bytes = ElementBytes(result.dtype);
    ForEach(result.axes, result.strides, [&](const std::vector<int64_t>&, int64_t offset, bool padding) {
      if (done || padding != (plant_ == Plant::kPadding)) return;
      std::memset(result.data + offset * bytes, padding ? 0x11 : FreshByte(), static_cast<size_t>(bytes));
      done = true;
    });
    if (done) return;
  }
}

bool Trial::CheckResult(const Result& result, std::string* bits) const {
  const int64_t bytes = ElementBytes(result.dtype);
  const char fresh = static_cast<char>(FreshByte());
  std::vector<bool> element(static_cast<size_t>(result.extent), false);
  const auto holds = [&](int64_t offset, char byte) {
    const char* p = result.data + offset * bytes;
    return std::all_of(p, p + bytes, [byte](char b) { return b == byte; });
  };
  bool good = true;
  const auto finding = [&](const char* what, const std::string& where) {
    if (good) std::printf("FINDING %s of %s at %s\n", what, result.name, where.c_str());
    good = false;
  };
  ForEach(result.axes, result.strides, [&](const std::vector<int64_t>& index, int64_t offset, bool padding) {
    element[static_cast<size_t>(offset)] = true;
    if (padding) {
      if (!holds(offset, result.padding == Padding::kZero ? 0 : fresh))
        finding("padding is not left as it must be", Text(index));
      return;
    }
    const char* p = result.data + offset * bytes;
    if (!wild_ && IsNan(p, result.dtype)) finding("an element was not written, or is NaN", Text(index));
    bits->append(p, static_cast<size_t>(bytes));
  });
  for (int64_t offset = 0; offset < result.extent; ++offset) {
    if (!element[static_cast<size_t>(offset)] && !holds(offset, fresh)) {
      finding("memory between the elements was written", "element " + std::to_string(offset) + " of the block");
    }
  }
  return good;
}

bool Trial::Check(std::vector<std::string>* bits) {
  Spoil();
  bool good = true;
  for (const Result& result : results_) {
    bits->emplace_back();
    good = CheckResult(result, &bits->back()) && good;
  }
  return good;
}

}  // namespace packfree::fuzz
