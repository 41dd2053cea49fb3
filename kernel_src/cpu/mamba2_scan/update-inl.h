// One token of Mamba-2's (or Mamba-1's) recurrence for a sequence and a head. Included once per tier, after math-inl.h.
// With head_dim P and state_dim S, for each row p of the state:
//   step = softplus(dt_p + dt_bias_p),  state_p = exp(step a_p) state_p + step x_p B,  y_p = state_p . C + D_p x_p.

// State elements [0, S) of one row. A decay that all columns share comes in as `decay`; otherwise `a` [S] is given.
template <class State, class Coefficient, class Acc>
PACKFREE_INLINE Acc StepRow(int64_t S, State* state, const Acc* a, Acc step, Acc decay, Acc input, const Coefficient* b,
                            const Coefficient* c) {
  constexpr int L = kLanes<Acc>;
  Vec<Acc> sum = Zero<Acc>();
  for (int64_t s = 0; s < S; s += L) {
    const int width = S - s < L ? static_cast<int>(S - s) : L;
    Vec<Acc> factor = Set<Acc>(decay);
    if (a != nullptr) factor = Exp<Acc>(LoadUpTo<Acc>(a + s, width) * step);
    const Vec<Acc> fresh = LoadUpTo<Acc>(b + s, width) * input;
    const Vec<Acc> next = MulAdd(factor, LoadUpTo<Acc>(state + s, width), fresh);
    StoreUpTo(state + s, next, width);
    sum = MulAdd(next, LoadUpTo<Acc>(c + s, width), sum);
  }
  return ReduceSum<Acc>(sum);
}

template <class State, class Coefficient, class Elem, class Acc>
inline void UpdateItem(const SelectiveStateUpdate& args, int64_t batch, int64_t head) {
  const int64_t P = args.head_dim, S = args.state_dim;
  const int64_t first = (batch * args.heads + head) * P;
  const int64_t group = (batch * args.groups + head / (args.heads / args.groups)) * S;
  const Coefficient* b = static_cast<const Coefficient*>(args.b) + group;
  const Coefficient* c = static_cast<const Coefficient*>(args.c) + group;
  const int64_t owner = args.state_of == nullptr ? batch : args.state_of[batch];
  if (owner < 0) {
    for (int64_t p = 0; p < P; ++p) StoreOne(static_cast<Elem*>(args.y) + first + p, Acc(0));
    return;
  }
  State* state = static_cast<State*>(args.state) + owner * args.state_batch + head * args.state_head;
  const Acc* a = static_cast<const Acc*>(args.a) + head * args.a_head;
  const Acc* dt = static_cast<const Acc*>(args.dt) + batch * args.dt_batch + head * args.dt_head;
  const bool shared = args.a_column == 0;
  // Steps, shared decays and gates of as many rows at once as a register has lanes.
  constexpr int L = kLanes<Acc>;
  for (int64_t row = 0; row < P; row += L) {
    const int rows = P - row < L ? static_cast<int>(P - row) : L;
    Acc steps[L] = {}, decays[L] = {}, inputs[L], sums[L] = {};
    for (int i = 0; i < rows; ++i) steps[i] = dt[(row + i) * args.dt_row];
    Vec<Acc> step = Load<Acc>(static_cast<const Acc*>(steps));
    if (args.dt_bias != nullptr) step += LoadUpTo<Acc>(static_cast<const Acc*>(args.dt_bias) + head * P + row, rows);
    if (args.softplus) step = Softplus<Acc>(step);
    Store(steps, step);
    if (shared) {
      for (int i = 0; i < rows; ++i) decays[i] = a[(row + i) * args.a_row];
      Store(decays, Exp<Acc>(Load<Acc>(static_cast<const Acc*>(decays)) * step));
    }
    const Vec<Acc> x = LoadUpTo<Acc>(static_cast<const Elem*>(args.x) + first + row, rows);
    Store(inputs, step * x);
    for (int i = 0; i < rows; ++i) {
      const Acc* rates = shared ? nullptr : a + (row + i) * args.a_row;
      sums[i] = StepRow<State, Coefficient, Acc>(S, state + (row + i) * args.state_row, rates, steps[i], decays[i],
                                                 inputs[i], b, c);
    }
    Vec<Acc> y = Load<Acc>(static_cast<const Acc*>(sums));
    if (args.d != nullptr) y = MulAdd(LoadUpTo<Acc>(static_cast<const Acc*>(args.d) + head * P + row, rows), x, y);
    if (args.z != nullptr) {
      const Vec<Acc> gate = LoadUpTo<Acc>(static_cast<const Elem*>(args.z) + first + row, rows);
      y = y * (gate * Sigmoid<Acc>(gate));
    }
    StoreUpTo(static_cast<Elem*>(args.y) + first + row, y, rows);
  }
}

template <class Coefficient, class Elem, class Acc>
inline void UpdateAnyState(const SelectiveStateUpdate& args, int64_t batch, int64_t head) {
  if (args.wide_state) {
    UpdateItem<Acc, Coefficient, Elem, Acc>(args, batch, head);
  } else {
    UpdateItem<Elem, Coefficient, Elem, Acc>(args, batch, head);
  }
}

template <class Elem, class Acc>
inline void UpdateAny(const SelectiveStateUpdate& args, int64_t batch, int64_t head) {
  if (args.wide_coefficients) {
    UpdateAnyState<Acc, Elem, Acc>(args, batch, head);
  } else {
    UpdateAnyState<Elem, Elem, Acc>(args, batch, head);
  }
}
