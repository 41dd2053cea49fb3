// The source of the gated delta rule in one tier, and what gated_delta_rule.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/segments-inl.h"
#include "cpu/delta_rule/chunk-inl.h"
#include "cpu/delta_rule/step-inl.h"
#include "cpu/gated_delta_rule/chunk-inl.h"
#include "cpu/gated_delta_rule/bwd-inl.h"
#include "cpu/delta_rule/items-inl.h"

template <class Elem, class Acc>
constexpr GatedDeltaRuleKernels TierKernels() {
  using Rule = GatedRule<Elem, Acc>;
  return {&ForwardItem<Rule>, &BackwardItem<Rule>, &RecurrentItem<Rule>};
}
