// Forward pass of one sequence and one key head with its value heads. Included once per tier, after chunk-inl.h.

// o_i = (q_i decayed from the start) S + sum over j <= i of read_ij corrections_j, and S after the chunk.
template <class Elem, class Acc>
inline void ForwardChunk(const KdaForward& args, const KdaPlan& plan, int64_t begin, int64_t c, int64_t hv,
                         const KdaChunkTiles<Acc>& tiles, Acc* state) {
  const KdaInputs& in = args.in;
  const int64_t stride = plan.pair_v;
  Acc* reads = tiles.value_rows;                   // [c, V]: q S, then o
  Acc* corrections = tiles.value_rows + plan.ldv;  // [c, V]: k S, then the corrections
  PrepareChunk<Acc>(in, plan, begin, c, hv, true, tiles);
  WeighPairs<Acc>(plan, c, true, tiles);
  Multiply<Into::kOverwrite>(2 * c, plan.value_dim, plan.key_dim, tiles.start_rows, plan.ldk, 1, state, plan.ldv,
                             tiles.value_rows, plan.ldv);
  SolveCorrections<Elem, Acc>(in, plan, begin, c, hv, static_cast<const Acc*>(nullptr), tiles.system, corrections,
                              stride);
  MultiplyLower<Into::kAdd>(c, plan.value_dim, tiles.read, plan.ldc, corrections, stride, reads, stride);
  Elem* o = static_cast<Elem*>(args.o) + (begin * in.value_heads + hv) * plan.value_dim;
  StoreTile<Acc>(c, plan.value_dim, reads, stride, o, in.value_heads * plan.value_dim);
  AdvanceState<Acc>(plan, c, tiles, corrections, stride, state);
}

template <class Elem, class Acc>
inline void ForwardUnit(const KdaForward& args, int64_t n, int64_t h, void* scratch) {
  const KdaInputs& in = args.in;
  const KdaPlan plan(in);
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const KdaChunkTiles<Acc> tiles(plan, pieces);
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
