// Token-by-token forward of one sequence and one value head. Included once per tier, after chunk-inl.h.
//
// The state's columns are independent, so it is walked in strips of columns: a strip of kRegisters registers stays in
// the first-level cache between its read and its update, and the whole state passes through memory once a token.

// Columns [0, kRegisters * L) of a state, one token:
//   correction = beta (v - decay k S), o = decay q S + (q . k) correction, S = decay S + k correction^T.
// S before the token is read from `source` (rows ld_source apart), which may be `state` itself, and written to `state`.
template <class Acc, int kRegisters>
PACKFREE_INLINE void StepColumns(int64_t key_dim, const Acc* q, const Acc* k, Acc qk, Acc decay, Acc beta,
                                 const Acc* source, int64_t ld_source, Acc* state, int64_t ld, const Acc* v, Acc* o) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> kept[kRegisters], seen[kRegisters];
#pragma GCC unroll 8
  for (int m = 0; m < kRegisters; ++m) kept[m] = seen[m] = Zero<Acc>();
  for (int64_t r = 0; r < key_dim; ++r) {
    const Vec<Acc> by_k = Set<Acc>(k[r]), by_q = Set<Acc>(q[r]);
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) {
      const Vec<Acc> row = Load<Acc>(source + r * ld_source + m * L);
      kept[m] = MulAdd(by_k, row, kept[m]);
      seen[m] = MulAdd(by_q, row, seen[m]);
    }
  }
  Vec<Acc> correction[kRegisters];
#pragma GCC unroll 8
  for (int m = 0; m < kRegisters; ++m) {
    correction[m] = (Load<Acc>(v + m * L) - kept[m] * decay) * beta;
    Store(o + m * L, MulAdd(Set<Acc>(qk), correction[m], seen[m] * decay));
  }
  for (int64_t r = 0; r < key_dim; ++r) {
    const Vec<Acc> by_k = Set<Acc>(k[r]);
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) {
      Store(state + r * ld + m * L, MulAdd(by_k, correction[m], Load<Acc>(source + r * ld_source + m * L) * decay));
    }
  }
}

// scratch: two rows of K, two of V, and a state [K, ldv].
template <class Elem, class Acc>
inline void RecurrentUnit(const GatedDeltaRuleForward& args, int64_t n, int64_t hv, void* scratch) {
  constexpr int L = kLanes<Acc>;
  const GatedDeltaRuleInputs& in = args.in;
  const GatedDeltaRulePlan plan(in);
  const int64_t K = plan.key_dim, V = plan.value_dim, h = hv / plan.group;
  Acc* q = static_cast<Acc*>(scratch);
  Acc* k = q + plan.ldk;
  Acc* v = k + plan.ldk;
  Acc* o = v + plan.ldv;
  Acc* state = o + plan.ldv;
  int64_t ld = plan.ldv;
  const int64_t at_state = (n * in.value_heads + hv) * K * V;
  const Acc* initial = in.initial_state == nullptr ? nullptr : static_cast<const Acc*>(in.initial_state) + at_state;
  Acc* final_state = args.final_state == nullptr ? nullptr : static_cast<Acc*>(args.final_state) + at_state;
  const Acc* source = state;
  int64_t ld_source = ld;
  // Rows of whole registers need no padded copy: the state is read and written in place.
  const bool in_place = V % L == 0;
  if (in_place && final_state != nullptr) {
    source = state = final_state;
    ld_source = ld = V;
  }
  if (initial == nullptr) {
    ClearTile<Acc>(K, V, state, ld);
  } else if (in_place && in.packing.length(n) > 0) {
    source = initial;
    ld_source = V;
  } else {
    LoadTile<Acc>(K, V, initial, V, state, ld);
  }
  for (int64_t t = in.packing.bos(n); t < in.packing.eos(n); ++t) {
    Acc unused;
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.q) + t * in.q_token + h * in.q_head, 0, in.l2norm,
                  static_cast<Acc>(in.scale), q, plan.ldk, &unused);
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.k) + t * in.k_token + h * in.k_head, 0, in.l2norm, Acc(1), k,
                  plan.ldk, &unused);
    LoadTile<Acc>(1, V, static_cast<const Elem*>(in.v) + t * in.v_token + hv * in.v_head, 0, v, plan.ldv);
    const int64_t token = t * in.value_heads + hv;
    const Acc decay = ExpOne<Acc>(static_cast<const Acc*>(in.g)[token]);
    const Acc beta = static_cast<const Acc*>(in.beta)[token];
    const Acc qk = RowDot<Acc>(K, q, k);
    int64_t x = 0;
    for (; x + 4 * L <= V; x += 4 * L) {
      StepColumns<Acc, 4>(K, q, k, qk, decay, beta, source + x, ld_source, state + x, ld, v + x, o + x);
    }
    for (; x < V; x += L) {
      StepColumns<Acc, 1>(K, q, k, qk, decay, beta, source + x, ld_source, state + x, ld, v + x, o + x);
    }
    source = state;
    ld_source = ld;
    StoreTile<Acc>(1, V, o, plan.ldv, static_cast<Elem*>(args.o) + token * V, 0);
  }
  if (final_state != nullptr && state != final_state) StoreTile<Acc>(K, V, state, ld, final_state, V);
}
