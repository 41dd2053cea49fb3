"""kda: faults that users of packed linear attention met in other packages, one test each, and what is rejected."""

import dataclasses
import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.ops.kda import CASES, FUNCTIONS, Case, op_under_test, small_inputs


def per_sequence(function, inputs, offsets, **options):
    """Each sequence alone, by the same function; outputs joined."""
    outputs, states = [], []
    for n, (bos, eos) in enumerate(zip(offsets[:-1], offsets[1:])):
        own = {name: x[n : n + 1] if name == "initial_state" else x[:, bos:eos] for name, x in inputs.items()}
        o, state = function(**own, output_final_state=True, **options)
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def test_c01_both_functions_keep_samples_apart(kernel):
    case = Case("", key_heads=2, value_heads=2, key_dim=16, value_dim=16, l2norm=False, initial=False)
    inputs = small_inputs(case)
    offsets = [0, 5, 13]
    results = []
    for function in FUNCTIONS:
        call = getattr(kernel, function)
        o, final = call(**inputs, cu_seqlens=offsets, output_final_state=True)
        assert final.shape == (2, 2, 16, 16)
        alone, states = per_sequence(call, inputs, offsets)
        assert_same_bits("o", o, alone)
        assert_same_bits("states", final, states)
        redrawn = {name: torch.cat([torch.rand_like(x[:, :5]) - 1, x[:, 5:]], 1) for name, x in inputs.items()}
        other, _ = call(**redrawn, cu_seqlens=offsets)
        assert_same_bits("isolation", other[:, 5:], o[:, 5:])
        results.append((o, final))
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = kernel.chunk_kda(**leaves, cu_seqlens=offsets)
    for gradient in torch.autograd.grad(o[:, :5].sum(), list(leaves.values())):
        assert bool((gradient[:, 5:] == 0).all()) and bool(gradient[:, :5].abs().sum() > 0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_c06_empty_segments(kernel, function):
    call = getattr(kernel, function)
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        inputs = small_inputs(CASES[1], (8,))
        states = torch.randn(len(offsets) - 1, 2, 16, 24)
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        o, final = call(**inputs, initial_state=states, cu_seqlens=offsets, output_final_state=True)
        expected, _ = call(**inputs, initial_state=states[full], cu_seqlens=plain)
        assert_same_bits("tokens", o, expected)
        for n in range(len(states)):
            if n not in full:
                assert_same_bits("empty segment", final[n], states[n])
        o, final = call(**inputs, cu_seqlens=offsets, output_final_state=True)
        for n in range(len(states)):
            if n not in full:
                assert bool((final[n] == 0).all())
        assert not final.isnan().any() and not o.isnan().any()


def test_c11_boundary_dtypes(kernel):
    inputs = small_inputs(CASES[1], (7,))
    expected, _ = kernel.chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    for boundary in (
        dict(cu_seqlens=torch.tensor([0, 3, 7])),
        dict(cu_seqlens=[0, 3, 7]),
        dict(seq_idx=labels),
        dict(seq_idx=labels.int()),
        dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])),
    ):
        o, _ = kernel.chunk_kda(**inputs, **boundary)
        assert_same_bits(str(boundary), o, expected)


EXTREMES = {
    "-30 at each token": lambda g: g.fill_(-30.0),
    "-1e4 at one token": lambda g: g[:, 3].fill_(-1e4),
    "0": lambda g: g.zero_(),
    "-1e4 in one channel": lambda g: g[..., 2].fill_(-1e4),
    "channels apart": lambda g: g.mul_(torch.logspace(-3, 3, 16)),
}
GROWTH = {
    "some channels grow": lambda g: g.mul_(0.1)[..., ::3].neg_(),
    "growth and decay in turns": lambda g: g.mul_(2).add_(0.1),
    "fast growth of a few tokens": lambda g: g[:, 1:4].fill_(2.0),
}


def with_decays(change, function):
    """The op with 16 channels whose log-decays were changed in place."""
    case = Case("", value_heads=1, key_dim=16, value_dim=16)
    op = op_under_test(case, function)
    make = op.make

    def changed(pack, dtype):
        inputs = make(pack, dtype)
        change(inputs["g"])
        return inputs

    return dataclasses.replace(op, make=changed)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", list(EXTREMES))
def test_c23_extreme_decay(tier, function, kind):
    op = with_decays(EXTREMES[kind], function)
    for length in (8, 40, 70):
        pack = Pack("", (length,))
        inputs = op.make(pack, torch.float32)
        wide = properties.cast(inputs, torch.float64)
        truth = op.reference(wide, pack.cu_seqlens)
        ours = op.run(inputs)
        for name in truth:
            torch.testing.assert_close(ours[name].double(), truth[name], rtol=1e-5, atol=1e-5)
        if function == FUNCTIONS[0]:
            if length < 64:  # a whole chunk without decay cancels so much that the recurrence is the more exact
                properties.check_against_reference(op, pack, torch.float32)
            want = run_with_gradients(lambda x, at=pack.cu_seqlens: op.reference(x, at), wide)
            got = run_with_gradients(op.run, inputs)
            for name in want:
                torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(GROWTH))
def test_growing_channels(tier, kind):
    """Positive log-decays are taken as they are: no clamp, and no factor that overflows where the decay does not."""
    for length in (8, 40):
        properties.check_against_reference(with_decays(GROWTH[kind], FUNCTIONS[0]), Pack("", (length,)), torch.float32)
    op, pack = with_decays(GROWTH[kind], FUNCTIONS[1]), Pack("", (20,))
    inputs = op.make(pack, torch.float32)
    truth = op.reference(properties.cast(inputs, torch.float64), pack.cu_seqlens)
    working = op.reference(inputs, pack.cu_seqlens)
    for name, value in op.run(inputs).items():
        properties.check_close("recurrent", name, value, working[name], truth[name])


@pytest.mark.parametrize("offsets", [[0, 20], [0, 9, 20]], ids=str)
def test_c24_strong_decay_in_every_channel(tier, offsets):
    case = Case("", value_heads=1, key_dim=16, value_dim=16, initial=False)
    inputs = small_inputs(case, (20,))
    inputs["g"].fill_(-5.0)
    op, cu_seqlens = op_under_test(case), torch.tensor(offsets)
    weights = {"o": torch.ones(1, 20, 1, 16, dtype=torch.float64)}
    wide = properties.cast(inputs, torch.float64)
    want = run_with_gradients(lambda x: {"o": op.reference(x, cu_seqlens)["o"]}, wide, weights)
    got = run_with_gradients(lambda x: {"o": op.run(x, cu_seqlens=cu_seqlens)["o"]}, inputs, weights)
    for name in want:
        assert bool(got[name].isfinite().all())
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_c33_grouped_value_heads(kernel, function):
    call = getattr(kernel, function)
    case = Case("", key_heads=2, value_heads=4, key_dim=16, value_dim=16, initial=False)
    inputs = small_inputs(case, (4, 6))
    repeated = dict(inputs, **{name: inputs[name].repeat_interleave(2, dim=2) for name in "qk"})
    options = dict(cu_seqlens=[0, 4, 10], use_qk_l2norm_in_kernel=True)
    assert_same_bits("o", call(**inputs, **options)[0], call(**repeated, **options)[0])
    if function == FUNCTIONS[0]:
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        wide = dict(leaves, **{name: leaves[name].repeat_interleave(2, dim=2) for name in "qk"})
        direct, through = (
            torch.autograd.grad(call(**x, **options)[0].square().sum(), list(leaves.values())) for x in (leaves, wide)
        )
        for left, right in zip(direct, through):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_c44_labels_and_states_together(kernel):
    inputs = small_inputs(Case("", initial=False), (6,))
    states = torch.randn(3, 2, 16, 24, requires_grad=True)
    labels = torch.tensor([[0, 1, 2, 2, 2, 2]])
    o, final = kernel.chunk_kda(**inputs, initial_state=states, output_final_state=True, seq_idx=labels)
    alone, ends = per_sequence(kernel.chunk_kda, dict(inputs, initial_state=states), [0, 1, 2, 6])
    assert_same_bits("o", o, alone)
    assert_same_bits("state", final, ends)
    (gradient,) = torch.autograd.grad(o.sum() + final.sum(), states)
    assert bool((gradient.flatten(1).abs().sum(1) > 0).all())


def test_c46_state_is_handed_on(kernel):
    case = Case("", value_heads=2, key_dim=16, value_dim=32, initial=False)
    inputs = small_inputs(case, (73,))
    options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    whole, last = kernel.chunk_kda(**inputs, **options)
    outputs, state = [], None
    for bos, eos in ((0, 33), (33, 70), (70, 71), (71, 72), (72, 73)):
        function = FUNCTIONS[0] if eos - bos > 1 else FUNCTIONS[1]
        part = {name: x[:, bos:eos] for name, x in inputs.items()}
        o, state = getattr(kernel, function)(**part, initial_state=state, **options)
        assert state.shape == (1, 2, 16, 32)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=r"initial_state must have shape \[N, HV, K, V\] = \(1, 2, 16, 32\)"):
            getattr(kernel, function)(**inputs, initial_state=state.transpose(2, 3))


def test_c55_arguments_are_named(kernel):
    for function in FUNCTIONS:
        names = inspect.signature(getattr(kernel, function)).parameters
        assert list(names)[:11] == [
            "q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel", "cu_seqlens",
        ]  # fmt: skip
        assert {"A_log", "dt_bias", "safe_gate", "lower_bound", "seq_idx", "position_ids"} <= set(names)
        assert not any(p.kind is p.VAR_KEYWORD for p in names.values())
        o, state = getattr(kernel, function)(**small_inputs(CASES[1]), cu_seqlens=None, seq_idx=None, position_ids=None)
        assert isinstance(o, torch.Tensor) and state is None


GATED = dict(use_gate_in_kernel=True, A_log=torch.ones(2))
REJECTED = [
    (dict(q=torch.randn(13, 1, 16)), ValueError, r"q must have 4 dimensions, got shape \(13, 1, 16\)"),
    (dict(q=1.0), TypeError, "q must be a tensor, got float"),
    (dict(q=torch.ones(1, 13, 1, 16, dtype=torch.int64)), TypeError, "q must have one of the dtypes .*, got int64"),
    (dict(k=torch.randn(1, 13, 1, 16).bfloat16()), TypeError, "k must have q's dtype float32, got bfloat16"),
    (dict(k=torch.randn(1, 13, 1, 15)), ValueError, r"k must have shape \[B, T, H, K\] = \(1, 13, 1, 16\)"),
    (dict(v=torch.randn(1, 12, 2, 24)), ValueError, r"v must have shape \[B, T, HV, V\] with B, T = \(1, 13\)"),
    (dict(v=torch.randn(1, 13, 2, 257)), ValueError, "v must have a head_dim of 1 to 256, got 257"),
    (dict(v=torch.randn(1, 13, 2, 24, device="meta")), ValueError, "v must be on cpu"),
    (
        dict(q=torch.randn(1, 13, 3, 16), k=torch.randn(1, 13, 3, 16)),
        ValueError,
        "v must have a num_heads that is a multiple of q's 3, got 2",
    ),
    (dict(g=torch.randn(1, 13, 2)), ValueError, r"g must have 4 dimensions, got shape \(1, 13, 2\)"),
    (dict(g=torch.randn(1, 13, 1, 16)), ValueError, r"g must have shape \[B, T, HV, K\] = \(1, 13, 2, 16\)"),
    (dict(A_log=torch.ones(2)), ValueError, r"A_log must be None without use_gate_in_kernel, got shape \(2,\)"),
    (dict(dt_bias=torch.ones(2)), ValueError, "dt_bias must be None without use_gate_in_kernel"),
    (dict(lower_bound=-5.0), ValueError, "lower_bound must be None without use_gate_in_kernel, got -5.0"),
    (dict(use_gate_in_kernel=True), TypeError, "A_log must be a tensor, got NoneType"),
    (dict(GATED, A_log=torch.ones(3)), ValueError, r"A_log must have HV = 2 elements, got shape \(3,\)"),
    (dict(GATED, A_log=torch.ones(2).int()), TypeError, "A_log must have one of the dtypes"),
    (dict(GATED, dt_bias=torch.ones(16)), ValueError, r"dt_bias must have shape \[HV \* K\] or \[HV, K\]"),
    (dict(GATED, lower_bound=5.0), ValueError, "lower_bound must be negative, got 5.0"),
    (dict(GATED, lower_bound="-5"), TypeError, "lower_bound must be a number or None, got '-5'"),
    (dict(GATED, safe_gate=True), ValueError, "lower_bound must be given with safe_gate"),
    (dict(beta=torch.ones(1, 13, 2, dtype=torch.bool)), TypeError, "beta must have one of the dtypes .*, got bool"),
    (dict(scale="1"), TypeError, "scale must be a number or None, got '1'"),
    (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (dict(initial_state=torch.randn(1, 2, 16, 24)), ValueError, r"initial_state must have shape \[N, HV, K, V\]"),
    (dict(initial_state=torch.ones(2, 2, 16, 24).int()), TypeError, "initial_state must have one of the dtypes"),
    (dict(cu_seqlens=[0, 3, 14]), ValueError, r"cu_seqlens must end at the number of tokens \(13\) or before, got 14"),
    (dict(cu_seqlens=[2, 13]), ValueError, "cu_seqlens must start at 0, got 2"),
    (dict(cu_seqlens=[0, 6, 4, 13]), ValueError, "cu_seqlens must never decrease, got 4 after 6 at index 2"),
    (dict(cu_seqlens=None, seq_idx=torch.zeros(1, 13)), TypeError, "seq_idx must be an int32 or int64 tensor"),
    (dict(position_ids=None, chunk_size=64), TypeError, "unexpected keyword argument 'chunk_size'"),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "change, error, text", REJECTED, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_rejects(kernel, function, change, error, text):
    arguments = dict(small_inputs(), cu_seqlens=[0, 5, 13])
    arguments.update(change)
    with pytest.raises(error, match=text):
        getattr(kernel, function)(**arguments)


def test_direct_op_calls_check_what_memory_safety_needs(kernel):
    ops = kernel._ops.ops
    inputs = small_inputs()
    q, k, v, g, beta = (inputs[name][0] for name in ("q", "k", "v", "g", "beta"))
    state, good = inputs["initial_state"], torch.tensor([0, 5, 13], dtype=torch.int32)
    none, tail = (None, None, None), (0.5, True, True)
    for op in (ops.kda_fwd, ops.kda_recurrent_fwd):
        for offsets in ([0, 14], [1, 13], [0, 9, 5, 13], [-1, 13]):
            with pytest.raises(RuntimeError, match="cu_seqlens must"):
                op(q, k, v, g, beta, *none, torch.tensor(offsets, dtype=torch.int32), None, *tail)
        with pytest.raises(RuntimeError, match="initial_state must have shape"):
            op(q, k, v, g, beta, *none, good, state[:1], *tail)
        with pytest.raises(RuntimeError, match="g must have shape"):
            op(q, k, v, g[:-1], beta, *none, good, None, *tail)
        with pytest.raises(RuntimeError, match="g must have shape"):
            op(q, k, v, g[..., :-1], beta, *none, good, None, *tail)
        with pytest.raises(RuntimeError, match="q and k must have shape"):
            op(q, k[:-1], v, g, beta, *none, good, None, *tail)
        with pytest.raises(RuntimeError, match="HV must be a multiple of H"):
            op(q, k, v[:, :0], g[:, :0], beta[:, :0], *none, good, None, *tail)
        with pytest.raises(RuntimeError, match="A_log must have shape"):
            op(q, k, v, g, beta, torch.ones(1), None, None, good, None, *tail)
        with pytest.raises(RuntimeError, match="dt_bias must have shape"):
            op(q, k, v, g, beta, torch.ones(2), torch.ones(2, 15), None, good, None, *tail)
        with pytest.raises(RuntimeError, match="need A_log"):
            op(q, k, v, g, beta, None, None, -5.0, good, None, *tail)
    with pytest.raises(RuntimeError, match="do must have shape"):
        ops.kda_bwd(v[:-1], None, q, k, v, g, beta, *none, good, None, 0.5, True)
    with pytest.raises(RuntimeError, match="dfinal_state must have shape"):
        ops.kda_bwd(v, state[:1], q, k, v, g, beta, *none, good, None, 0.5, True)
