// Backward pass of Mamba-2's scan: one sequence and one block of heads of a group. Included once per tier, after
// chunk-inl.h. Names of gradients carry d_ before the name of the tile they belong to.

// y_rows holds the output before the gate. Writes dz and leaves the gradient of that output in y_rows:
//   y = out silu(z),  d_out = d_y silu(z),  dz = d_y out sigmoid(z) (1 + z (1 - sigmoid(z))).
template <class Elem, class Acc>
inline void GateGradients(const Mamba2ScanBackward& args, const Mamba2ScanPlan& plan, int64_t begin, int64_t c,
                          int64_t h, Acc* rows) {
  constexpr int L = kLanes<Acc>;
  const Mamba2ScanInputs& in = args.in;
  const int64_t P = plan.head_dim, at = (begin * in.heads + h) * P, stride = in.heads * P;
  const Elem* z = static_cast<const Elem*>(in.z) + begin * in.z_token + h * in.z_head;
  const Elem* d_y = static_cast<const Elem*>(args.dy) + at;
  Elem* dz = static_cast<Elem*>(args.dz) + at;
  for (int64_t i = 0; i < c; ++i) {
    for (int64_t p = 0; p < P; p += L) {
      const int width = P - p < L ? static_cast<int>(P - p) : L;
      const Vec<Acc> gate = LoadUpTo<Acc>(z + i * in.z_token + p, width);
      const Vec<Acc> above = LoadUpTo<Acc>(d_y + i * stride + p, width);
      const Vec<Acc> sigmoid = Sigmoid<Acc>(gate);
      const Vec<Acc> slope = sigmoid * MulAdd(gate, Acc(1) - sigmoid, Set<Acc>(Acc(1)));
      Acc* row = rows + i * plan.ldp + p;
      StoreUpTo(dz + i * stride + p, above * Load<Acc>(row) * slope, width);
      Store(row, above * (gate * sigmoid));
    }
  }
}

// tiles.pairs holds the gradients of `read`. Adds what they give to C_i . B_j to d_cb, sets d_step_j to what they give
// to step j directly, and leaves the gradient of each pair's exponent in tiles.pairs.
template <class Acc>
inline void SplitReadGradients(const Mamba2ScanPlan& plan, int64_t c, const Mamba2BackwardTiles<Acc>& tiles) {
  const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
  for (int64_t j = 0; j < kChunk; ++j) tiles.d_step[j] = 0;
  for (int64_t i = 0; i < c; ++i) {
    const int64_t row = i * plan.ldc;
    for (int64_t j = 0; j < TriangleWidth(i, c); j += kLanes<Acc>) {
      const Vec<Acc> step = Load<Acc>(chunk.step + j);
      const Vec<Acc> decayed = Load<Acc>(tiles.pairs + row + j) * Load<Acc>(chunk.decay + row + j);
      const Vec<Acc> by_step = decayed * Load<Acc>(chunk.cb + row + j);
      Store(tiles.d_cb + row + j, MulAdd(decayed, step, Load<Acc>(tiles.d_cb + row + j)));
      Store(tiles.d_step + j, Load<Acc>(tiles.d_step + j) + by_step);
      Store(tiles.pairs + row + j, by_step * step);
    }
  }
}

// dx += D d_out, and dD of the sequence += sum over i of d_out_i x_i.
template <class Acc>
inline void SkipGradients(const Mamba2ScanPlan& plan, int64_t c, const Acc* d, const Acc* x, const Acc* d_out, Acc* d_x,
                          double* d_d) {
  constexpr int L = kLanes<Acc>;
  AddSkip<Acc>(plan, c, d, d_out, d_x);
  for (int64_t p = 0; p < plan.head_dim; p += L) {
    Vec<Acc> sum = Zero<Acc>();
    for (int64_t i = 0; i < c; ++i) {
      sum = MulAdd(Load<Acc>(x + i * plan.ldp + p), Load<Acc>(d_out + i * plan.ldp + p), sum);
    }
    for (int64_t m = 0; m < L && p + m < plan.head_dim; ++m) d_d[p + m] += static_cast<double>(sum[m]);
  }
}

// From d_step (through the recurrence's own use of the step) and d_log_decay of one head's chunk: ddt, and the
// sequence's sums of dA and ddt_bias.
template <class Acc>
inline void StoreStepGradients(const Mamba2ScanBackward& args, int64_t begin, int64_t c, int64_t h,
                               const Mamba2BackwardTiles<Acc>& tiles, double* d_a, double* d_bias) {
  const Mamba2ScanInputs& in = args.in;
  const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
  const Acc a = static_cast<const Acc*>(in.a)[h];
  const Acc bias = in.dt_bias == nullptr ? Acc(0) : static_cast<const Acc*>(in.dt_bias)[h];
  const Acc low = static_cast<Acc>(in.dt_min), high = static_cast<Acc>(in.dt_max);
  const Acc* dt = static_cast<const Acc*>(in.dt) + begin * in.heads + h;
  Acc* ddt = static_cast<Acc*>(args.ddt) + begin * in.heads + h;
  LoadColumn<Acc>(c, dt, in.heads, chunk.exponents);
  double sum_a = 0, sum_bias = 0;
  for (int64_t i = 0; i < kChunk && i < c; i += kLanes<Acc>) {
    const Vec<Acc> before = Load<Acc>(chunk.exponents + i) + bias;
    const Vec<Acc> d_log_decay = Load<Acc>(tiles.d_log_decay + i);
    Vec<Acc> gradient = MulAdd(Set<Acc>(a), d_log_decay, Load<Acc>(tiles.d_step + i));
    Vec<Acc> unclamped = before;
    if (in.softplus) {
      unclamped = Softplus<Acc>(before);
      gradient = before > Acc(20) ? gradient : gradient * Sigmoid<Acc>(before);
    }
    gradient = unclamped < low ? Zero<Acc>() : gradient;
    gradient = unclamped > high ? Zero<Acc>() : gradient;
    const Vec<Acc> by_a = d_log_decay * Load<Acc>(chunk.step + i);
    for (int64_t m = 0; m < kLanes<Acc> && i + m < c; ++m) {
      ddt[(i + m) * in.heads] = gradient[m];
      sum_bias += static_cast<double>(gradient[m]);
      sum_a += static_cast<double>(by_a[m]);
    }
  }
  *d_a += sum_a;
  *d_bias += sum_bias;
}

// One chunk of one head. `state_transposed` is the state before it, or null for 0. The gradient of the state after it,
// d_after or null for 0, becomes that of the state before it, d_before, unless that is null. Both are the same memory.
template <class Elem, class Acc>
inline void BackwardChunk(const Mamba2ScanBackward& args, const Mamba2ScanPlan& plan, int64_t begin, int64_t c,
                          int64_t h, const Acc* state_transposed, const Acc* d_after, Acc* d_before,
                          const Mamba2BackwardTiles<Acc>& tiles, double* d_d) {
  const Mamba2ScanInputs& in = args.in;
  const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
  const int64_t P = plan.head_dim, S = plan.state_dim, ldp = plan.ldp, lds = plan.lds, ldc = plan.ldc;
  const Elem* x = static_cast<const Elem*>(in.x) + begin * in.x_token + h * in.x_head;
  const int64_t at = (begin * in.heads + h) * P;
  Acc* d_out = chunk.y_rows;
  LoadTile<Acc>(c, P, x, in.x_token, chunk.x_rows, ldp);
  if (in.z != nullptr) {
    if (state_transposed != nullptr) LoadTileTransposed<Acc>(P, S, state_transposed, lds, tiles.state, ldp);
    ReadChunk<Acc>(in, plan, c, h, state_transposed == nullptr ? nullptr : tiles.state, chunk);
    GateGradients<Elem, Acc>(args, plan, begin, c, h, d_out);
  } else {
    LoadTile<Acc>(c, P, static_cast<const Elem*>(args.dy) + at, in.heads * P, d_out, ldp);
  }

  // Inside the chunk: d_read_ij = d_out_i . x_j, dx_j = sum over i of read_ij d_out_i.
  LoadTileTransposed<Acc>(c, P, chunk.x_rows, ldp, tiles.x_transposed, ldc);
  MultiplyToLower<Into::kOverwrite>(c, P, d_out, ldp, tiles.x_transposed, ldc, tiles.pairs, ldc);
  MultiplyLowerTransposed<Into::kOverwrite>(c, P, chunk.read, ldc, d_out, ldp, tiles.d_x, ldp);
  SplitReadGradients<Acc>(plan, c, tiles);
  if (in.d != nullptr) {
    SkipGradients<Acc>(plan, c, static_cast<const Acc*>(in.d) + h * P, chunk.x_rows, d_out, tiles.d_x, d_d);
  }

  // Through the state after it: dx_j += w_j B_j d_after, dB_j += w_j d_after x_j with w_j = to_end_j step_j.
  const Acc* to_end = chunk.decay + (c - 1) * ldc;
  Acc d_over_chunk = 0;
  for (int64_t j = 0; j < kChunk; ++j) tiles.d_to_end[j] = 0;
  if (d_after != nullptr) {
    Multiply<Into::kOverwrite>(c, P, S, chunk.b_rows, lds, 1, d_after, ldp, tiles.from_end, ldp);
    LoadTileTransposed<Acc>(S, P, d_after, ldp, tiles.d_state_transposed, lds);
    for (int64_t j = 0; j < c; ++j) {
      const Acc along = to_end[j] * RowDot<Acc>(P, chunk.x_rows + j * ldp, tiles.from_end + j * ldp);
      const Acc weight = to_end[j] * chunk.step[j];
      tiles.d_step[j] += along;
      tiles.d_to_end[j] = along * chunk.step[j];
      AddScaledRow<Acc>(P, weight, tiles.from_end + j * ldp, tiles.d_x + j * ldp);
      ScaleRow<Acc>(P, weight, chunk.x_rows + j * ldp);
    }
    Multiply<Into::kAdd>(c, S, P, chunk.x_rows, ldp, 1, tiles.d_state_transposed, lds, tiles.d_b, lds);
    if (state_transposed != nullptr) {
      for (int64_t r = 0; r < P; ++r) {
        d_over_chunk += RowDot<Acc>(S, state_transposed + r * lds, tiles.d_state_transposed + r * lds);
      }
      d_over_chunk *= chunk.from_start[c - 1];
    }
  }
  StoreTile<Acc>(c, P, tiles.d_x, ldp, static_cast<Elem*>(args.dx) + at, in.heads * P);

  // Through the state before it: dC_i += from_start_i state d_out_i.
  for (int64_t i = 0; i < c; ++i) ScaleRow<Acc>(P, chunk.from_start[i], d_out + i * ldp);
  for (int64_t i = 0; i < kChunk; ++i) tiles.d_from_start[i] = 0;
  if (state_transposed != nullptr) {
    Multiply<Into::kOverwrite>(c, S, P, d_out, ldp, 1, state_transposed, lds, tiles.part, lds);
    for (int64_t i = 0; i < c; ++i) {
      tiles.d_from_start[i] = RowDot<Acc>(S, chunk.c_rows + i * lds, tiles.part + i * lds);
      AddScaledRow<Acc>(S, Acc(1), tiles.part + i * lds, tiles.d_c + i * lds);
    }
  }
  // d_before = decay over the chunk * d_after + sum over i of C_i (from_start_i d_out_i)^T
  if (d_before != nullptr) {
    for (int64_t r = 0; r < S; ++r) ScaleRow<Acc>(P, chunk.from_start[c - 1], d_before + r * ldp);
    Multiply<Into::kAdd>(S, P, c, chunk.c_rows, 1, lds, d_out, ldp, d_before, ldp);
  }
  GatherDecayGradients<Acc>(c, tiles.pairs, ldc, tiles.d_from_start, tiles.d_to_end, d_over_chunk, chunk.exponents,
                            tiles.d_log_decay, 1);
}

// What the item's summed gradients of C_i . B_j give to B and C, and where both go.
template <class Elem, class Acc>
inline void StoreGroupGradients(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials,
                                const Mamba2ScanPlan& plan, int64_t begin, int64_t c, int64_t group, int64_t block,
                                const Mamba2BackwardTiles<Acc>& tiles) {
  const Mamba2ScanInputs& in = args.in;
  const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
  const int64_t S = plan.state_dim, lds = plan.lds, ldc = plan.ldc;
  MultiplyLower<Into::kAdd>(c, S, tiles.d_cb, ldc, chunk.b_rows, lds, tiles.d_c, lds);
  MultiplyLowerTransposed<Into::kAdd>(c, S, tiles.d_cb, ldc, chunk.c_rows, lds, tiles.d_b, lds);
  if (partials.db == nullptr) {
    const int64_t at = (begin * in.groups + group) * S, stride = in.groups * S;
    StoreTile<Acc>(c, S, tiles.d_b, lds, static_cast<Elem*>(args.db) + at, stride);
    StoreTile<Acc>(c, S, tiles.d_c, lds, static_cast<Elem*>(args.dc) + at, stride);
  } else {
    const int64_t at = (block * in.packing.tokens + begin) * S;
    StoreTile<Acc>(c, S, tiles.d_b, lds, static_cast<Acc*>(partials.db) + at, S);
    StoreTile<Acc>(c, S, tiles.d_c, lds, static_cast<Acc*>(partials.dc) + at, S);
  }
}

// What WalkBackward calls. `row` is the sequence's first entry in partial sums of [.., H].
template <class Elem, class Acc>
struct Mamba2BackwardPass {
  const Mamba2ScanBackward& args;
  const Mamba2ScanPartials& partials;
  const Mamba2ScanPlan& plan;
  const HeadBlock& heads;
  int64_t n, row, block;
  const Mamba2BackwardTiles<Acc>& tiles;

  // Kept of a chunk are the states before it; then the state after the last chunk is not wanted.
  void Recompute(int64_t from, int64_t to, Keep keep) const {
    const bool keeps = keep == Keep::kChunks;
    for (int64_t index = from; index < to; ++index) {
      // A state of 0 before the first chunk is never read.
      const bool wanted = index > 0 || args.in.initial_state != nullptr;
      if (keeps && wanted)
        __builtin_memcpy(tiles.kept + (index - from) * plan.kept, tiles.running, plan.kept * sizeof(Acc));
      if (keeps && index + 1 == to) break;
      const Chunk span(args.in.packing, n, index);
      LoadB<Elem, Acc>(args.in, plan, span.begin, span.count, heads.group, tiles.chunk);
      for (int64_t j = 0; j < heads.count; ++j) AdvanceHead(span.begin, span.count, j);
    }
  }

  void AdvanceHead(int64_t begin, int64_t c, int64_t j) const {
    const Mamba2ScanInputs& in = args.in;
    const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
    const int64_t P = plan.head_dim, S = plan.state_dim, h = heads.first + j;
    Acc* state = tiles.running + j * plan.state_transposed;
    LoadSteps<Acc>(in, begin, c, h, chunk.step, chunk.log_decay);
    ChunkDecay<Acc>(c, chunk.log_decay, 1, chunk.decay, plan.ldc, chunk.from_start, chunk.exponents);
    LoadTile<Acc>(c, P, static_cast<const Elem*>(in.x) + begin * in.x_token + h * in.x_head, in.x_token, chunk.x_rows,
                  plan.ldp);
    WeighForState<Acc>(plan, c, chunk);
    for (int64_t r = 0; r < P; ++r) ScaleRow<Acc>(S, chunk.from_start[c - 1], state + r * plan.lds);
    Multiply<Into::kAdd>(P, S, c, chunk.x_rows, 1, plan.ldp, chunk.b_rows, plan.lds, state, plan.lds);
  }

  void Backward(int64_t index, int64_t slot) const {
    const Mamba2ScanInputs& in = args.in;
    const Mamba2ChunkTiles<Acc>& chunk = tiles.chunk;
    const Chunk span(in.packing, n, index);
    const int64_t begin = span.begin, c = span.count;
    const bool from_zero = index == 0 && in.initial_state == nullptr;
    const bool has_after = index + 1 < tiles.segments.chunks || args.dfinal_state != nullptr;
    const bool wants_before = index > 0 || args.dinitial_state != nullptr;
    LoadGroup<Elem, Acc>(in, plan, begin, c, heads.group, chunk);
    ClearTile<Acc>(c, c, tiles.d_cb, plan.ldc);
    ClearTile<Acc>(c, plan.state_dim, tiles.d_b, plan.lds);
    ClearTile<Acc>(c, plan.state_dim, tiles.d_c, plan.lds);
    for (int64_t j = 0; j < heads.count; ++j) {
      const int64_t h = heads.first + j;
      const Acc* state = tiles.kept + slot * plan.kept + j * plan.state_transposed;
      LoadSteps<Acc>(in, begin, c, h, chunk.step, chunk.log_decay);
      ChunkDecay<Acc>(c, chunk.log_decay, 1, chunk.decay, plan.ldc, chunk.from_start, chunk.exponents);
      WeighReads<Acc>(plan, c, chunk);
      Acc* d_state = tiles.d_states + j * plan.state;
      BackwardChunk<Elem, Acc>(args, plan, begin, c, h, from_zero ? nullptr : state, has_after ? d_state : nullptr,
                               wants_before ? d_state : nullptr, tiles,
                               partials.dd == nullptr ? nullptr : partials.dd + (row + h) * plan.head_dim);
      StoreStepGradients<Acc>(args, begin, c, h, tiles, partials.da + row + h, partials.ddt_bias + row + h);
    }
    StoreGroupGradients<Elem, Acc>(args, partials, plan, begin, c, heads.group, block, tiles);
  }
};

// `slot` counts the sequences with tokens before this one. Its entries of the partial sums are set here.
template <class Elem, class Acc>
inline void BackwardItem(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t n, int64_t slot,
                         int64_t block, void* scratch) {
  const Mamba2ScanInputs& in = args.in;
  const Mamba2ScanPlan plan(in);
  const HeadBlock heads(plan, block);
  const int64_t length = in.packing.length(n);
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  const Mamba2BackwardTiles<Acc> tiles(plan, length, pieces);
  const int64_t P = plan.head_dim, S = plan.state_dim, row = slot * in.heads;
  const int64_t caller_states = (n * in.heads + heads.first) * P * S;
  const bool one_chunk = tiles.segments.chunks == 1;

  for (int64_t j = 0; j < heads.count; ++j) {
    Acc* d_state = tiles.d_states + j * plan.state;
    Acc* state = tiles.running + j * plan.state_transposed;
    if (args.dfinal_state != nullptr) {
      LoadTileTransposed<Acc>(P, S, static_cast<const Acc*>(args.dfinal_state) + caller_states + j * P * S, S, d_state,
                              plan.ldp);
    } else if (!one_chunk || args.dinitial_state != nullptr) {
      ClearTile<Acc>(S, P, d_state, plan.ldp);
    }
    if (in.initial_state != nullptr) {
      LoadTile<Acc>(P, S, static_cast<const Acc*>(in.initial_state) + caller_states + j * P * S, S, state, plan.lds);
    } else if (!one_chunk) {
      ClearTile<Acc>(P, S, state, plan.lds);
    }
    if (length == 0) continue;
    const int64_t h = row + heads.first + j;
    partials.da[h] = 0;
    partials.ddt_bias[h] = 0;
    for (int64_t p = 0; p < P && partials.dd != nullptr; ++p) partials.dd[h * P + p] = 0;
  }
  WalkBackward<Acc>(tiles.segments, plan.kept, tiles.running, tiles.checkpoints,
                    Mamba2BackwardPass<Elem, Acc>{args, partials, plan, heads, n, row, block, tiles});
  if (args.dinitial_state == nullptr) return;
  for (int64_t j = 0; j < heads.count; ++j) {
    LoadTileTransposed<Acc>(S, P, tiles.d_states + j * plan.state, plan.ldp, tiles.d_state_transposed, plan.lds);
    StoreTile<Acc>(P, S, tiles.d_state_transposed, plan.lds,
                   static_cast<Acc*>(args.dinitial_state) + caller_states + j * P * S, S);
  }
}

// dB and dC of tokens [begin, end): the sums over a group's items, in rising order.
template <class Elem, class Acc>
inline void SumItems(const Mamba2ScanBackward& args, const Mamba2ScanPartials& partials, int64_t begin, int64_t end) {
  constexpr int L = kLanes<Acc>;
  const Mamba2ScanInputs& in = args.in;
  const Mamba2ScanPlan plan(in);
  const int64_t S = plan.state_dim, apart = in.packing.tokens * S;
  for (int which = 0; which < 2; ++which) {
    const Acc* parts = static_cast<const Acc*>(which == 0 ? partials.db : partials.dc);
    Elem* target = static_cast<Elem*>(which == 0 ? args.db : args.dc);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t g = 0; g < in.groups; ++g) {
        const Acc* first = parts + g * plan.group_blocks * apart + t * S;
        for (int64_t s = 0; s < S; s += L) {
          const int width = S - s < L ? static_cast<int>(S - s) : L;
          Vec<Acc> sum = LoadUpTo<Acc>(first + s, width);
          for (int64_t k = 1; k < plan.group_blocks; ++k) sum = sum + LoadUpTo<Acc>(first + k * apart + s, width);
          StoreUpTo(target + (t * in.groups + g) * S + s, sum, width);
        }
      }
    }
  }
}
