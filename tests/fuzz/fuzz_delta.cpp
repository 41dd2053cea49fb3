#include <algorithm>
#include <cmath>

#include "cpu/chunked/layout.h"
#include "cpu/gated_delta_rule/gated_delta_rule.h"
#include "cpu/kda/kda.h"
#include "trial.h"

namespace packfree::fuzz {
namespace {

int64_t DrawDim(Draw& draw) {
  if (draw.Chance(5)) return draw.Pick<int64_t>({128, 192, 255, 256});
  return draw.Pick<int64_t>({1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65});
}

// What the two rules share of their inputs; g is left to them.
void DrawInputs(Trial& trial, Dtype dtype, DeltaInputs* in) {
  Draw& draw = trial.draw;
  in->key_dim = DrawDim(draw);
  in->value_dim = DrawDim(draw);
  in->key_heads = draw.Between(1, 3);
  in->value_heads = in->key_heads * draw.Pick<int64_t>({1, 1, 2, 4});
  const int64_t most = std::clamp<int64_t>(1000000 / (in->value_heads * in->key_dim * in->value_dim), 2, 400);
  const int64_t edge = draw.Pick<int64_t>({kTriangleBlock, kChunk});
  in->packing = trial.DrawPacking(1, trial.DrawTokens(most, edge), edge);
  in->scale = draw.Uniform(0.05, 1);
  in->l2norm = draw.Chance(50);
  const int64_t T = in->packing.tokens;
  const Axes key_axes = PerToken(in->packing, {T, in->key_heads, in->key_dim});
  // Keys longer than sqrt(2) would make the states grow without bound.
  const double most_key = 1.5 / std::sqrt(static_cast<double>(in->key_dim));
  const Strided q = trial.Read("q", dtype, key_axes, Lies::kLastDense);
  const Strided k = trial.Read("k", dtype, key_axes, Lies::kLastDense, {-most_key, most_key});
  const Strided v =
      trial.Read("v", dtype, PerToken(in->packing, {T, in->value_heads, in->value_dim}), Lies::kLastDense);
  in->q = q.data, in->q_token = q.strides[0], in->q_head = q.strides[1];
  in->k = k.data, in->k_token = k.strides[0], in->k_head = k.strides[1];
  in->v = v.data, in->v_token = v.strides[0], in->v_head = v.strides[1];
  in->beta = trial.Read("beta", Wide(dtype), PerToken(in->packing, {T, in->value_heads}), {0, 1});
}

Axes States(const DeltaInputs& in) { return {{in.packing.num_sequences, in.value_heads, in.key_dim, in.value_dim}}; }

// Log-decays: mild, strong, none, or so strong that their exponentials underflow.
Range DrawDecay(Draw& draw) { return draw.Pick<Range>({{-0.5, 0}, {-5, 0}, {0, 0}, {-1e4, 0}}); }

void DescribeRule(Trial& trial, Tier tier, Dtype dtype, const DeltaInputs& in, bool final_state, const char* more) {
  trial.Describe("tier %s, %s, H=%ld HV=%ld K=%ld V=%ld%s%s%s%s", TierName(tier), NameOf(dtype), in.key_heads,
                 in.value_heads, in.key_dim, in.value_dim, in.l2norm ? ", l2norm" : "",
                 in.initial_state != nullptr ? ", initial state" : "", final_state ? ", final state" : "", more);
}

// Arguments of the forward by chunks or, with names of its own, token by token.
template <class Inputs>
DeltaForward<Inputs> NewForward(Trial& trial, Dtype dtype, const Inputs& in, bool final_state, const char* o_name,
                                const char* state_name) {
  const Axes value_axes = PerToken(in.packing, {in.packing.tokens, in.value_heads, in.value_dim});
  return {in, trial.Write(o_name, dtype, value_axes),
          final_state ? trial.Write(state_name, Wide(dtype), States(in)) : nullptr};
}

// The shared fields of the backward's arguments. `gate_axes` are those of g.
template <class Inputs>
void FillBackward(Trial& trial, Dtype dtype, const Inputs& in, const Axes& gate_axes, bool final_state,
                  DeltaBackward<Inputs>* args) {
  const Dtype wide = Wide(dtype);
  const Axes key_axes = PerToken(in.packing, {in.packing.tokens, in.key_heads, in.key_dim});
  const Axes value_axes = PerToken(in.packing, {in.packing.tokens, in.value_heads, in.value_dim});
  args->in = in;
  args->dout = trial.Read("dout", dtype, value_axes);
  args->dfinal_state = final_state ? trial.Read("dfinal_state", wide, States(in)) : nullptr;
  args->dq = trial.Write("dq", dtype, key_axes);
  args->dk = trial.Write("dk", dtype, key_axes);
  args->dv = trial.Write("dv", dtype, value_axes);
  args->dg = trial.Write("dg", wide, gate_axes);
  args->dbeta = trial.Write("dbeta", wide, PerToken(in.packing, {in.packing.tokens, in.value_heads}));
  args->dinitial_state = in.initial_state != nullptr ? trial.Write("dinitial_state", wide, States(in)) : nullptr;
}

}  // namespace

void FuzzGatedDeltaRule(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  const Tier tier = trial.DrawTier(kVectorTier);
  DeltaInputs in{};
  in.dtype = dtype;
  DrawInputs(trial, dtype, &in);
  const Axes gate_axes = PerToken(in.packing, {in.packing.tokens, in.value_heads});
  in.g = trial.Read("g", wide, gate_axes, DrawDecay(draw));
  in.initial_state = draw.Chance(50) ? trial.Read("initial_state", wide, States(in)) : nullptr;
  const bool final_state = draw.Chance(50);
  DescribeRule(trial, tier, dtype, in, final_state, "");

  GatedDeltaRuleForwardCpu(tier, NewForward(trial, dtype, in, final_state, "o", "final_state"));
  GatedDeltaRuleRecurrentCpu(tier, NewForward(trial, dtype, in, final_state, "recurrent o", "recurrent final_state"));
  GatedDeltaRuleBackward backward{};
  FillBackward(trial, dtype, in, gate_axes, final_state, &backward);
  GatedDeltaRuleBackwardCpu(tier, backward);
}

void FuzzKda(Trial& trial) {
  Draw& draw = trial.draw;
  const Dtype dtype = trial.DrawDtype(), wide = Wide(dtype);
  const Tier tier = trial.DrawTier(kVectorTier);
  KdaInputs in{};
  in.dtype = dtype;
  DrawInputs(trial, dtype, &in);
  const Axes gate_axes = PerToken(in.packing, {in.packing.tokens, in.value_heads, in.key_dim});
  const Axes parameter_axes = {{in.value_heads, in.key_dim}};
  const bool gate = draw.Chance(50);
  if (gate) {
    in.a_log = trial.Read("a_log", wide, {{in.value_heads}}, {-2, 2});
    if (draw.Chance(50)) in.dt_bias = trial.Read("dt_bias", wide, parameter_axes);
    in.bounded = draw.Chance(50);
    in.lower_bound = -draw.Uniform(0.1, 6);
  }
  in.g = trial.Read("g", wide, gate_axes, gate ? Range{-3, 3} : DrawDecay(draw));
  in.initial_state = draw.Chance(50) ? trial.Read("initial_state", wide, States(in)) : nullptr;
  const bool final_state = draw.Chance(50);
  DescribeRule(trial, tier, dtype, in, final_state,
               !gate                   ? ""
               : in.bounded            ? ", bounded gate"
               : in.dt_bias != nullptr ? ", gate with bias"
                                       : ", gate");

  KdaForwardCpu(tier, NewForward(trial, dtype, in, final_state, "o", "final_state"));
  KdaRecurrentCpu(tier, NewForward(trial, dtype, in, final_state, "recurrent o", "recurrent final_state"));
  KdaBackward backward{};
  FillBackward<KdaInputs>(trial, dtype, in, gate_axes, final_state, &backward);
  backward.da_log = in.a_log != nullptr ? trial.Write("da_log", wide, {{in.value_heads}}) : nullptr;
  backward.ddt_bias = in.dt_bias != nullptr ? trial.Write("ddt_bias", wide, parameter_axes) : nullptr;
  KdaBackwardCpu(tier, backward);
}

}  // namespace packfree::fuzz
