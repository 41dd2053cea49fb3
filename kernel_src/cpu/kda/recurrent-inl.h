// Token-by-token forward of one sequence and one value head. Included once per tier, after chunked/step-inl.h.

// scratch: five rows of K, two of V, and a state [K, ldv].
template <class Elem, class Acc>
inline void RecurrentUnit(const KdaForward& args, int64_t n, int64_t hv, void* scratch) {
  const KdaInputs& in = args.in;
  const KdaPlan plan(in);
  const int64_t K = plan.key_dim, V = plan.value_dim, h = hv / plan.group;
  Pieces<Acc> pieces(static_cast<Acc*>(scratch));
  Acc* q = pieces.Take(plan.ldk);
  Acc* k = pieces.Take(plan.ldk);
  Acc* decay = pieces.Take(plan.ldk);
  Acc* q_read = pieces.Take(plan.ldk);
  Acc* k_read = pieces.Take(plan.ldk);
  Acc* v = pieces.Take(plan.ldv);
  Acc* o = pieces.Take(plan.ldv);
  const Gate<Acc> gate(in, hv);
  SteppedState<Acc> state = OpenState<Acc>(in, plan, n, hv, args.final_state, pieces.Take(plan.state));
  for (int64_t t = in.packing.bos(n); t < in.packing.eos(n); ++t) {
    const int64_t token = t * in.value_heads + hv;
    Acc unused;
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.q) + t * in.q_token + h * in.q_head, 0, in.l2norm,
                  static_cast<Acc>(in.scale), q, plan.ldk, &unused);
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.k) + t * in.k_token + h * in.k_head, 0, in.l2norm, Acc(1), k,
                  plan.ldk, &unused);
    LoadTile<Acc>(1, V, static_cast<const Elem*>(in.v) + t * in.v_token + hv * in.v_head, 0, v, plan.ldv);
    LoadDecays<Acc>(gate, 1, K, static_cast<const Acc*>(in.g) + token * K, 0, decay, plan.ldk);
    MultiplyRow<Acc>(K, q, decay, q_read);
    MultiplyRow<Acc>(K, k, decay, k_read);
    StepState<Acc>(K, V, q_read, k_read, k, RowDot<Acc>(K, q, k), {decay, 1, Acc(1)},
                   static_cast<const Acc*>(in.beta)[token], v, o, &state);
    StoreTile<Acc>(1, V, o, plan.ldv, static_cast<Elem*>(args.o) + token * V, 0);
  }
  CloseState<Acc>(in, plan, n, hv, state, args.final_state);
}
