// The source of Mamba-1's scan in one tier, and what mamba1_scan.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/mamba1_scan/tiles-inl.h"
#include "cpu/mamba1_scan/fwd-inl.h"
#include "cpu/mamba1_scan/bwd-inl.h"

template <class, class Acc>
constexpr ScanKernels TierKernels() {
  return {&ScanForwardItem<Acc>, &ScanBackwardItem<Acc>, &ScanReduceTokens<Acc>};
}
