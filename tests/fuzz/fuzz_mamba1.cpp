#include <algorithm>

#include "cpu/mamba1_scan/mamba1_scan.h"
#include "trial.h"

namespace packfree::fuzz {
namespace {

struct Shape {
  int64_t rows, channels, tokens, states, groups;
  PackingView packing;
};

// A tensor [B, D, T] along whose channels or tokens elements lie side by side.
ScanInput ReadStream(Trial& trial, const char* name, Dtype dtype, const Shape& shape, Range range = {-1, 1}) {
  if (trial.draw.Chance(50)) {
    const Axes axes = PerToken(shape.packing, {shape.rows, shape.tokens, shape.channels}, 1, 0);
    const Strided tensor = trial.Read(name, dtype, axes, Lies::kLastDense, range);
    return {tensor.data, dtype, {tensor.strides[0], 1, tensor.strides[1]}};
  }
  const Axes axes = PerToken(shape.packing, {shape.rows, shape.channels, shape.tokens}, 2, 0);
  const Strided tensor = trial.Read(name, dtype, axes, Lies::kLastDense, range);
  // An axis of one channel is said to have stride 1.
  return {tensor.data, dtype, {tensor.strides[0], shape.channels <= 1 ? 1 : tensor.strides[1], tensor.strides[2]}};
}

ScanOutput WriteStream(Trial& trial, const char* name, Dtype dtype, const Shape& shape, bool channels_last) {
  const int64_t whole = shape.channels * shape.tokens;
  if (channels_last) {
    const Axes axes = PerToken(shape.packing, {shape.rows, shape.tokens, shape.channels}, 1, 0);
    return {trial.Write(name, dtype, axes), dtype, {whole, 1, shape.channels}};
  }
  const Axes axes = PerToken(shape.packing, {shape.rows, shape.channels, shape.tokens}, 2, 0);
  return {trial.Write(name, dtype, axes), dtype, {whole, shape.tokens, 1}};
}

ScanCoefficients ReadCoefficients(Trial& trial, const char* name, Dtype dtype, Dtype wide, const Shape& shape) {
  if (trial.draw.Chance(30)) {
    return {trial.Read(name, wide, {{shape.channels, shape.states}}), true, wide, 0, 0, 0, 0};
  }
  if (trial.draw.Chance(50)) {
    const Axes axes = PerToken(shape.packing, {shape.rows, shape.groups, shape.tokens, shape.states}, 2, 0);
    const Strided tensor = trial.Read(name, dtype, axes, Lies::kLastDense);
    return {tensor.data, false, dtype, tensor.strides[0], tensor.strides[1], 1, tensor.strides[2]};
  }
  const Axes axes = PerToken(shape.packing, {shape.rows, shape.groups, shape.states, shape.tokens}, 3, 0);
  const Strided tensor = trial.Read(name, dtype, axes, Lies::kLastDense);
  const int64_t state = shape.states <= 1 ? 1 : tensor.strides[2];
  return {tensor.data, false, dtype, tensor.strides[0], tensor.strides[1], state, tensor.strides[3]};
}

// The gradient of B or C.
void* WriteCoefficientGradient(Trial& trial, const char* name, const ScanCoefficients& of, const ScanArgs& args,
                               Dtype wide) {
  if (of.fixed) return trial.Write(name, wide, {{args.channels, args.states}});
  return trial.Write(name, of.dtype, PerToken(args.packing, {args.packing.tokens, args.groups, args.states}));
}

}  // namespace

void FuzzMamba1(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  // Each tensor may have a dtype of its own, but for double.
  const auto other = [&] {
    if (dtype == Dtype::kFloat64) return dtype;
    return draw.Pick<Dtype>({dtype, dtype, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16});
  };
  ScanArgs shared{};
  const Tier tier = trial.DrawTier(kVectorTier);
  shared.is_double = dtype == Dtype::kFloat64;
  shared.groups = draw.Pick<int64_t>({1, 1, 2, 3});
  shared.channels = shared.groups * draw.Pick<int64_t>({1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 127, 128, 129});
  shared.states = draw.Pick<int64_t>({1, 2, 3, 4, 5, 8, 15, 16, 17, 32});
  shared.softplus = draw.Chance(50);
  const int64_t rows = draw.Between(1, 3), edge = draw.Pick<int64_t>({kScanTokens, kScanTokens, kScanGroupTokens});
  const int64_t most = std::clamp<int64_t>(200000 / (rows * shared.channels * shared.states), 1, 1200);
  shared.row_tokens = trial.DrawTokens(most, edge);
  shared.packing = trial.DrawPacking(rows, shared.row_tokens, edge);
  const Shape shape{rows, shared.channels, shared.row_tokens, shared.states, shared.groups, shared.packing};
  const bool channels_last = draw.Chance(50), gate = draw.Chance(50), skip = draw.Chance(50), bias = draw.Chance(50);
  const bool initial = draw.Chance(50), final_state = draw.Chance(50);
  const Axes states = {{shape.packing.num_sequences, shape.channels, shape.states}};

  shared.u = ReadStream(trial, "u", dtype, shape);
  shared.delta = ReadStream(trial, "delta", other(), shape, {0, 1});
  if (gate) shared.z = ReadStream(trial, "z", other(), shape);
  shared.A = trial.Read("A", wide, {{shape.channels, shape.states}}, {-3, 0});
  shared.B = ReadCoefficients(trial, "B", other(), wide, shape);
  shared.C = ReadCoefficients(trial, "C", other(), wide, shape);
  shared.D = skip ? trial.Read("D", wide, {{shape.channels}}) : nullptr;
  shared.delta_bias = bias ? trial.Read("delta_bias", wide, {{shape.channels}}, {0, 0.5}) : nullptr;
  shared.initial_state = initial ? trial.Read("initial_state", wide, states) : nullptr;
  trial.Describe("tier %s, u %s, delta %s, B=%ld D=%ld T=%ld N=%ld G=%ld%s%s%s%s%s%s%s%s%s", TierName(tier),
                 NameOf(dtype), NameOf(shared.delta.dtype), rows, shape.channels, shape.tokens, shape.states,
                 shape.groups, channels_last ? ", channels last" : "", shared.B.fixed ? ", fixed B" : "",
                 shared.C.fixed ? ", fixed C" : "", gate ? ", z" : "", skip ? ", D" : "", bias ? ", bias" : "",
                 shared.softplus ? ", softplus" : "", initial ? ", initial state" : "",
                 final_state ? ", final state" : "");

  ScanForwardArgs forward{};
  static_cast<ScanArgs&>(forward) = shared;
  forward.y = WriteStream(trial, "y", dtype, shape, channels_last);
  forward.final_state = final_state ? trial.Write("final_state", wide, states) : nullptr;
  Mamba1ScanForwardCpu(tier, forward);

  ScanBackwardArgs backward{};
  static_cast<ScanArgs&>(backward) = shared;
  backward.dy = ReadStream(trial, "dy", dtype, shape);
  backward.dfinal_state = final_state ? trial.Read("dfinal_state", wide, states) : nullptr;
  backward.du = WriteStream(trial, "du", dtype, shape, channels_last);
  backward.ddelta = WriteStream(trial, "ddelta", shared.delta.dtype, shape, channels_last);
  if (gate) backward.dz = WriteStream(trial, "dz", shared.z.dtype, shape, channels_last);
  backward.dinitial_state = initial ? trial.Write("dinitial_state", wide, states) : nullptr;
  backward.dA = trial.Write("dA", wide, {{shape.channels, shape.states}});
  backward.dB = WriteCoefficientGradient(trial, "dB", shared.B, shared, wide);
  backward.dC = WriteCoefficientGradient(trial, "dC", shared.C, shared, wide);
  backward.dD = skip ? trial.Write("dD", wide, {{shape.channels}}) : nullptr;
  backward.ddelta_bias = bias ? trial.Write("ddelta_bias", wide, {{shape.channels}}) : nullptr;
  Mamba1ScanBackwardCpu(tier, backward);
}

}  // namespace packfree::fuzz
