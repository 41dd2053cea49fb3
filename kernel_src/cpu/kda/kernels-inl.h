// The source of Kimi delta attention in one tier, and what kda.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/segments-inl.h"
#include "cpu/delta_rule/chunk-inl.h"
#include "cpu/delta_rule/step-inl.h"
#include "cpu/kda/gate-inl.h"
#include "cpu/kda/chunk-inl.h"
#include "cpu/kda/bwd-inl.h"
#include "cpu/delta_rule/items-inl.h"

template <class Elem, class Acc>
constexpr KdaKernels TierKernels() {
  using Rule = KdaRule<Elem, Acc>;
  return {{&ForwardItem<Rule>, &BackwardItem<Rule>, &RecurrentItem<Rule>}, &GateParameterGradients<Acc>};
}
