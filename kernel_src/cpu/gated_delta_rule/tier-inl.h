// The texts of the gated delta rule in one tier, and what gated_delta_rule.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/segments-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/gated_delta_rule/chunk-inl.h"
#include "cpu/gated_delta_rule/bwd-inl.h"
#include "cpu/chunked/delta_units-inl.h"

template <class Elem, class Acc>
constexpr GatedDeltaRuleKernels TierKernels() {
  return {&ForwardUnit<Elem, Acc, GatedChunkTiles, GatedDeltaRuleForward>,
          &BackwardUnit<Elem, Acc, GatedBackwardTiles, GatedDeltaRuleBackward>,
          &RecurrentUnit<Elem, Acc, GatedDecay, GatedDeltaRuleForward>};
}
