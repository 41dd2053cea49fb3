// Random calls of the CUDA kernels on a host, for a sanitizer to watch: every tensor is a block of memory of its own.
//
//     sanitize [--wave N] [--first N] [--inputs N] [--tokens N] [--skip-barrier N] [--short] [--short-shared]
//
// A wave has --wave lanes, rows have up to --tokens tokens. The last three are faults on purpose (engine.h; --short:
// every tensor lacks its last element). Prints TRIED and the number of inputs.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/causal_conv1d/causal_conv1d.h"
#include "cuda/mamba1_scan/mamba1_scan.h"
#include "cuda/packing/packing.h"
#include "cuda/mamba2_scan/mamba2_scan.h"
#include "engine.h"

namespace packfree {

static bool short_tensors = false;
static int64_t most_tokens = 150;

class Input {
 public:
  explicit Input(unsigned number) : random_(number) {}

  int64_t Between(int64_t low, int64_t high) { return low + static_cast<int64_t>(random_() % (high - low + 1)); }
  bool Coin() { return Between(0, 1) == 1; }
  Dtype DrawDtype() { return static_cast<Dtype>(Between(0, 2)); }

  // Memory of exactly `elements`, small positive numbers in floats of any dtype.
  void* Tensor(Dtype dtype, int64_t elements) {
    const int64_t bytes = ElementBytes(dtype) * std::max<int64_t>(0, elements - (short_tensors ? 1 : 0));
    memory_.push_back(std::make_unique<char[]>(bytes));
    char* data = memory_.back().get();
    for (int64_t i = 0; i < bytes; i += ElementBytes(dtype)) {
      const float value = static_cast<float>(Between(1, 100)) / 128;
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      const uint16_t bf16 = static_cast<uint16_t>(bits >> 16);
      const _Float16 fp16 = static_cast<_Float16>(value);
      if (dtype == Dtype::kFloat32) std::memcpy(data + i, &value, 4);
      if (dtype == Dtype::kBFloat16) std::memcpy(data + i, &bf16, 2);
      if (dtype == Dtype::kFloat16) std::memcpy(data + i, &fp16, 2);
    }
    return data;
  }
  float* Floats(int64_t elements) { return static_cast<float*>(Tensor(Dtype::kFloat32, elements)); }
  float* FloatsOrNull(int64_t elements) { return Coin() ? Floats(elements) : nullptr; }
  template <class Int>
  Int* Integers(const std::vector<Int>& values) {
    memory_.push_back(std::make_unique<char[]>(values.size() * sizeof(Int)));
    std::memcpy(memory_.back().get(), values.data(), values.size() * sizeof(Int));
    return reinterpret_cast<Int*>(memory_.back().get());
  }

  // Sequences of `rows` rows of T tokens, some of them empty, with padding behind the last.
  PackingView Packing(int64_t rows, int64_t T) {
    std::vector<int32_t> offsets = {0};
    for (int64_t row = 0; row < rows; ++row) {
      while (Coin() && offsets.back() < (row + 1) * T) {
        offsets.push_back(static_cast<int32_t>(Between(offsets.back(), (row + 1) * T)));
      }
      if (row + 1 < rows) offsets.push_back(static_cast<int32_t>((row + 1) * T));
    }
    return {Integers(offsets), static_cast<int64_t>(offsets.size()) - 1, rows * T};
  }

 private:
  std::mt19937 random_;
  std::vector<std::unique_ptr<char[]>> memory_;
};

static void Expect(const char* error) {
  if (error != nullptr) {
    std::fprintf(stderr, "launch failed: %s\n", error);
    std::abort();
  }
}

static void Convolution(Input& input) {
  const int64_t rows = input.Between(1, 2), T = input.Between(1, most_tokens), D = input.Between(1, 70);
  ConvArgs args{};
  args.packing = input.Packing(rows, T);
  args.row_tokens = T;
  args.channels = D;
  args.width = static_cast<int>(input.Between(kConvMinWidth, kConvMaxWidth));
  args.silu = input.Coin();
  args.channels_last = input.Coin();
  args.dtype = input.DrawDtype();
  const ConvStrides strides = args.channels_last ? ConvStrides{T * D, D, 1} : ConvStrides{T * D, 1, T};
  const int64_t states = args.packing.num_sequences * D * (args.width - 1);
  args.x = input.Tensor(args.dtype, rows * T * D);
  args.x_strides = strides;
  args.weight = input.Floats(args.width * D);
  args.bias = input.FloatsOrNull(D);
  args.initial_state = input.FloatsOrNull(states);
  int32_t* owners = input.Integers(std::vector<int32_t>(rows * T));
  const ConvForwardArgs forward{args, input.Tensor(args.dtype, rows * T * D), strides,
                                input.Tensor(args.dtype, states)};
  Expect(CausalConv1dForwardCuda(forward, owners, nullptr));
  const int64_t tiles = ConvTiles(rows, T, args.channels_last);
  const ConvBackwardArgs backward{args,
                                  input.Tensor(args.dtype, rows * T * D),
                                  strides,
                                  input.FloatsOrNull(states),
                                  input.Tensor(args.dtype, rows * T * D),
                                  strides,
                                  input.Floats(states),
                                  input.Floats(args.width * D),
                                  input.FloatsOrNull(D),
                                  input.Floats(tiles * (args.width + 1) * D)};
  Expect(CausalConv1dBackwardCuda(backward, owners, nullptr));

  const int64_t B = input.Between(1, 3), length = input.Between(args.width - 1, args.width + 1);
  const int64_t tokens = input.Between(1, 3);
  const ConvUpdateArgs update{B,
                              D,
                              tokens,
                              args.width,
                              length,
                              args.silu,
                              input.Tensor(args.dtype, B * D * tokens),
                              {D * tokens, 1, tokens},
                              input.Tensor(args.dtype, B * D * length),
                              {D * length, 1, length},
                              nullptr,
                              input.Coin() ? input.Integers(std::vector<int64_t>(B, 5)) : nullptr,
                              args.weight,
                              args.bias,
                              input.Tensor(args.dtype, B * D * tokens),
                              args.dtype};
  Expect(CausalConv1dUpdateCuda(update, B, nullptr));
}

static void Scan(Input& input) {
  const int64_t rows = input.Between(1, 2), T = input.Between(1, most_tokens), G = input.Between(1, 2);
  const int64_t D = G * input.Between(1, 5), N = input.Between(1, 3);
  const Dtype dtype = input.DrawDtype(), wide = Dtype::kFloat32;
  const bool channels_last = input.Coin(), gated = input.Coin();
  const ScanStrides strides = channels_last ? ScanStrides{T * D, 1, D} : ScanStrides{T * D, T, 1};
  const auto read = [&] { return ScanInput{input.Tensor(dtype, rows * T * D), dtype, strides}; };
  const auto write = [&] { return ScanOutput{input.Tensor(dtype, rows * T * D), dtype, strides}; };
  const auto coefficients = [&] {
    if (input.Coin()) return ScanCoefficients{input.Floats(D * N), true, wide, 0, 0, 0, 0};
    return ScanCoefficients{input.Tensor(dtype, rows * G * N * T), false, dtype, G * N * T, N * T, 1, N};
  };
  ScanArgs args{};
  args.packing = input.Packing(rows, T);
  args.row_tokens = T;
  args.channels = D;
  args.states = N;
  args.groups = G;
  args.softplus = input.Coin();
  args.u = read();
  args.delta = read();
  if (gated) args.z = read();
  args.A = input.Floats(D * N);
  args.B = coefficients();
  args.C = coefficients();
  args.D = input.FloatsOrNull(D);
  args.delta_bias = input.FloatsOrNull(D);
  const int64_t states = args.packing.num_sequences * D * N;
  args.initial_state = input.FloatsOrNull(states);
  const ScanForwardArgs forward{args, write(), input.FloatsOrNull(states)};
  Expect(Mamba1ScanForwardCuda(forward, input.Floats(ScanForwardScratch(args)), nullptr));

  ScanBackwardArgs backward{};
  static_cast<ScanArgs&>(backward) = args;
  const int64_t token_partials = ScanColumns(args) * rows * T * N;
  backward.dy = read();
  backward.dfinal_state = input.FloatsOrNull(states);
  backward.du = write();
  backward.ddelta = write();
  if (gated) backward.dz = write();
  backward.dinitial_state = input.FloatsOrNull(states);
  backward.dA = input.Floats(D * N);
  backward.dB = args.B.fixed ? input.Floats(D * N) : input.Tensor(dtype, rows * T * G * N);
  backward.dC = args.C.fixed ? input.Floats(D * N) : input.Tensor(dtype, rows * T * G * N);
  backward.dD = input.FloatsOrNull(D);
  backward.ddelta_bias = input.FloatsOrNull(D);
  backward.parameter_partials = input.Floats(ScanTiles(rows * T) * ScanParameterRows(args) * D);
  if (!args.B.fixed) backward.dB_partials = input.Floats(token_partials);
  if (!args.C.fixed) backward.dC_partials = input.Floats(token_partials);
  Expect(Mamba1ScanBackwardCuda(backward, input.Floats(ScanBackwardScratch(args)), nullptr));
}

static void StateUpdate(Input& input) {
  const int64_t B = input.Between(1, 2), G = input.Between(1, 2), H = G * input.Between(1, 2);
  const int64_t P = input.Between(1, 5), S = input.Between(1, 40), rows = B * H * P;
  const Dtype dtype = input.DrawDtype();
  const bool wide = input.Coin(), wide_coefficients = input.Coin(), gated = input.Coin();
  const Dtype state_dtype = wide ? Dtype::kFloat32 : dtype, coefficients = wide_coefficients ? Dtype::kFloat32 : dtype;
  // States by number: one of them, padding, and one that is not there.
  std::vector<int64_t> slots(B);
  for (int64_t b = 0; b < B; ++b) slots[b] = input.Coin() ? b : input.Coin() ? -1 : B;
  const int64_t* state_of = input.Coin() ? input.Integers(slots) : nullptr;
  const SelectiveStateUpdate args{dtype,
                                  B,
                                  H,
                                  G,
                                  P,
                                  S,
                                  input.Tensor(state_dtype, rows * S),
                                  H * P * S,
                                  P * S,
                                  S,
                                  B,
                                  state_of,
                                  wide,
                                  input.Tensor(dtype, rows),
                                  input.Tensor(coefficients, B * G * S),
                                  input.Tensor(coefficients, B * G * S),
                                  wide_coefficients,
                                  gated ? input.Tensor(dtype, rows) : nullptr,
                                  input.Floats(rows),
                                  H * P,
                                  P,
                                  1,
                                  input.Floats(H * P * S),
                                  P * S,
                                  S,
                                  1,
                                  input.FloatsOrNull(H * P),
                                  input.FloatsOrNull(H * P),
                                  input.Coin(),
                                  input.Tensor(dtype, rows)};
  Expect(SelectiveStateUpdateCuda(args, nullptr));
}

static void Boundaries(Input& input) {
  const int64_t rows = input.Between(1, 2), T = input.Between(1, 20 * most_tokens);
  std::vector<int64_t> positions(rows * T);
  for (int64_t& position : positions) position = input.Between(0, 2);
  const BoundarySource source{
      input.Integers(positions), true, static_cast<BoundaryRule>(input.Between(0, 2)), T, rows * T, rows == 1};
  auto* counts = reinterpret_cast<BoundaryCount*>(input.Integers(std::vector<int64_t>(source.tiles())));
  int32_t* offsets = input.Integers(std::vector<int32_t>(rows * T + 1));
  Expect(BoundariesCuda(source, counts, offsets, nullptr));
  Expect(BoundOffsetsCuda(source.values, true, rows * T, T, offsets, nullptr));
}

}  // namespace packfree

int main(int count, char** arguments) {
  unsigned first = 0, inputs = 1;
  for (int i = 1; i < count; ++i) {
    const std::string option = arguments[i];
    if (option == "--wave") cuda_host::wave_lanes = std::atoi(arguments[++i]);
    if (option == "--first") first = std::atoi(arguments[++i]);
    if (option == "--inputs") inputs = std::atoi(arguments[++i]);
    if (option == "--tokens") packfree::most_tokens = std::atoi(arguments[++i]);
    if (option == "--skip-barrier") cuda_host::faults.skipped_barrier = std::atoi(arguments[++i]);
    if (option == "--short") packfree::short_tensors = true;
    if (option == "--short-shared") cuda_host::faults.short_shared = 4;
  }
  for (unsigned number = first; number < first + inputs; ++number) {
    packfree::Input input(number);
    packfree::Convolution(input);
    packfree::Scan(input);
    packfree::StateUpdate(input);
    packfree::Boundaries(input);
  }
  std::printf("TRIED %u\n", inputs);
}
