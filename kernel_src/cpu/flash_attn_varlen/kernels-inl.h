// The source of attention in one tier, and what flash_attn_varlen.cpp takes from it.
#include "cpu/simd/vec-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/tile-inl.h"
#if PACKFREE_MATRIX_UNIT
#include "cpu/simd/matrix-inl.h"
#endif
#include "cpu/flash_attn_varlen/columns-inl.h"
#include "cpu/flash_attn_varlen/rows-inl.h"
#if PACKFREE_MATRIX_UNIT
#include "cpu/flash_attn_varlen/operands_matrix-inl.h"
#include "cpu/flash_attn_varlen/products_matrix-inl.h"
#else
#include "cpu/flash_attn_varlen/products-inl.h"
#endif
#include "cpu/flash_attn_varlen/fwd-inl.h"
#include "cpu/flash_attn_varlen/bwd-inl.h"

template <class Elem, class Acc>
constexpr AttentionKernels TierKernels() {
  return {&ForwardItem<Elem, Acc>, &DeltaItem<Elem, Acc>, &BackwardItem<Elem, Acc>, &SinkGradientItem<Elem, Acc>};
}
