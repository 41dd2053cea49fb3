"""causal_conv1d: against its reference, packed against alone, and the faults other packages had."""

import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.ops.causal_conv1d import CASES, Case, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype, tier):
    for pack in catalogue(edge=64):
        properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_packing_properties(case, dtype, tier):
    for pack in catalogue(edge=64):
        properties.check_all_properties(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    for case in CASES[:2]:
        properties.check_memory_forms(op_under_test(case), Pack("ragged", (5, 9, 17, 3)), dtype)


def test_gradcheck_on_the_real_backward(kernel):
    for case in CASES[:4]:
        op = op_under_test(case)
        inputs = op.make(SMALL, torch.float64)
        names = list(inputs)

        def call(*values, op=op, names=names):
            return tuple(op.run(dict(zip(names, values)), cu_seqlens=SMALL.cu_seqlens).values())

        assert torch.autograd.gradcheck(call, [value.requires_grad_() for value in inputs.values()])


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops
    weight, bias = (torch.randn(6, 4, requires_grad=True), torch.randn(6, requires_grad=True))
    state = torch.randn(3, 6, 3, requires_grad=True)
    for channels_last in (True, False):
        x = torch.randn((1, 10, 6) if channels_last else (1, 6, 10), requires_grad=True)
        arguments = (x, weight, bias, SMALL.cu_seqlens, state, True, channels_last, True)
        torch.library.opcheck(ops.causal_conv1d_fwd.default, arguments)
        arguments = (x, weight, None, SMALL.cu_seqlens, None, False, channels_last, False)
        torch.library.opcheck(ops.causal_conv1d_fwd.default, arguments)
        detached = [t.detach() for t in (torch.randn_like(x), torch.randn_like(state), x, weight, bias)]
        arguments = (*detached, SMALL.cu_seqlens, state.detach(), True, channels_last)
        torch.library.opcheck(ops.causal_conv1d_bwd.default, arguments)
    arguments = (torch.randn(2, 6, 1), torch.randn(2, 6, 3), weight.detach(), bias.detach(), None, None, True)
    torch.library.opcheck(ops.causal_conv1d_update.default, arguments)


def test_state_carries_over(kernel):
    """Split anywhere = whole, to the bit."""
    x, weight, bias = torch.randn(1, 8, 11), torch.randn(8, 4), torch.randn(8)
    whole, last = kernel.causal_conv1d_fn(x, weight, bias, return_final_states=True, activation="silu")
    for cut in range(12):
        first, state = kernel.causal_conv1d_fn(
            x[:, :, :cut], weight, bias, return_final_states=True, activation="silu"
        )
        second, final = kernel.causal_conv1d_fn(
            x[:, :, cut:], weight, bias, initial_states=state, return_final_states=True, activation="silu"
        )
        assert_same_bits(f"cut at {cut}", torch.cat([first, second], -1), whole)
        assert_same_bits(f"state, cut at {cut}", final, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_update_continues_a_sequence(kernel, dtype, tier):
    x, weight, bias = torch.randn(3, 20, 9).to(dtype), torch.randn(20, 4).to(dtype), torch.randn(20).to(dtype)
    whole = kernel.causal_conv1d_fn(x, weight, bias, activation="silu")
    for length in (3, 5):
        state = torch.zeros(3, 20, length, dtype=dtype)
        steps = [
            kernel.causal_conv1d_update(x[:, :, 0], state, weight, bias, "silu")[:, :, None],
            kernel.causal_conv1d_update(x[:, :, 1:4], state, weight, bias, "silu"),
            kernel.causal_conv1d_update(x[:, :, 4:], state, weight, bias, "silu"),
        ]
        assert_same_bits("steps", torch.cat(steps, -1), whole)
        assert_same_bits("state", state, x[:, :, -length:])
    # The same through a circular buffer, into rows of a larger cache.
    cache = torch.zeros(5, 20, 6, dtype=dtype)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    for t in range(9):
        seen = torch.full((3,), t)
        y = kernel.causal_conv1d_update(x[:, :, t], cache, weight, bias, "silu", seen, rows)
        assert_same_bits(f"token {t}", y, whole[:, :, t])
    assert_same_bits("unused rows", cache[[1, 3]], torch.zeros(2, 20, 6, dtype=dtype))


def test_update_after_any_number_of_tokens(kernel, tier):
    """A circular buffer knows the count of tokens by its remainder alone, up to the largest int64."""
    x, weight, cache = torch.randn(1, 5, 3), torch.randn(5, 4), torch.randn(1, 5, 4)
    results = []
    for seen in (2**63 - 1, (2**63 - 1) % 4):
        state = cache.clone()
        y = kernel.causal_conv1d_update(x, state, weight, None, None, torch.tensor([seen]))
        results.append((y, state))
    assert_same_bits("outputs", results[0][0], results[1][0])
    assert_same_bits("state", results[0][1], results[1][1])


def test_mixed_dtypes(kernel):
    """bf16 tokens with float32 parameters, as under autocast."""
    x, weight, bias = torch.randn(1, 8, 10).bfloat16(), torch.randn(8, 4), torch.randn(8)
    weight.requires_grad_()
    y = kernel.causal_conv1d_fn(x, weight, bias, activation="silu")
    assert y.dtype == torch.bfloat16
    truth = kernel.causal_conv1d_fn(x.double(), weight.double(), bias.double(), activation="silu")
    torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=2**-8)
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_batch_rows_and_padding_between(kernel):
    """Labels of several rows: each row apart, negative labels in any row are padding."""
    x = torch.randn(2, 8, 6, requires_grad=True)
    weight = torch.randn(8, 4)
    labels = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]])
    y, final = kernel.causal_conv1d_fn(x, weight, seq_idx=labels, return_final_states=True)
    assert final.shape == (3, 8, 3)
    for n, (row, bos, eos) in enumerate([(0, 0, 2), (0, 2, 4), (1, 0, 6)]):
        alone, state = kernel.causal_conv1d_fn(x[row : row + 1, :, bos:eos], weight, return_final_states=True)
        assert_same_bits("tokens", y[row : row + 1, :, bos:eos], alone)
        assert_same_bits("state", final[n : n + 1], state)
    assert bool((y[0, :, 4:] == 0).all())
    (dx,) = torch.autograd.grad(y.sum() + final.sum(), x)
    assert bool((dx[0, :, 4:] == 0).all())


def test_c02_layouts_agree(kernel):
    for channels, tokens in ((8, 10), (10, 10)):
        x = torch.randn(1, tokens, channels).transpose(1, 2)
        weight, bias = torch.randn(channels, 4), torch.randn(channels)
        labels = torch.tensor([[0] * 6 + [1] * 4], dtype=torch.int32)
        last = kernel.causal_conv1d_fn(x, weight, bias, seq_idx=labels, activation="silu")
        contiguous = kernel.causal_conv1d_fn(x.contiguous(), weight, bias, seq_idx=labels, activation="silu")
        assert_same_bits("layouts", last, contiguous)
        for bos, eos in ((0, 6), (6, 10)):
            alone = kernel.causal_conv1d_fn(x[:, :, bos:eos], weight, bias, activation="silu")
            assert_same_bits("alone", last[:, :, bos:eos], alone)


def test_c06_empty_segments(kernel):
    x, weight = torch.randn(1, 6, 8), torch.randn(6, 4)
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        states = torch.randn(len(offsets) - 1, 6, 3)
        y, final = kernel.causal_conv1d_fn(
            x, weight, initial_states=states, cu_seqlens=offsets, return_final_states=True
        )
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        expected = kernel.causal_conv1d_fn(x, weight, initial_states=states[full], cu_seqlens=plain)
        assert_same_bits("tokens", y, expected)
        for n in range(len(offsets) - 1):
            if n not in full:
                assert_same_bits("empty segment keeps its state", final[n], states[n])
        assert not final.isnan().any()


def test_c11_boundary_dtypes(kernel):
    x, weight = torch.randn(1, 6, 7), torch.randn(6, 4)
    expected = kernel.causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    assert_same_bits("int64", kernel.causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor([0, 3, 7])), expected)
    assert_same_bits("list", kernel.causal_conv1d_fn(x, weight, cu_seqlens=[0, 3, 7]), expected)
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert_same_bits("labels", kernel.causal_conv1d_fn(x, weight, seq_idx=labels), expected)


def test_c18_short_segments(kernel):
    """Final- and initial-state gradients of segments shorter than W - 1."""
    op = op_under_test(Case("short", channels=8))
    for pack in (Pack("1", (1,)), Pack("2", (2,)), Pack("1 2 5", (1, 2, 5))):
        properties.check_against_reference(op, pack, torch.float32)


def test_c44_labels_and_states_together(kernel):
    x, weight = torch.randn(1, 8, 6), torch.randn(8, 4)
    states = torch.randn(3, 8, 3, requires_grad=True)
    labels = torch.tensor([[0, 1, 2, 2, 2, 2]])
    y, final = kernel.causal_conv1d_fn(
        x, weight, seq_idx=labels, initial_states=states, return_final_states=True
    )
    assert final.shape == (3, 8, 3)
    for n, (bos, eos) in enumerate([(0, 1), (1, 2), (2, 6)]):
        alone, last = kernel.causal_conv1d_fn(
            x[:, :, bos:eos], weight, initial_states=states[n : n + 1], return_final_states=True
        )
        assert_same_bits("tokens", y[:, :, bos:eos], alone)
        assert_same_bits("state", final[n : n + 1], last)
    (gradient,) = torch.autograd.grad(y.sum() + final.sum(), states)
    assert gradient.abs().sum() > 0


def test_c55_arguments_are_named(kernel):
    names = inspect.signature(kernel.causal_conv1d_fn).parameters
    assert {"seq_idx", "cu_seqlens", "position_ids"} <= set(names)
    assert not any(p.kind is p.VAR_KEYWORD for p in names.values())
    x, weight, bias = torch.randn(1, 8, 6), torch.randn(8, 4), torch.randn(8)
    assert isinstance(kernel.causal_conv1d_fn(x, weight, bias, seq_idx=None, cu_seqlens=None), torch.Tensor)
    with pytest.raises(TypeError, match="seq_idx must be a tensor or None, got 'silu'"):
        kernel.causal_conv1d_fn(x, weight, bias, "silu")


def test_c22_offsets_beyond_32_bits(kernel):
    """Eight channels inside a buffer of 54,000 tokens x 40,000 columns (4.3 GB, untouched but for the view)."""
    buffer = torch.empty(54_000, 40_000, dtype=torch.bfloat16)
    view = buffer[:, 39_990:39_998]
    view.copy_(torch.randn(54_000, 8))
    x = view.t()[None]
    weight = torch.randn(8, 4)
    strided = kernel.causal_conv1d_fn(x, weight, cu_seqlens=[0, 100, 54_000])
    assert_same_bits("strided", strided, kernel.causal_conv1d_fn(x.contiguous(), weight, cu_seqlens=[0, 100, 54_000]))


def test_empty_inputs(kernel):
    x, weight = torch.randn(1, 6, 0, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    y, final = kernel.causal_conv1d_fn(x, weight, cu_seqlens=[0], return_final_states=True)
    assert y.shape == (1, 6, 0) and final.shape == (0, 6, 3)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == x.shape and bool((dweight == 0).all())


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(x=torch.randn(6, 8)), ValueError, r"x must have 3 dimensions, got shape \(6, 8\)"),
        (dict(x=torch.ones(1, 6, 8, dtype=torch.int32)), TypeError, "x must have one of the dtypes .*, got int32"),
        (dict(weight=torch.randn(5, 4)), ValueError, r"weight must have shape \[D, W\] with D = 6, got \(5, 4\)"),
        (dict(weight=torch.randn(6, 9)), ValueError, "weight must have a width of 2 to 8, got 9"),
        (dict(bias=torch.randn(5)), ValueError, r"bias must have shape \[D\] = \(6,\), got \(5,\)"),
        (dict(activation="gelu"), ValueError, "activation must be None, 'silu' or 'swish', got 'gelu'"),
        (dict(weight=torch.randn(6, 4, device="meta")), ValueError, "weight must be on cpu"),
        (dict(initial_states=torch.randn(2, 6, 3)), ValueError, r"initial_states must have shape \[N, D, W - 1\]"),
        (dict(cu_seqlens=[0, 3, 9]), ValueError, r"cu_seqlens must end at the number of tokens \(8\) or before, got 9"),
        (dict(cu_seqlens=[2, 8]), ValueError, "cu_seqlens must start at 0, got 2"),
        (dict(cu_seqlens=[0, 6, 4, 8]), ValueError, "cu_seqlens must never decrease, got 4 after 6 at index 2"),
        (dict(cu_seqlens=[0, -1, 8]), ValueError, "cu_seqlens must never decrease, got -1 after 0 at index 1"),
        (dict(cu_seqlens=torch.tensor([0.0, 8.0])), TypeError, "cu_seqlens must be an int32 or int64 tensor"),
        (dict(seq_idx=torch.zeros(1, 8)), TypeError, "seq_idx must be an int32 or int64 tensor, got float32"),
        (dict(seq_idx=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])), ValueError, "seq_idx must hold labels that never"),
        (dict(position_ids=torch.arange(7)), ValueError, r"position_ids must have shape \[8\]"),
        (dict(unknown=1), TypeError, "unexpected keyword argument 'unknown'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rejects(kernel, change, error, text):
    arguments = dict(x=torch.randn(1, 6, 8), weight=torch.randn(6, 4))
    arguments.update(change)
    with pytest.raises(error, match=text):
        kernel.causal_conv1d_fn(**arguments)


def test_update_rejects(kernel):
    x, state, weight = torch.randn(2, 6), torch.zeros(2, 6, 3), torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"conv_state must have shape \[2, 6, at least 3\], got \(2, 6, 2\)"):
        kernel.causal_conv1d_update(x, state[:, :, :2], weight)
    different = "conv_state_indices must name different rows of conv_state, or -1 for padding"
    with pytest.raises(RuntimeError, match=f"{different}, got 7"):
        kernel.causal_conv1d_update(x, state, weight, conv_state_indices=torch.tensor([0, 7]))
    with pytest.raises(TypeError, match="conv_state must have one of the dtypes float32, got bfloat16"):
        kernel.causal_conv1d_update(x, state.bfloat16(), weight)


def test_direct_op_calls_check_what_memory_safety_needs(kernel):
    fwd = kernel._ops.ops.causal_conv1d_fwd
    x, weight = torch.randn(1, 8, 6), torch.randn(6, 4)
    for offsets in ([0, 9], [1, 8], [0, 5, 3, 8], [-1, 8]):
        with pytest.raises(RuntimeError, match="cu_seqlens must"):
            fwd(x, weight, None, torch.tensor(offsets, dtype=torch.int32), None, False, True, False)
    two_rows = torch.randn(2, 4, 6)
    with pytest.raises(RuntimeError, match="cu_seqlens must end a sequence where a row ends"):
        fwd(two_rows, weight, None, torch.tensor([0, 8], dtype=torch.int32), None, False, True, False)


def test_gradients_of_expanded_cotangents(kernel):
    """The gradient of a plain sum arrives with stride 0."""
    x, weight = torch.randn(1, 6, 8, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    inputs = {"x": x, "weight": weight}
    weights = {"y": torch.ones(1, 6, 8, dtype=torch.float64)}
    dense = run_with_gradients(lambda leaves: {"y": kernel.causal_conv1d_fn(**leaves)}, inputs, weights)
    (dx, dweight) = torch.autograd.grad(kernel.causal_conv1d_fn(**inputs).sum(), (x, weight))
    assert_same_bits("dx", dx, dense["dx"])
    assert_same_bits("dweight", dweight, dense["dweight"])
