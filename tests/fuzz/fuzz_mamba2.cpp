#include <algorithm>

#include "cpu/chunked/layout.h"
#include "cpu/mamba2_scan/mamba2_scan.h"
#include "trial.h"

namespace packfree::fuzz {
namespace {

int64_t DrawDim(Draw& draw) {
  if (draw.Chance(5)) return draw.Pick<int64_t>({128, 256});
  return draw.Pick<int64_t>({1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65});
}

}  // namespace

void FuzzMamba2(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  const Tier tier = trial.DrawTier(kVectorTier);
  Mamba2ScanInputs in{};
  in.dtype = dtype;
  in.groups = draw.Between(1, 3);
  in.heads = in.groups * draw.Pick<int64_t>({1, 2, 4, 5, 9});
  in.head_dim = DrawDim(draw);
  in.state_dim = DrawDim(draw);
  const int64_t H = in.heads, G = in.groups, P = in.head_dim, S = in.state_dim;
  const int64_t most = std::clamp<int64_t>(1000000 / (H * P * S), 2, 400);
  const int64_t edge = draw.Pick<int64_t>({kTriangleBlock, kChunk});
  in.packing = trial.DrawPacking(1, trial.DrawTokens(most, edge), edge);
  const int64_t T = in.packing.tokens, N = in.packing.num_sequences;
  const Axes head_axes = PerToken(in.packing, {T, H, P}), group_axes = PerToken(in.packing, {T, G, S});
  const Axes step_axes = PerToken(in.packing, {T, H}), states = {{N, H, P, S}};
  const bool gate = draw.Chance(50), final_state = draw.Chance(50);
  in.softplus = draw.Chance(50);
  in.dt_min = draw.Chance(50) ? 0 : 0.01;
  in.dt_max = draw.Chance(50) ? 1e30 : 0.7;
  const Strided x = trial.Read("x", dtype, head_axes, Lies::kLastDense);
  const Strided b = trial.Read("B", dtype, group_axes, Lies::kLastDense);
  const Strided c = trial.Read("C", dtype, group_axes, Lies::kLastDense);
  in.x = x.data, in.x_token = x.strides[0], in.x_head = x.strides[1];
  in.b = b.data, in.b_token = b.strides[0], in.b_group = b.strides[1];
  in.c = c.data, in.c_token = c.strides[0], in.c_group = c.strides[1];
  if (gate) {
    const Strided z = trial.Read("z", dtype, head_axes, Lies::kLastDense);
    in.z = z.data, in.z_token = z.strides[0], in.z_head = z.strides[1];
  }
  in.dt = trial.Read("dt", wide, step_axes, {0, 1});
  in.a = trial.Read("A", wide, {{H}}, {-3, 0});
  in.d = draw.Chance(50) ? trial.Read("D", wide, {{H, P}}) : nullptr;
  in.dt_bias = draw.Chance(50) ? trial.Read("dt_bias", wide, {{H}}, {0, 0.5}) : nullptr;
  in.initial_state = draw.Chance(50) ? trial.Read("initial_state", wide, states) : nullptr;
  trial.Describe("tier %s, %s, H=%ld G=%ld P=%ld S=%ld%s%s%s%s%s%s, dt in %g .. %g", TierName(tier), NameOf(dtype), H,
                 G, P, S, gate ? ", z" : "", in.d != nullptr ? ", D" : "", in.dt_bias != nullptr ? ", bias" : "",
                 in.softplus ? ", softplus" : "", in.initial_state != nullptr ? ", initial state" : "",
                 final_state ? ", final state" : "", in.dt_min, in.dt_max);

  Mamba2ScanForwardCpu(
      tier, {in, trial.Write("y", dtype, head_axes), final_state ? trial.Write("final_state", wide, states) : nullptr});
  Mamba2ScanBackward backward{};
  backward.in = in;
  backward.dy = trial.Read("dy", dtype, head_axes);
  backward.dfinal_state = final_state ? trial.Read("dfinal_state", wide, states) : nullptr;
  backward.dx = trial.Write("dx", dtype, head_axes);
  backward.ddt = trial.Write("ddt", wide, step_axes);
  backward.da = trial.Write("da", wide, {{H}});
  backward.db = trial.Write("dB", dtype, group_axes);
  backward.dc = trial.Write("dC", dtype, group_axes);
  backward.dd = in.d != nullptr ? trial.Write("dD", wide, {{H, P}}) : nullptr;
  backward.dz = gate ? trial.Write("dz", dtype, head_axes) : nullptr;
  backward.ddt_bias = in.dt_bias != nullptr ? trial.Write("ddt_bias", wide, {{H}}) : nullptr;
  backward.dinitial_state = in.initial_state != nullptr ? trial.Write("dinitial_state", wide, states) : nullptr;
  Mamba2ScanBackwardCpu(tier, backward);
}

void FuzzStateUpdate(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  const Tier tier = trial.DrawTier(kVectorTier);
  SelectiveStateUpdate args{};
  args.dtype = dtype;
  args.batch = draw.Between(0, 3);
  args.groups = draw.Between(1, 3);
  args.heads = args.groups * draw.Pick<int64_t>({1, 2, 5});
  args.head_dim = DrawDim(draw);
  args.state_dim = DrawDim(draw);
  args.wide_state = draw.Chance(50);
  args.wide_coefficients = draw.Chance(50);
  args.softplus = draw.Chance(50);
  const bool named = draw.Chance(50);
  args.num_states = args.batch + (named ? draw.Between(0, 3) : 0);
  const int64_t B = args.batch, H = args.heads, P = args.head_dim, S = args.state_dim;
  const Axes head_axes = {{B, H, P}}, group_axes = {{B, args.groups, S}}, parameter_axes = {{H, P}};
  const Strided state =
      trial.Update("state", args.wide_state ? wide : dtype, {{args.num_states, H, P, S}}, Lies::kLastDense);
  args.state = state.data;
  args.state_batch = state.strides[0], args.state_head = state.strides[1], args.state_row = state.strides[2];
  args.x = trial.Read("x", dtype, head_axes);
  if (named) args.state_of = trial.ReadIntegers("state_batch_indices", draw.Slots(B, args.num_states));
  args.b = trial.Read("B", args.wide_coefficients ? wide : dtype, group_axes);
  args.c = trial.Read("C", args.wide_coefficients ? wide : dtype, group_axes);
  args.z = draw.Chance(50) ? trial.Read("z", dtype, head_axes) : nullptr;
  const Strided dt = trial.Read("dt", wide, head_axes, Lies::kAnyhow, {0, 1});
  args.dt = dt.data;
  args.dt_batch = dt.strides[0], args.dt_head = dt.strides[1], args.dt_row = dt.strides[2];
  // One value for all states, as transformers hands it over, or one for each.
  const bool repeated = draw.Chance(50);
  const Strided a = trial.Read("A", wide, {{H, P, repeated ? 1 : S}}, Lies::kLastDense, {-3, 0});
  args.a = a.data;
  args.a_head = a.strides[0], args.a_row = a.strides[1];
  args.a_column = repeated || S <= 1 ? 0 : 1;
  args.d = draw.Chance(50) ? trial.Read("D", wide, parameter_axes) : nullptr;
  args.dt_bias = draw.Chance(50) ? trial.Read("dt_bias", wide, parameter_axes, {0, 0.5}) : nullptr;
  trial.Describe("tier %s, %s, B=%ld H=%ld G=%ld P=%ld S=%ld%s%s%s%s%s%s%s", TierName(tier), NameOf(dtype), B, H,
                 args.groups, P, S, named ? ", named states" : "", args.wide_coefficients ? ", wide B and C" : "",
                 args.wide_state ? ", wide state" : "", args.z != nullptr ? ", z" : "", args.d != nullptr ? ", D" : "",
                 args.dt_bias != nullptr ? ", bias" : "", args.softplus ? ", softplus" : "");
  args.y = trial.Write("y", dtype, head_axes);
  SelectiveStateUpdateCpu(tier, args);
}

}  // namespace packfree::fuzz
