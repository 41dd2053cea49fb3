// One token of a delta rule. Included once per tier, after tile-inl.h.
//
// The state's columns are independent, so it is walked in strips of columns: a strip of kRegisters registers stays in
// the first-level cache between its read and its update, and the whole state passes through memory once a token.

// How the state decays: row r by rows[r * stride]. What q_read and k_read read of it is multiplied by `after`: either
// they are q and k times the decay and it is 1, or they are q and k and it is the one decay of all rows.
template <class Acc>
struct StepDecay {
  const Acc* rows;
  int64_t stride;
  Acc after;
  const Acc* q_read;  // [K]
  const Acc* k_read;  // [K]
};

// Columns [0, kRegisters * L) of a state, one token:
//   correction = beta (v - after k_read S), o = after q_read S + (q . k) correction, S = decay S + k correction^T.
// S before the token is read from `source` (rows ld_source apart), which may be `state` itself, and written to `state`.
template <class Acc, int kRegisters>
PACKFREE_INLINE void StepColumns(int64_t key_dim, const StepDecay<Acc>& decay, const Acc* k, Acc qk, Acc beta,
                                 const Acc* source, int64_t ld_source, Acc* state, int64_t ld, const Acc* v, Acc* o) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> kept[kRegisters], seen[kRegisters];
#pragma GCC unroll 8
  for (int m = 0; m < kRegisters; ++m) kept[m] = seen[m] = Zero<Acc>();
  for (int64_t r = 0; r < key_dim; ++r) {
    const Vec<Acc> by_k = Set<Acc>(decay.k_read[r]), by_q = Set<Acc>(decay.q_read[r]);
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
    correction[m] = (Load<Acc>(v + m * L) - kept[m] * decay.after) * beta;
    Store(o + m * L, MulAdd(Set<Acc>(qk), correction[m], seen[m] * decay.after));
  }
  for (int64_t r = 0; r < key_dim; ++r) {
    const Vec<Acc> by_k = Set<Acc>(k[r]);
    const Acc kept_share = decay.rows[r * decay.stride];
#pragma GCC unroll 8
    for (int m = 0; m < kRegisters; ++m) {
      const Vec<Acc> row = Load<Acc>(source + r * ld_source + m * L) * kept_share;
      Store(state + r * ld + m * L, MulAdd(by_k, correction[m], row));
    }
  }
}

// Where a state is read from and where it goes. Before its first token the two differ.
template <class Acc>
struct SteppedState {
  const Acc* source;
  int64_t ld_source;
  Acc* state;
  int64_t ld;
};

// The state of sequence n and value head hv before its first token. `scratch` [K, ldv] holds it where its rows are not
// whole registers or no final state is wanted; else it is read and written in place, without a padded copy.
template <class Acc>
inline SteppedState<Acc> OpenState(const DeltaInputs& in, const DeltaPlan& plan, int64_t n, int64_t hv,
                                   void* final_states, Acc* scratch) {
  const int64_t K = plan.key_dim, V = plan.value_dim, at = (n * in.value_heads + hv) * K * V;
  const Acc* initial = in.initial_state == nullptr ? nullptr : static_cast<const Acc*>(in.initial_state) + at;
  const bool in_place = V % kLanes<Acc> == 0;
  SteppedState<Acc> stepped{scratch, plan.ldv, scratch, plan.ldv};
  if (in_place && final_states != nullptr) {
    stepped.state = static_cast<Acc*>(final_states) + at;
    stepped.source = stepped.state;
    stepped.ld_source = stepped.ld = V;
  }
  if (initial == nullptr) {
    ClearTile<Acc>(K, V, stepped.state, stepped.ld);
  } else if (in_place && in.packing.length(n) > 0) {
    stepped.source = initial;
    stepped.ld_source = V;
  } else {
    LoadTile<Acc>(K, V, initial, V, stepped.state, stepped.ld);
  }
  return stepped;
}

// Writes the state after the last token, where it is not there already.
template <class Acc>
inline void CloseState(const DeltaInputs& in, const DeltaPlan& plan, int64_t n, int64_t hv,
                       const SteppedState<Acc>& stepped, void* final_states) {
  if (final_states == nullptr) return;
  const int64_t K = plan.key_dim, V = plan.value_dim;
  Acc* target = static_cast<Acc*>(final_states) + (n * in.value_heads + hv) * K * V;
  if (stepped.state != target) StoreTile<Acc>(K, V, stepped.state, stepped.ld, target, V);
}

// A whole state, one token.
template <class Acc>
PACKFREE_INLINE void StepState(int64_t key_dim, int64_t value_dim, const StepDecay<Acc>& decay, const Acc* k, Acc qk,
                               Acc beta, const Acc* v, Acc* o, SteppedState<Acc>* stepped) {
  constexpr int L = kLanes<Acc>;
  const Acc* source = stepped->source;
  Acc* state = stepped->state;
  const int64_t ld_source = stepped->ld_source, ld = stepped->ld;
  int64_t x = 0;
  for (; x + 4 * L <= value_dim; x += 4 * L) {
    StepColumns<Acc, 4>(key_dim, decay, k, qk, beta, source + x, ld_source, state + x, ld, v + x, o + x);
  }
  for (; x < value_dim; x += L) {
    StepColumns<Acc, 1>(key_dim, decay, k, qk, beta, source + x, ld_source, state + x, ld, v + x, o + x);
  }
  stepped->source = state;
  stepped->ld_source = ld;
}
