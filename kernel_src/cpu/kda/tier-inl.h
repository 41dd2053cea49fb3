// The texts of Kimi delta attention in one tier, and what kda.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/segments-inl.h"
#include "cpu/chunked/delta-inl.h"
#include "cpu/chunked/step-inl.h"
#include "cpu/kda/gate-inl.h"
#include "cpu/kda/chunk-inl.h"
#include "cpu/kda/bwd-inl.h"
#include "cpu/chunked/delta_units-inl.h"

template <class Elem, class Acc>
constexpr KdaKernels TierKernels() {
  return {{&ForwardUnit<Elem, Acc, KdaChunkTiles, KdaForward>,
           &BackwardUnit<Elem, Acc, KdaBackwardTiles, KdaBackward>,
           &RecurrentUnit<Elem, Acc, KdaDecay, KdaForward>},
          &GateParameterGradients<Acc>};
}
