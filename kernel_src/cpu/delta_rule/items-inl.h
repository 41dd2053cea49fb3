// Work items of the delta rules: one sequence and one key head with its value heads. Included once per tier, after the
// stages of the op, whose rule is the type `Rule`: its arguments and tiles, and as static functions, for a key head
//   KeyProducts                what its value heads share beside the rows of q and k
//   ClearKeyProductGradients
//   KeyProductGradients        what the gradients of those give to the rows
// and for a value head, after the former,
//   PrepareHead                everything that does not depend on the state: decays, beta
//   WeighPairs                 system, and for queries read
//   StateRows, StateFactors    q and k as they read the state; times these rows [c], or null
//   AdvanceState               the state after the chunk, from that before it
//   BackwardHead               all gradients of one chunk
// and for the walk token by token Decay, made of (inputs, plan, value head), whose member Step(t, tiles) says how the
// state decays at token t and sets q_read and k_read to match.
template <class Rule>
concept DeltaRule = requires(
    const typename Rule::Inputs& in, const typename Rule::Backward& args, const DeltaPlan& plan,
    const typename Rule::ChunkTiles& tiles, const typename Rule::BackwardTiles& backward_tiles,
    const DeltaStepTiles<typename Rule::Accumulation>& step_tiles, int64_t begin, int64_t c, int64_t hv,
    ChunkRows which, typename Rule::Accumulation* corrections, int64_t stride, typename Rule::Accumulation* state,
    const typename Rule::Accumulation* state_transposed, const typename Rule::Decay& decay) {
  typename Rule::Element;
  typename Rule::Forward;
  Rule::KeyProducts(plan, c, which, tiles);
  Rule::ClearKeyProductGradients(plan, c, backward_tiles);
  Rule::KeyProductGradients(plan, c, backward_tiles);
  Rule::PrepareHead(in, plan, begin, c, hv, which, tiles);
  Rule::WeighPairs(plan, c, which, tiles);
  static_cast<const typename Rule::Accumulation*>(Rule::StateRows(tiles));
  static_cast<const typename Rule::Accumulation*>(Rule::StateFactors(tiles));
  Rule::AdvanceState(plan, c, tiles, corrections, stride, state);
  Rule::BackwardHead(args, plan, begin, c, hv, backward_tiles, state_transposed, corrections, state, state);
  decay.Step(begin, step_tiles);
};

// Short sequences are many, so no product is made with a state that is 0, nor for one that is not asked for.

// Loads k, and q if it is wanted, of tokens [begin, begin + c) of key head h.
template <DeltaRule Rule>
inline void LoadChunk(const DeltaInputs& in, const DeltaPlan& plan, int64_t begin, int64_t c, int64_t h,
                      ChunkRows which, const typename Rule::ChunkTiles& tiles) {
  using Elem = typename Rule::Element;
  using Acc = typename Rule::Accumulation;
  const Elem* k = static_cast<const Elem*>(in.k) + begin * in.k_token + h * in.k_head;
  Acc* k_rows = tiles.rows + plan.ldk;
  LoadRows<Acc>(c, plan.key_dim, k, in.k_token, in.l2norm, Acc(1), k_rows, plan.pair_k, tiles.k_inverse);
  LoadTileTransposed<Acc>(c, plan.key_dim, k_rows, plan.pair_k, tiles.k_transposed, plan.ldc);
  if (which == ChunkRows::kQueriesAndKeys) {
    const Elem* q = static_cast<const Elem*>(in.q) + begin * in.q_token + h * in.q_head;
    LoadRows<Acc>(c, plan.key_dim, q, in.q_token, in.l2norm, static_cast<Acc>(in.scale), tiles.rows, plan.pair_k,
                  tiles.q_inverse);
  }
  Rule::KeyProducts(plan, c, which, tiles);
}

// o_i = factor_i q_i S + sum over j <= i of read_ij corrections_j, where S is `before`, null for 0; and S after the
// chunk, unless `after` is null. Both are the same memory.
template <DeltaRule Rule, class Acc = typename Rule::Accumulation>
inline void ForwardHead(const typename Rule::Forward& args, const DeltaPlan& plan, int64_t begin, int64_t c, int64_t hv,
                        const typename Rule::ChunkTiles& tiles, const Acc* before, Acc* after) {
  using Elem = typename Rule::Element;
  const int64_t V = plan.value_dim, stride = plan.pair_v;
  Acc* reads = tiles.value_rows;                   // [c, V]: q S, then o
  Acc* corrections = tiles.value_rows + plan.ldv;  // [c, V]: k S, then the corrections
  Rule::PrepareHead(args.in, plan, begin, c, hv, ChunkRows::kQueriesAndKeys, tiles);
  Rule::WeighPairs(plan, c, ChunkRows::kQueriesAndKeys, tiles);
  const Acc* factors = Rule::StateFactors(tiles);
  if (before != nullptr) {
    Multiply<Into::kOverwrite>(2 * c, V, plan.key_dim, Rule::StateRows(tiles), plan.ldk, 1, before, plan.ldv,
                               tiles.value_rows, plan.ldv);
    for (int64_t i = 0; factors != nullptr && i < c; ++i) ScaleRow<Acc>(V, factors[i], reads + i * stride);
  }
  SolveCorrections<Elem, Acc>(args.in, plan, begin, c, hv, before, factors, tiles.system, corrections, stride);
  if (before == nullptr) {
    MultiplyLower<Into::kOverwrite>(c, V, tiles.read, plan.ldc, corrections, stride, reads, stride);
  } else {
    MultiplyLower<Into::kAdd>(c, V, tiles.read, plan.ldc, corrections, stride, reads, stride);
  }
  Elem* o = static_cast<Elem*>(args.out) + (begin * args.in.value_heads + hv) * V;
  StoreTile<Acc>(c, V, reads, stride, o, args.in.value_heads * V);
  if (after != nullptr) Rule::AdvanceState(plan, c, tiles, corrections, stride, after);
}

template <DeltaRule Rule>
inline void ForwardItem(const typename Rule::Forward& args, int64_t n, int64_t h, void* scratch) {
  using Acc = typename Rule::Accumulation;
  const DeltaInputs& in = args.in;
  const DeltaPlan plan(in);
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const typename Rule::ChunkTiles tiles(plan, pieces);
  const int64_t first = n * in.value_heads + h * plan.group, chunks = ChunksOf(in.packing.length(n));
  LoadStates<Acc>(plan, in.initial_state, first, tiles.states);
  for (int64_t index = 0; index < chunks; ++index) {
    const Chunk chunk(in.packing, n, index);
    LoadChunk<Rule>(in, plan, chunk.begin, chunk.count, h, ChunkRows::kQueriesAndKeys, tiles);
    const bool from_zero = index == 0 && in.initial_state == nullptr;
    const bool goes_on = index + 1 < chunks || args.final_state != nullptr;
    for (int64_t j = 0; j < plan.group; ++j) {
      Acc* state = tiles.states + j * plan.state;
      ForwardHead<Rule>(args, plan, chunk.begin, chunk.count, h * plan.group + j, tiles, from_zero ? nullptr : state,
                        goes_on ? state : nullptr);
    }
  }
  StoreStates<Acc>(plan, tiles.states, first, args.final_state);
}

// What WalkBackward calls.
template <DeltaRule Rule>
struct DeltaBackwardPass {
  using Elem = typename Rule::Element;
  using Acc = typename Rule::Accumulation;
  const typename Rule::Backward& args;
  const DeltaPlan& plan;
  int64_t n, h;
  const typename Rule::BackwardTiles& tiles;

  bool FromZero(int64_t index) const { return index == 0 && args.in.initial_state == nullptr; }

  // Kept of a chunk are its states (transposed) and corrections; then the states after the last are not wanted.
  void Recompute(int64_t from, int64_t to, Keep keep) const {
    for (int64_t index = from; index < to; ++index) {
      const Chunk chunk(args.in.packing, n, index);
      LoadChunk<Rule>(args.in, plan, chunk.begin, chunk.count, h, ChunkRows::kKeys, tiles.chunk);
      for (int64_t j = 0; j < plan.group; ++j) {
        Acc* state = tiles.chunk.states + j * plan.state;
        const bool keeps = keep == Keep::kChunks, goes_on = !keeps || index + 1 < to;
        RecomputeHead(chunk.begin, chunk.count, j, FromZero(index) ? nullptr : state, goes_on ? state : nullptr,
                      keeps ? (index - from) * plan.group + j : -1);
      }
    }
  }

  // The state `before`, null for 0, becomes that `after` the chunk, unless null. `slot` is where to keep, or negative.
  void RecomputeHead(int64_t begin, int64_t c, int64_t j, const Acc* before, Acc* after, int64_t slot) const {
    const int64_t K = plan.key_dim, V = plan.value_dim, hv = h * plan.group + j;
    Acc* rows = tiles.chunk.value_rows;  // [c, V]: k S, then the corrections
    Rule::PrepareHead(args.in, plan, begin, c, hv, ChunkRows::kKeys, tiles.chunk);
    Rule::WeighPairs(plan, c, ChunkRows::kKeys, tiles.chunk);
    if (before != nullptr) {
      Multiply<Into::kOverwrite>(c, V, K, Rule::StateRows(tiles.chunk) + plan.ldk, plan.pair_k, 1, before, plan.ldv,
                                 rows, plan.ldv);
    }
    SolveCorrections<Elem, Acc>(args.in, plan, begin, c, hv, before, Rule::StateFactors(tiles.chunk),
                                tiles.chunk.system, rows, plan.ldv);
    if (slot >= 0) {
      Acc* transposed = tiles.states_transposed + slot * plan.state_transposed;
      if (before != nullptr) LoadTileTransposed<Acc>(K, V, before, plan.ldv, transposed, plan.ldk);
      LoadTile<Acc>(c, V, rows, plan.ldv, tiles.corrections + slot * plan.values, plan.ldv);
    }
    if (after != nullptr) Rule::AdvanceState(plan, c, tiles.chunk, rows, plan.ldv, after);
  }

  void Backward(int64_t index, int64_t kept) const {
    const Chunk chunk(args.in.packing, n, index);
    LoadChunk<Rule>(args.in, plan, chunk.begin, chunk.count, h, ChunkRows::kQueriesAndKeys, tiles.chunk);
    ClearTile<Acc>(2 * chunk.count, plan.key_dim, tiles.d_rows, plan.ldk);
    Rule::ClearKeyProductGradients(plan, chunk.count, tiles);
    const bool has_after = index + 1 < tiles.segments.chunks || args.dfinal_state != nullptr;
    const bool wants_before = index > 0 || args.dinitial_state != nullptr;
    for (int64_t j = 0; j < plan.group; ++j) {
      const int64_t slot = kept * plan.group + j;
      const Acc* state_transposed = FromZero(index) ? nullptr : tiles.states_transposed + slot * plan.state_transposed;
      Acc* d_state = tiles.d_states + j * plan.state;
      Rule::BackwardHead(args, plan, chunk.begin, chunk.count, h * plan.group + j, tiles, state_transposed,
                         tiles.corrections + slot * plan.values, has_after ? d_state : nullptr,
                         wants_before ? d_state : nullptr);
    }
    Rule::KeyProductGradients(plan, chunk.count, tiles);
    StoreKeyGradients(chunk.begin, chunk.count);
  }

  // Through scale and normalisation of q and k.
  void StoreKeyGradients(int64_t begin, int64_t c) const {
    const DeltaInputs& in = args.in;
    const int64_t K = plan.key_dim, row = (begin * in.key_heads + h) * K;
    StoreRowGradients<Acc>(c, K, static_cast<const Elem*>(in.q) + begin * in.q_token + h * in.q_head, in.q_token,
                           in.l2norm, static_cast<Acc>(in.scale), tiles.chunk.rows, plan.pair_k, tiles.chunk.q_inverse,
                           tiles.d_rows, static_cast<Elem*>(args.dq) + row, in.key_heads * K);
    StoreRowGradients<Acc>(c, K, static_cast<const Elem*>(in.k) + begin * in.k_token + h * in.k_head, in.k_token,
                           in.l2norm, Acc(1), tiles.chunk.rows + plan.ldk, plan.pair_k, tiles.chunk.k_inverse,
                           tiles.d_rows + plan.ldk, static_cast<Elem*>(args.dk) + row, in.key_heads * K);
  }
};

template <DeltaRule Rule>
inline void BackwardItem(const typename Rule::Backward& args, int64_t n, int64_t h, void* scratch) {
  using Acc = typename Rule::Accumulation;
  const DeltaInputs& in = args.in;
  const DeltaPlan plan(in);
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const typename Rule::BackwardTiles tiles(plan, in.packing.length(n), pieces);
  const int64_t first = n * in.value_heads + h * plan.group;
  LoadStates<Acc>(plan, args.dfinal_state, first, tiles.d_states);
  LoadStates<Acc>(plan, in.initial_state, first, tiles.chunk.states);
  WalkBackward<Acc>(tiles.segments, plan.group * plan.state, tiles.chunk.states, tiles.checkpoints,
                    DeltaBackwardPass<Rule>{args, plan, n, h, tiles});
  StoreStates<Acc>(plan, tiles.d_states, first, args.dinitial_state);
}

// Token by token: one sequence and one value head.
template <DeltaRule Rule>
inline void RecurrentItem(const typename Rule::Forward& args, int64_t n, int64_t hv, void* scratch) {
  using Elem = typename Rule::Element;
  using Acc = typename Rule::Accumulation;
  const DeltaInputs& in = args.in;
  const DeltaPlan plan(in);
  const int64_t K = plan.key_dim, V = plan.value_dim, h = hv / plan.group;
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const DeltaStepTiles<Acc> tiles(plan, pieces);
  const typename Rule::Decay decay(args.in, plan, hv);
  SteppedState<Acc> state = OpenState<Acc>(in, plan, n, hv, args.final_state, tiles.state);
  for (int64_t t = in.packing.bos(n); t < in.packing.eos(n); ++t) {
    const int64_t token = t * in.value_heads + hv;
    Acc unused;
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.q) + t * in.q_token + h * in.q_head, 0, in.l2norm,
                  static_cast<Acc>(in.scale), tiles.q, plan.ldk, &unused);
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.k) + t * in.k_token + h * in.k_head, 0, in.l2norm, Acc(1), tiles.k,
                  plan.ldk, &unused);
    LoadTile<Acc>(1, V, static_cast<const Elem*>(in.v) + t * in.v_token + hv * in.v_head, 0, tiles.v, plan.ldv);
    const StepDecay<Acc> step = decay.Step(token, tiles);
    StepState<Acc>(K, V, step, tiles.k, RowDot<Acc>(K, tiles.q, tiles.k), static_cast<const Acc*>(in.beta)[token],
                   tiles.v, tiles.o, &state);
    StoreTile<Acc>(1, V, tiles.o, plan.ldv, static_cast<Elem*>(args.out) + token * V, 0);
  }
  CloseState<Acc>(in, plan, n, hv, state, args.final_state);
}
