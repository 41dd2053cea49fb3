// Forward pass of Mamba-2's scan: one sequence and one block of heads of a group. Included once per tier, after
// chunk-inl.h.

// Stores y_rows as y, times silu(z) if there is a gate.
template <class Elem, class Acc>
inline void StoreGated(const Mamba2ScanForward& args, const Mamba2ScanPlan& plan, int64_t begin, int64_t c, int64_t h,
                       Acc* rows) {
  constexpr int L = kLanes<Acc>;
  const Mamba2ScanInputs& in = args.in;
  const int64_t P = plan.head_dim;
  if (in.z != nullptr) {
    const Elem* z = static_cast<const Elem*>(in.z) + begin * in.z_token + h * in.z_head;
    for (int64_t i = 0; i < c; ++i) {
      for (int64_t p = 0; p < P; p += L) {
        const Vec<Acc> gate = LoadUpTo<Acc>(z + i * in.z_token + p, P - p < L ? static_cast<int>(P - p) : L);
        Acc* at = rows + i * plan.ldp + p;
        Store(at, Load<Acc>(at) * (gate * Sigmoid<Acc>(gate)));
      }
    }
  }
  StoreTile<Acc>(c, P, rows, plan.ldp, static_cast<Elem*>(args.y) + (begin * in.heads + h) * P, in.heads * P);
}

template <class Elem, class Acc>
inline void ForwardItem(const Mamba2ScanForward& args, int64_t n, int64_t block, void* scratch) {
  const Mamba2ScanInputs& in = args.in;
  const Mamba2ScanPlan plan(in);
  const HeadBlock heads(plan, block);
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const Mamba2ForwardTiles<Acc> tiles(plan, pieces);
  const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
  const int64_t P = plan.head_dim, S = plan.state_dim;
  const int64_t chunks = ChunksOf(in.packing.length(n));
  const int64_t caller_states = (n * in.heads + heads.first) * P * S;
  for (int64_t j = 0; j < heads.count; ++j) {
    Acc* state = tiles.states + j * plan.state;
    if (in.initial_state != nullptr) {
      LoadTileTransposed<Acc>(P, S, static_cast<const Acc*>(in.initial_state) + caller_states + j * P * S, S, state,
                              plan.ldp);
    } else if (chunks != 1 || args.final_state != nullptr) {
      ClearTile<Acc>(S, P, state, plan.ldp);  // of a sequence of one chunk nobody asks for it
    }
  }
  for (int64_t index = 0; index < chunks; ++index) {
    const Chunk span(in.packing, n, index);
    const int64_t begin = span.begin, c = span.count;
    const bool from_zero = index == 0 && in.initial_state == nullptr;
    const bool last = index + 1 == chunks && args.final_state == nullptr;
    LoadGroup<Elem, Acc>(in, plan, begin, c, heads.group, chunk);
    for (int64_t j = 0; j < heads.count; ++j) {
      const int64_t h = heads.first + j;
      Acc* state = tiles.states + j * plan.state;
      LoadSteps<Acc>(in, begin, c, h, chunk.step, chunk.log_decay);
      ChunkDecay<Acc>(c, chunk.log_decay, 1, chunk.decay, plan.ldc, chunk.from_start, chunk.exponents);
      WeighReads<Acc>(plan, c, chunk);
      LoadTile<Acc>(c, P, static_cast<const Elem*>(in.x) + begin * in.x_token + h * in.x_head, in.x_token, chunk.x_rows,
                    plan.ldp);
      ReadChunk<Acc>(in, plan, c, h, from_zero ? nullptr : state, chunk);
      StoreGated<Elem, Acc>(args, plan, begin, c, h, chunk.y_rows);
      if (last) continue;
      // state = decay over the chunk * state + sum over j of B_j (to_end_j step_j x_j)^T
      WeighForState<Acc>(plan, c, chunk);
      for (int64_t r = 0; r < S; ++r) ScaleRow<Acc>(P, chunk.from_start[c - 1], state + r * plan.ldp);
      Multiply<Into::kAdd>(S, P, c, chunk.b_rows, 1, plan.lds, chunk.x_rows, plan.ldp, state, plan.ldp);
    }
  }
  if (args.final_state == nullptr) return;
  for (int64_t j = 0; j < heads.count; ++j) {
    // Through the group's tiles, which are no longer needed: the caller's rows are not padded to whole registers.
    for (int64_t p = 0; p < P; p += kChunk) {
      const int64_t rows = P - p < kChunk ? P - p : kChunk;
      LoadTileTransposed<Acc>(S, rows, tiles.states + j * plan.state + p, plan.ldp, chunk.b_rows, plan.lds);
      StoreTile<Acc>(rows, S, chunk.b_rows, plan.lds,
                     static_cast<Acc*>(args.final_state) + caller_states + (j * P + p) * S, S);
    }
  }
}
