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
  for (int64_t p = 0; p < P; ++p) {
    const Acc* a = static_cast<const Acc*>(args.a) + head * args.a_head + p * args.a_row;
    Acc step = static_cast<const Acc*>(args.dt)[batch * args.dt_batch + head * args.dt_head + p * args.dt_row];
    if (args.dt_bias != nullptr) step += static_cast<const Acc*>(args.dt_bias)[head * P + p];
    if (args.softplus) step = Softplus<Acc>(Set<Acc>(step))[0];
    const Acc x = LoadOne<Acc>(static_cast<const Elem*>(args.x) + first + p);
    const bool shared = args.a_column == 0;
    const Acc decay = shared ? ExpOne<Acc>(a[0] * step) : Acc(0);
    const Acc* rates = shared ? nullptr : a;
    Acc y = StepRow<State, Coefficient, Acc>(S, state + p * args.state_row, rates, step, decay, step * x, b, c);
    if (args.d != nullptr) y += static_cast<const Acc*>(args.d)[head * P + p] * x;
    if (args.z != nullptr) {
      const Acc gate = LoadOne<Acc>(static_cast<const Elem*>(args.z) + first + p);
      y *= gate * SigmoidOne<Acc>(gate);
    }
    StoreOne(static_cast<Elem*>(args.y) + first + p, y);
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
