// Stages of a chunk that both directions of Mamba-2's scan share. Included once per tier, after simd/*-inl.h and
// chunked/*-inl.h. c counts the tokens of the chunk.

// Loads B of tokens [begin, begin + c).
template <class Elem, class Acc>
inline void LoadB(const Mamba2ScanInputs& in, const Mamba2ScanPlan& plan, int64_t begin, int64_t c, int64_t group,
                  const Mamba2ChunkTiles<Acc>& tiles) {
  const Elem* b = static_cast<const Elem*>(in.b) + begin * in.b_token + group * in.b_group;
  LoadTile<Acc>(c, plan.state_dim, b, in.b_token, tiles.b_rows, plan.lds);
}

// Loads B, C and the products C_i . B_j.
template <class Elem, class Acc>
inline void LoadGroup(const Mamba2ScanInputs& in, const Mamba2ScanPlan& plan, int64_t begin, int64_t c, int64_t group,
                      const Mamba2ChunkTiles<Acc>& tiles) {
  LoadB<Elem, Acc>(in, plan, begin, c, group, tiles);
  const Elem* c_rows = static_cast<const Elem*>(in.c) + begin * in.c_token + group * in.c_group;
  LoadTile<Acc>(c, plan.state_dim, c_rows, in.c_token, tiles.c_rows, plan.lds);
  LoadTileTransposed<Acc>(c, plan.state_dim, tiles.b_rows, plan.lds, tiles.b_transposed, plan.ldc);
  MultiplyToLower<Into::kOverwrite>(c, plan.state_dim, tiles.c_rows, plan.lds, tiles.b_transposed, plan.ldc, tiles.cb,
                                    plan.ldc);
}

// step = clamp(softplus(dt + dt_bias)) and log_decay = a step of one head's c tokens; both 0 behind them.
template <class Acc>
inline void LoadSteps(const Mamba2ScanInputs& in, int64_t begin, int64_t c, int64_t h, Acc* step, Acc* log_decay) {
  LoadColumn<Acc>(c, static_cast<const Acc*>(in.dt) + begin * in.heads + h, in.heads, step);
  const Acc bias = in.dt_bias == nullptr ? Acc(0) : static_cast<const Acc*>(in.dt_bias)[h];
  const Acc a = static_cast<const Acc*>(in.a)[h];
  const Vec<Acc> low = Set<Acc>(static_cast<Acc>(in.dt_min)), high = Set<Acc>(static_cast<Acc>(in.dt_max));
  for (int64_t i = 0; i < kChunk; i += kLanes<Acc>) {
    Vec<Acc> v = Load<Acc>(step + i) + bias;
    if (in.softplus) v = Softplus<Acc>(v);
    Store(step + i, Min(high, Max(low, v)));  // in this order both let a NaN through
  }
  for (int64_t i = c; i < kChunk; ++i) step[i] = 0;
  for (int64_t i = 0; i < kChunk; i += kLanes<Acc>) Store(log_decay + i, Load<Acc>(step + i) * a);
}

// read[i, j] = (C_i . B_j) decay_ij step_j
template <class Acc>
inline void WeighReads(const Mamba2ScanPlan& plan, int64_t c, const Mamba2ChunkTiles<Acc>& tiles) {
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
      const Vec<Acc> weight = Load<Acc>(tiles.decay + row + j) * Load<Acc>(tiles.step + j);
      Store(tiles.read + row + j, Load<Acc>(tiles.cb + row + j) * weight);
    }
  }
}

// Multiplies row j of x by step_j and its decay to the chunk's end: what the state after the chunk takes of it.
template <class Acc>
inline void WeighForState(const Mamba2ScanPlan& plan, int64_t c, const Mamba2ChunkTiles<Acc>& tiles) {
  const Acc* to_end = tiles.decay + (c - 1) * plan.ldc;
  for (int64_t j = 0; j < c; ++j) ScaleRow<Acc>(plan.head_dim, to_end[j] * tiles.step[j], tiles.x_rows + j * plan.ldp);
}

// rows += d * x, d [P]: what a token passes around the state.
template <class Acc>
inline void AddSkip(const Mamba2ScanPlan& plan, int64_t c, const Acc* d, const Acc* x, Acc* rows) {
  constexpr int L = kLanes<Acc>;
  for (int64_t p = 0; p < plan.head_dim; p += L) {
    const int width = plan.head_dim - p < L ? static_cast<int>(plan.head_dim - p) : L;
    const Vec<Acc> factor = LoadUpTo<Acc>(d + p, width);
    for (int64_t i = 0; i < c; ++i) {
      Acc* at = rows + i * plan.ldp + p;
      Store(at, MulAdd(factor, Load<Acc>(x + i * plan.ldp + p), Load<Acc>(at)));
    }
  }
}

// y_rows = from_start_i C_i state + sum over j <= i of read_ij x_j + D x_i: the output before the gate. Without a
// state (null) the first term is absent.
template <class Acc>
inline void ReadChunk(const Mamba2ScanInputs& in, const Mamba2ScanPlan& plan, int64_t c, int64_t h, const Acc* state,
                      const Mamba2ChunkTiles<Acc>& tiles) {
  if (state != nullptr) {
    Multiply<Into::kOverwrite>(c, plan.head_dim, plan.state_dim, tiles.c_rows, plan.lds, 1, state, plan.ldp,
                               tiles.y_rows, plan.ldp);
    for (int64_t i = 0; i < c; ++i) ScaleRow<Acc>(plan.head_dim, tiles.from_start[i], tiles.y_rows + i * plan.ldp);
    MultiplyLower<Into::kAdd>(c, plan.head_dim, tiles.read, plan.ldc, tiles.x_rows, plan.ldp, tiles.y_rows, plan.ldp);
  } else {
    MultiplyLower<Into::kOverwrite>(c, plan.head_dim, tiles.read, plan.ldc, tiles.x_rows, plan.ldp, tiles.y_rows,
                                    plan.ldp);
  }
  if (in.d != nullptr) {
    AddSkip<Acc>(plan, c, static_cast<const Acc*>(in.d) + h * plan.head_dim, tiles.x_rows, tiles.y_rows);
  }
}
