// What the chunked delta rules have in common, whatever their decay. Included once per tier, after triangular-inl.h.
//
// Letters: c tokens of a chunk, S the state before it, `corrections` what each token would write at beta = 1.

// rows_i = v_i - factors_i rows_i, where rows holds what the state knows of v; rows_i = v_i without a `state` (null for
// 0). Then (I + system)^-1 rows: the correction of each token, earlier tokens of the chunk included. Rows lie `stride`
// apart. Without `factors` they are 1.
template <class Elem, class Acc>
inline void SolveCorrections(const DeltaInputs& in, const DeltaPlan& plan, int64_t begin, int64_t c, int64_t hv,
                             const Acc* state, const Acc* factors, const Acc* system, Acc* rows, int64_t stride) {
  constexpr int L = kLanes<Acc>;
  const Elem* v = static_cast<const Elem*>(in.v) + begin * in.v_token + hv * in.v_head;
  if (state == nullptr) LoadTile<Acc>(c, plan.value_dim, v, in.v_token, rows, stride);
  for (int64_t i = 0; i < c && state != nullptr; ++i) {
    const Vec<Acc> factor = Set<Acc>(factors == nullptr ? Acc(-1) : -factors[i]);
    for (int64_t x = 0; x < plan.value_dim; x += L) {
      const int width = plan.value_dim - x < L ? static_cast<int>(plan.value_dim - x) : L;
      const Vec<Acc> value = LoadUpTo<Acc>(v + i * in.v_token + x, width);
      Acc* at = rows + i * stride + x;
      Store(at, MulAdd(factor, Load<Acc>(at), value));
    }
  }
  SolveUnitLower<Acc>(c, plan.value_dim, system, plan.ldc, 1, rows, stride);
}

// Back through the solve, values and strengths. In: d_x [c, V], the gradient of beta corrections; the chunk's `system`
// is beta_i mix_ij. Out: dbeta and dv of the tokens, d_x = -dv, corrections *= beta, and in `pairs` the gradients of
// read and, from row c on, of mix (lower tiles): d_o corrections^T and -dv corrections^T. Rows of d_o and d_x lie
// pair_v apart. `token` is the first one's place in [T, HV].
template <class Elem, class Acc, class Args, class BackwardTiles>
inline void CorrectionGradients(const Args& args, const DeltaPlan& plan, int64_t c, int64_t token,
                                const BackwardTiles& tiles, const Acc* d_o, Acc* d_x, Acc* corrections) {
  const int64_t V = plan.value_dim, ldv = plan.ldv, ldc = plan.ldc, pair = plan.pair_v;
  const int64_t value_heads = args.in.value_heads;
  const Acc* beta = tiles.chunk.beta;
  SolveUnitLowerTransposed<Acc>(c, V, tiles.chunk.system, ldc, d_x, pair);
  Acc* dbeta = static_cast<Acc*>(args.dbeta) + token;
  for (int64_t i = 0; i < c; ++i) {
    dbeta[i * value_heads] = RowDot<Acc>(V, d_x + i * pair, corrections + i * ldv);
    ScaleRow<Acc>(V, -beta[i], d_x + i * pair);
    ScaleRow<Acc>(V, beta[i], corrections + i * ldv);
  }
  StoreTile<Acc>(c, V, d_x, pair, static_cast<Elem*>(args.dv) + token * V, value_heads * V, Acc(-1));
  LoadTileTransposed<Acc>(c, V, corrections, ldv, tiles.transposed, ldc);
  MultiplyToLower<Into::kOverwrite>(c, V, d_o, pair, tiles.transposed, ldc, tiles.pairs, ldc);
  MultiplyToLower<Into::kOverwrite>(c, V, d_x, pair, tiles.transposed, ldc, tiles.pairs + c * ldc, ldc);
}

// Running states of a key head's group: from the initial states, or 0.
template <class Acc>
inline void LoadStates(const DeltaPlan& plan, const void* source, int64_t first, Acc* states) {
  for (int64_t j = 0; j < plan.group; ++j) {
    Acc* state = states + j * plan.state;
    if (source == nullptr) {
      ClearTile<Acc>(plan.key_dim, plan.value_dim, state, plan.ldv);
    } else {
      LoadTile<Acc>(plan.key_dim, plan.value_dim,
                    static_cast<const Acc*>(source) + (first + j) * plan.key_dim * plan.value_dim, plan.value_dim,
                    state, plan.ldv);
    }
  }
}
template <class Acc>
inline void StoreStates(const DeltaPlan& plan, const Acc* states, int64_t first, void* target) {
  if (target == nullptr) return;
  for (int64_t j = 0; j < plan.group; ++j) {
    StoreTile<Acc>(plan.key_dim, plan.value_dim, states + j * plan.state, plan.ldv,
                   static_cast<Acc*>(target) + (first + j) * plan.key_dim * plan.value_dim, plan.value_dim);
  }
}
