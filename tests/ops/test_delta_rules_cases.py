"""Faults that users of packed linear attention met in other packages, for both functions of both delta rules."""

import dataclasses
import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.ops import kda
from tests.harness.ops.delta_rules import CASES, Case
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.ops.test_delta_rules import check_forward, every_function, every_rule


def per_sequence(function, inputs, offsets, **options):
    """Each sequence alone, by the same function; outputs joined."""
    outputs, states = [], []
    for n, (bos, eos) in enumerate(zip(offsets[:-1], offsets[1:])):
        own = {name: x[n : n + 1] if name == "initial_state" else x[:, bos:eos] for name, x in inputs.items()}
        o, state = function(**own, output_final_state=True, **options)
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


@every_rule
def test_c01_both_functions_keep_samples_apart(kernel, rule):
    case = Case("", key_heads=2, value_heads=2, key_dim=16, value_dim=16, l2norm=False, initial=False)
    inputs = rule.small_inputs(case)
    offsets = [0, 5, 13]
    results = []
    for function in rule.functions:
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
    o, _ = getattr(kernel, rule.chunk)(**leaves, cu_seqlens=offsets)
    for gradient in torch.autograd.grad(o[:, :5].sum(), list(leaves.values())):
        assert bool((gradient[:, 5:] == 0).all()) and bool(gradient[:, :5].abs().sum() > 0)


@every_function
def test_c06_empty_segments(kernel, rule, function):
    call = getattr(kernel, function)
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        inputs = rule.small_inputs(CASES[1], (8,))
        states = torch.randn(len(offsets) - 1, 2, 16, 24)
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        empty = [n for n in range(len(offsets) - 1) if n not in full]
        o, final = call(**inputs, initial_state=states, cu_seqlens=offsets, output_final_state=True)
        expected, _ = call(**inputs, initial_state=states[full], cu_seqlens=plain)
        assert_same_bits("tokens", o, expected)
        assert_same_bits("empty segments", final[empty], states[empty])
        o, final = call(**inputs, cu_seqlens=offsets, output_final_state=True)
        assert bool((final[empty] == 0).all())
        assert not final.isnan().any() and not o.isnan().any()


@every_rule
def test_c11_boundary_dtypes(kernel, rule):
    chunk, inputs = getattr(kernel, rule.chunk), rule.small_inputs(CASES[1], (7,))
    expected, _ = chunk(**inputs, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    for boundary in (
        dict(cu_seqlens=torch.tensor([0, 3, 7])),
        dict(cu_seqlens=[0, 3, 7]),
        dict(seq_idx=labels),
        dict(seq_idx=labels.int()),
        dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]])),
    ):
        o, _ = chunk(**inputs, **boundary)
        assert_same_bits(str(boundary), o, expected)


EXTREMES = {
    "-30 at each token": lambda g: g.fill_(-30.0),
    "-1e4 at one token": lambda g: g[:, 3].fill_(-1e4),
    "0": lambda g: g.zero_(),
}
EXTREMES_OF_CHANNELS = {
    "-1e4 in one channel": lambda g: g[..., 2].fill_(-1e4),
    "channels apart": lambda g: g.mul_(torch.logspace(-3, 3, 16)),
}
GROWTH = {
    "some channels grow": lambda g: g.mul_(0.1)[..., ::3].neg_(),
    "growth and decay in turns": lambda g: g.mul_(2).add_(0.1),
    "fast growth of a few tokens": lambda g: g[:, 1:4].fill_(2.0),
}


def with_decays(change, rule, function):
    """The op with 16 channels whose log-decays were changed in place."""
    op = rule.op_under_test(Case("", value_heads=1, key_dim=16, value_dim=16), function)
    make = op.make

    def changed(pack, dtype):
        inputs = make(pack, dtype)
        change(inputs["g"])
        return inputs

    return dataclasses.replace(op, make=changed)


def check_extreme(change, rule, function, length):
    op, pack = with_decays(change, rule, function), Pack("", (length,))
    inputs = op.make(pack, torch.float32)
    wide = properties.cast(inputs, torch.float64)
    truth = op.reference(wide, pack.cu_seqlens)
    ours = op.run(inputs)
    for name in truth:
        torch.testing.assert_close(ours[name].double(), truth[name], rtol=1e-5, atol=1e-5)
    if function == rule.recurrent:
        return
    # A whole chunk of KDA without decay cancels so much that the recurrence is the more exact.
    if length < 64 or not rule.per_channel:
        properties.check_against_reference(op, pack, torch.float32)
    want = run_with_gradients(lambda x: op.reference(x, pack.cu_seqlens), wide)
    got = run_with_gradients(op.run, inputs)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", list(EXTREMES))
@every_function
def test_c23_extreme_decay(tier, rule, function, kind):
    for length in (8, 40, 70):
        check_extreme(EXTREMES[kind], rule, function, length)


@pytest.mark.parametrize("kind", list(EXTREMES_OF_CHANNELS))
@pytest.mark.parametrize("function", kda.RULE.functions)
def test_c23_extreme_decay_of_channels(tier, function, kind):
    for length in (8, 40, 70):
        check_extreme(EXTREMES_OF_CHANNELS[kind], kda.RULE, function, length)


@pytest.mark.parametrize("kind", list(GROWTH))
def test_growing_channels(tier, kind):
    """Positive log-decays are taken as they are: no clamp, and no factor that overflows where the decay does not."""
    chunk, recurrent = (with_decays(GROWTH[kind], kda.RULE, function) for function in kda.RULE.functions)
    for length in (8, 40):
        properties.check_against_reference(chunk, Pack("", (length,)), torch.float32)
    check_forward(recurrent, Pack("", (20,)), torch.float32)


@pytest.mark.parametrize("offsets", [[0, 20], [0, 9, 20]], ids=str)
def test_c24_strong_decay_in_every_channel(tier, offsets):
    case = Case("", value_heads=1, key_dim=16, value_dim=16, initial=False)
    inputs = kda.RULE.small_inputs(case, (20,))
    inputs["g"].fill_(-5.0)
    op, cu_seqlens = kda.op_under_test(case), torch.tensor(offsets)
    weights = {"o": torch.ones(1, 20, 1, 16, dtype=torch.float64)}
    wide = properties.cast(inputs, torch.float64)
    want = run_with_gradients(lambda x: {"o": op.reference(x, cu_seqlens)["o"]}, wide, weights)
    got = run_with_gradients(lambda x: {"o": op.run(x, cu_seqlens=cu_seqlens)["o"]}, inputs, weights)
    for name in want:
        assert bool(got[name].isfinite().all())
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-4)


@every_function
def test_c33_grouped_value_heads(kernel, rule, function):
    call = getattr(kernel, function)
    case = Case("", key_heads=2, value_heads=4, key_dim=16, value_dim=16, initial=False)
    inputs = rule.small_inputs(case, (4, 6))
    repeated = dict(inputs, **{name: inputs[name].repeat_interleave(2, dim=2) for name in "qk"})
    options = dict(cu_seqlens=[0, 4, 10], **case.options)
    assert_same_bits("o", call(**inputs, **options)[0], call(**repeated, **options)[0])
    if function == rule.chunk:
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        wide = dict(leaves, **{name: leaves[name].repeat_interleave(2, dim=2) for name in "qk"})
        direct, through = (
            torch.autograd.grad(call(**x, **options)[0].square().sum(), list(leaves.values())) for x in (leaves, wide)
        )
        for left, right in zip(direct, through):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@every_rule
def test_c44_labels_and_states_together(kernel, rule):
    chunk, inputs = getattr(kernel, rule.chunk), rule.small_inputs(Case("", initial=False), (6,))
    states = torch.randn(3, 2, 16, 24, requires_grad=True)
    labels = torch.tensor([[0, 1, 2, 2, 2, 2]])
    o, final = chunk(**inputs, initial_state=states, output_final_state=True, seq_idx=labels)
    alone, ends = per_sequence(chunk, dict(inputs, initial_state=states), [0, 1, 2, 6])
    assert_same_bits("o", o, alone)
    assert_same_bits("state", final, ends)
    (gradient,) = torch.autograd.grad(o.sum() + final.sum(), states)
    assert bool((gradient.flatten(1).abs().sum(1) > 0).all())


@every_rule
def test_c46_state_is_handed_on(kernel, rule):
    case = Case("", value_heads=2, key_dim=16, value_dim=32, initial=False)
    inputs = rule.small_inputs(case, (73,))
    options = dict(output_final_state=True, **case.options)
    whole, last = getattr(kernel, rule.chunk)(**inputs, **options)
    outputs, state = [], None
    for bos, eos in ((0, 33), (33, 70), (70, 71), (71, 72), (72, 73)):
        function = rule.chunk if eos - bos > 1 else rule.recurrent
        part = {name: x[:, bos:eos] for name, x in inputs.items()}
        o, state = getattr(kernel, function)(**part, initial_state=state, **options)
        assert state.shape == (1, 2, 16, 32)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)
    for function in rule.functions:
        with pytest.raises(ValueError, match=r"initial_state must have shape \[N, HV, K, V\] = \(1, 2, 16, 32\)"):
            getattr(kernel, function)(**inputs, initial_state=state.transpose(2, 3))


@every_function
def test_c55_arguments_are_named(kernel, rule, function):
    """Upstream's come first (test_upstream_signatures.py); boundaries that it lacks are keywords."""
    parameters = inspect.signature(getattr(kernel, function)).parameters
    assert list(parameters)[-2:] == ["seq_idx", "position_ids"]
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("seq_idx", "position_ids"))
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    inputs = rule.small_inputs(CASES[1])
    o, state = getattr(kernel, function)(**inputs, cu_seqlens=None, seq_idx=None, position_ids=None)
    assert isinstance(o, torch.Tensor) and state is None
