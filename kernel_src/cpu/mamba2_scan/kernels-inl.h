// The source of Mamba-2's scan in one tier, and what mamba2_scan.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/chunked/rows-inl.h"
#include "cpu/chunked/triangular-inl.h"
#include "cpu/chunked/decay-inl.h"
#include "cpu/chunked/segments-inl.h"
#include "cpu/mamba2_scan/chunk-inl.h"
#include "cpu/mamba2_scan/fwd-inl.h"
#include "cpu/mamba2_scan/bwd-inl.h"
#include "cpu/mamba2_scan/update-inl.h"

template <class Elem, class Acc>
constexpr Mamba2ScanKernels TierKernels() {
  return {&ForwardItem<Elem, Acc>, &BackwardItem<Elem, Acc>, &SumItems<Elem, Acc>, &UpdateAny<Elem, Acc>};
}
