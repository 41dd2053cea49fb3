// Token-by-token forward of one sequence and one value head. Included once per tier, after chunked/step-inl.h.

// scratch: two rows of K, two of V, and a state [K, ldv].
template <class Elem, class Acc>
inline void RecurrentUnit(const GatedDeltaRuleForward& args, int64_t n, int64_t hv, void* scratch) {
  const GatedDeltaRuleInputs& in = args.in;
  const GatedDeltaRulePlan plan(in);
  const int64_t K = plan.key_dim, V = plan.value_dim, h = hv / plan.group;
  Acc* q = static_cast<Acc*>(scratch);
  Acc* k = q + plan.ldk;
  Acc* v = k + plan.ldk;
  Acc* o = v + plan.ldv;
  SteppedState<Acc> state = OpenState<Acc>(in, plan, n, hv, args.final_state, o + plan.ldv);
  for (int64_t t = in.packing.bos(n); t < in.packing.eos(n); ++t) {
    Acc unused;
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.q) + t * in.q_token + h * in.q_head, 0, in.l2norm,
                  static_cast<Acc>(in.scale), q, plan.ldk, &unused);
    LoadRows<Acc>(1, K, static_cast<const Elem*>(in.k) + t * in.k_token + h * in.k_head, 0, in.l2norm, Acc(1), k,
                  plan.ldk, &unused);
    LoadTile<Acc>(1, V, static_cast<const Elem*>(in.v) + t * in.v_token + hv * in.v_head, 0, v, plan.ldv);
    const int64_t token = t * in.value_heads + hv;
    const Acc decay = ExpOne<Acc>(static_cast<const Acc*>(in.g)[token]);
    const Acc beta = static_cast<const Acc*>(in.beta)[token];
    const Acc qk = RowDot<Acc>(K, q, k);
    StepState<Acc>(K, V, q, k, k, qk, {&decay, 0, decay}, beta, v, o, &state);
    StoreTile<Acc>(1, V, o, plan.ldv, static_cast<Elem*>(args.o) + token * V, 0);
  }
  CloseState<Acc>(in, plan, n, hv, state, args.final_state);
}
