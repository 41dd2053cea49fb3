// How a backward pass walks a sequence. Included once per tier, after tile-inl.h.

// Whether a run over chunks stores what the way back through them needs.
enum class Keep { kNothing, kChunks };

// `pass` has two members: Recompute(from, to, keep) runs the running states over chunks [from, to); Backward(index,
// slot) goes back through chunk `index`, the slot-th that was kept. `running` holds the states before the first token,
// `states` elements; `checkpoints` has as many for each segment.
template <class Acc, class Pass>
inline void WalkBackward(const SegmentPlan& plan, int64_t states, Acc* running, Acc* checkpoints, const Pass& pass) {
  // With one segment the running states stay what they are.
  for (int64_t s = 0; s < plan.segments && plan.segments > 1; ++s) {
    __builtin_memcpy(checkpoints + s * states, running, states * sizeof(Acc));
    if (s + 1 < plan.segments) pass.Recompute(plan.first(s), plan.last(s), Keep::kNothing);
  }
  for (int64_t s = plan.segments - 1; s >= 0; --s) {
    if (plan.segments > 1) __builtin_memcpy(running, checkpoints + s * states, states * sizeof(Acc));
    pass.Recompute(plan.first(s), plan.last(s), Keep::kChunks);
    for (int64_t index = plan.last(s) - 1; index >= plan.first(s); --index) pass.Backward(index, index - plan.first(s));
  }
}
