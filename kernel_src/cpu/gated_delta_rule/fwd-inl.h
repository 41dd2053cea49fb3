// Forward pass of one sequence and one key head with its value heads. Included once per tier, after chunk-inl.h.

// o_i = from_start_i q_i S + sum over j <= i of read_ij corrections_j, and S after the chunk.
template <class Elem, class Acc>
inline void ForwardChunk(const GatedDeltaRuleForward& args, const GatedDeltaRulePlan& plan, int64_t begin, int64_t c,
                         int64_t hv, const ChunkTiles<Acc>& tiles, Acc* state) {
  const GatedDeltaRuleInputs& in = args.in;
  const int64_t stride = plan.pair_v;
  Acc* reads = tiles.value_rows;                   // [c, V]: q S, then o
  Acc* corrections = tiles.value_rows + plan.ldv;  // [c, V]: k S, then the corrections
  const Acc* g = static_cast<const Acc*>(in.g) + begin * in.value_heads + hv;
  const Acc* beta = static_cast<const Acc*>(in.beta) + begin * in.value_heads + hv;
  ChunkDecay<Acc>(c, g, in.value_heads, tiles.decay, plan.ldc, tiles.from_start, tiles.exponents);
  LoadColumn<Acc>(c, beta, in.value_heads, tiles.exponents);
  WeighPairs<Acc>(plan, c, tiles.exponents, true, tiles);

  Multiply<Into::kOverwrite>(2 * c, plan.value_dim, plan.key_dim, tiles.rows, plan.ldk, 1, state, plan.ldv,
                             tiles.value_rows, plan.ldv);
  SolveCorrections<Elem, Acc>(in, plan, begin, c, hv, tiles.from_start, tiles.system, corrections, stride);
  for (int64_t i = 0; i < c; ++i) ScaleRow<Acc>(plan.value_dim, tiles.from_start[i], reads + i * stride);
  MultiplyLower<Into::kAdd>(c, plan.value_dim, tiles.read, plan.ldc, corrections, stride, reads, stride);
  Elem* o = static_cast<Elem*>(args.o) + (begin * in.value_heads + hv) * plan.value_dim;
  StoreTile<Acc>(c, plan.value_dim, reads, stride, o, in.value_heads * plan.value_dim);
  AdvanceState<Acc>(plan, c, tiles.exponents, tiles, corrections, stride, state);
}

template <class Elem, class Acc>
inline void ForwardUnit(const GatedDeltaRuleForward& args, int64_t n, int64_t h, void* scratch) {
  const GatedDeltaRuleInputs& in = args.in;
  const GatedDeltaRulePlan plan(in);
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const ChunkTiles<Acc> tiles(plan, pieces);
  const int64_t first = n * in.value_heads + h * plan.group;
  LoadStates<Acc>(plan, in.initial_state, first, tiles.states);
  for (int64_t begin = in.packing.bos(n); begin < in.packing.eos(n); begin += kChunk) {
    const int64_t left = in.packing.eos(n) - begin;
    const int64_t c = left < kChunk ? left : kChunk;
    LoadChunk<Elem, Acc>(in, plan, begin, c, h, true, tiles);
    for (int64_t j = 0; j < plan.group; ++j) {
      ForwardChunk<Elem, Acc>(args, plan, begin, c, h * plan.group + j, tiles, tiles.states + j * plan.state);
    }
  }
  StoreStates<Acc>(plan, tiles.states, first, args.final_state);
}
