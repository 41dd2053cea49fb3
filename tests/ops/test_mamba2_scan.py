"""Mamba-2's scan: against its reference, packed against alone, and the faults other packages had."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from tests.harness import properties
from tests.harness.ops.mamba2_scan import CASES, Case, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EDGE = 64
# The packings of the catalogue with fewer than 150 tokens in all: the reference takes a step of Python for each.
SHORT = [pack for pack in catalogue(EDGE) if pack.tokens < 150]
LONG = [pack for pack in catalogue(EDGE) if pack.tokens >= 150]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, tier):
    for pack in SHORT:
        properties.check_against_reference(op_under_test(case), pack, torch.float32)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference_by_dtype(case, dtype, tier):
    for pack in [*LONG, SHORT[2]]:
        properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_properties(case, dtype, tier):
    for pack in catalogue(EDGE):
        properties.check_all_properties(op_under_test(case), pack, dtype)


def test_packing_properties_in_double():
    properties.check_all_properties(op_under_test(CASES[3]), Pack("ragged", (5, 67, 1, 3)), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    properties.check_memory_forms(op_under_test(CASES[0]), Pack("ragged", (5, 9, 67, 3)), dtype)


def test_gradcheck_on_the_real_backward(kernel):
    small = [
        (Case("all", heads=2, groups=1, head_dim=2, state_dim=3), SMALL),
        (Case("two units", heads=5, groups=1, head_dim=1, state_dim=2, skip="channel", gate=False), SMALL),
        (Case("two chunks", heads=1, groups=1, head_dim=1, state_dim=2, skip=None, softplus=False), Pack("", (66, 1))),
        (Case("clamped", heads=2, groups=2, head_dim=1, state_dim=1, limit=(0.3, 0.9)), SMALL),
    ]
    for case, pack in small:
        op = op_under_test(case)
        inputs = op.make(pack, torch.float64)
        names = list(inputs)

        def call(*values, op=op, names=names, pack=pack):
            return tuple(op.run(dict(zip(names, values)), cu_seqlens=pack.cu_seqlens).values())

        assert torch.autograd.gradcheck(call, [value.requires_grad_() for value in inputs.values()])


@pytest.mark.kernels_ci
def test_opcheck(kernel):
    ops = kernel._ops.ops

    def leaf(*shape):
        return torch.randn(*shape, requires_grad=True)

    x, dt, A, B, C = leaf(10, 4, 3), leaf(10, 4), leaf(4), leaf(10, 2, 5), leaf(10, 2, 5)
    D, z, bias, state = leaf(4, 3), leaf(10, 4, 3), leaf(4), leaf(3, 4, 3, 5)
    options = (True, 0.0, math.inf)
    torch.library.opcheck(
        ops.mamba2_scan_fwd.default, (x, dt, A, B, C, D, z, bias, SMALL.cu_seqlens, state, *options, True)
    )
    torch.library.opcheck(
        ops.mamba2_scan_fwd.default, (x, dt, A, B, C, None, None, None, SMALL.cu_seqlens, None, *options, False)
    )
    tensors = [tensor.detach() for tensor in (x, state, x, dt, A, B, C, D, z, bias)]
    torch.library.opcheck(
        ops.mamba2_scan_bwd.default, (*tensors, SMALL.cu_seqlens, state.detach(), *options)
    )
    rows = [torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.randn(4, 3, 5)]
    groups = [torch.randn(2, 2, 5), torch.randn(2, 2, 5), torch.randn(4, 3), torch.randn(2, 4, 3), torch.randn(4, 3)]
    torch.library.opcheck(ops.selective_state_update.default, (*rows, *groups, True))
    torch.library.opcheck(ops.selective_state_update.default, (*rows, *groups, True, torch.tensor([1, -1])))


# ---- states ------------------------------------------------------------------------------------------------------


def between(inputs, begin, end):
    along = {name: inputs[name][:, begin:end] for name in ("x", "dt", "B", "C", "z") if name in inputs}
    return {**inputs, **along}


def test_state_carries_over(kernel):
    """Split anywhere = whole: to rounding, and at a chunk's edge to the bit, gradients included."""
    case = Case("carry", heads=2, groups=1)
    op = op_under_test(case)
    inputs = op.make(Pack("whole", (150,)), torch.float32)
    whole = run_with_gradients(lambda leaves: op.run(leaves), inputs)
    weights = properties.cotangents({name: whole[name] for name in ("y", "final_states")})
    for cut in (0, 1, 63, 64, 65, 100, 128, 149, 150):

        def in_two(leaves, cut=cut):
            first = op.run(between(leaves, 0, cut))
            rest = {**between(leaves, cut, 150), "initial_states": first["final_states"]}
            second = op.run(rest)
            return {"y": torch.cat([first["y"], second["y"]], 1), "final_states": second["final_states"]}

        split = run_with_gradients(in_two, inputs, weights)
        for name, value in split.items():
            if cut % 64 == 0 and op.kind(name) != "parameter":
                assert_same_bits(f"{name}, cut at {cut}", value, whole[name])
            else:
                torch.testing.assert_close(value, whole[name], rtol=2e-5, atol=2e-5, msg=f"{name}, cut at {cut}")


def test_long_sequence_is_recomputed_in_segments(kernel):
    """States of 512 KB and 17 chunks pass the 8 MB that a segment keeps, so the backward pass recomputes twice."""
    case = Case("long", heads=1, groups=1, head_dim=256, state_dim=512, gate=False)
    op = op_under_test(case)
    inputs = op.make(Pack("whole", (1088,)), torch.float32)
    whole = run_with_gradients(lambda leaves: op.run(leaves), inputs)
    weights = properties.cotangents({name: whole[name] for name in ("y", "final_states")})

    def in_two(leaves):
        first = op.run(between(leaves, 0, 512))
        second = op.run({**between(leaves, 512, 1088), "initial_states": first["final_states"]})
        return {"y": torch.cat([first["y"], second["y"]], 1), "final_states": second["final_states"]}

    for name, value in run_with_gradients(in_two, inputs, weights).items():
        if op.kind(name) != "parameter":
            assert_same_bits(name, value, whole[name])


# ---- faults that other packages had --------------------------------------------------------------------------------


def test_c04_labels_change_inside_a_chunk_and_at_its_edge(kernel):
    op = op_under_test(Case("c04", heads=4, groups=1, head_dim=8, state_dim=16))
    pack = Pack("5 11 8", (5, 11, 8))
    properties.check_against_reference(op, pack, torch.float32)
    properties.check_packed_equals_alone(op, pack, torch.float32)
    properties.check_isolation(op, pack, torch.float32)
    properties.check_spellings(op, pack, torch.float32)


def test_c06_empty_segments(kernel):
    op = op_under_test(Case("c06"))
    inputs = op.make(Pack("eight", (8,)), torch.float32)
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        states = torch.randn(len(offsets) - 1, 4, 8, 16)
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        result = op.run({**inputs, "initial_states": states}, cu_seqlens=offsets)
        expected = op.run({**inputs, "initial_states": states[full]}, cu_seqlens=plain)
        assert_same_bits("tokens", result["y"], expected["y"])
        assert_same_bits("states", result["final_states"][full], expected["final_states"])
        for n in set(range(len(offsets) - 1)) - set(full):
            assert_same_bits("empty segment keeps its state", result["final_states"][n], states[n])
        assert not result["final_states"].isnan().any()


def test_c20_lengths_that_are_no_multiple_of_chunk_size(kernel):
    case = Case("c20", heads=2, groups=1)
    for tokens in (13, 5):
        inputs = op_under_test(case).make(Pack("one", (tokens,)), torch.float32)
        results = []
        for chunk_size in (4, 8, 16):

            def call(leaves, chunk_size=chunk_size):
                return {"y": kernel.mamba_chunk_scan_combined(**leaves, chunk_size=chunk_size, dt_softplus=True)}

            results.append(run_with_gradients(call, inputs))
        for name, value in results[0].items():
            assert value.isfinite().all()
            for other in results[1:]:
                assert_same_bits(name, other[name], value)


def test_c22_offsets_beyond_32_bits(kernel):
    """x is 64 columns of a buffer of 65,600 tokens x 32,784 columns (4.3 GB, untouched but for the view)."""
    buffer = torch.empty(1, 65_600, 32_784, dtype=torch.bfloat16)
    view = buffer[:, :, :64]
    view.copy_(torch.randn(1, 65_600, 64))
    B, C = (torch.randn(1, 65_600, 1, 16).bfloat16() for _ in range(2))
    dt = torch.rand(1, 65_600, 1)
    A = -torch.rand(1)
    results = []
    for x in (view, view.contiguous()):
        x = x.unsqueeze(2).detach().requires_grad_()
        y = kernel.mamba_chunk_scan_combined(x, dt, A, B, C, 256)
        (dx,) = torch.autograd.grad(y, x, y.detach())
        results.append((y.detach(), dx.contiguous()))
    assert_same_bits("y", results[0][0], results[1][0])
    assert_same_bits("dx", results[0][1], results[1][1])
    assert bool((results[0][0][:, -64:] != 0).any())


def test_c33_groups_equal_repeated_heads(kernel):
    op = op_under_test(Case("c33", heads=4, groups=2))
    pack = Pack("4 6", (4, 6))
    inputs = op.make(pack, torch.float32)
    repeated = {**inputs, **{name: inputs[name].repeat_interleave(2, 2) for name in ("B", "C")}}
    for name, value in op.run(inputs, cu_seqlens=pack.cu_seqlens).items():
        expected = op.run(repeated, cu_seqlens=pack.cu_seqlens)[name]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_c55_arguments_are_named(kernel):
    for function in (kernel.mamba_chunk_scan_combined, kernel.mamba_split_conv1d_scan_combined):
        names = inspect.signature(function).parameters
        assert {"seq_idx", "cu_seqlens", "position_ids"} <= set(names)
        assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    inputs = op_under_test(CASES[1]).make(SMALL, torch.float32)
    none = dict(seq_idx=None, cu_seqlens=None, position_ids=None)
    assert isinstance(kernel.mamba_chunk_scan_combined(**inputs, chunk_size=8, **none), torch.Tensor)
    with pytest.raises(TypeError, match="seq_idx must be a tensor or None, got 'silu'"):
        kernel.mamba_chunk_scan_combined(**inputs, chunk_size=8, seq_idx="silu")


# ---- returns, batches, dtypes, errors ------------------------------------------------------------------------------


def test_return_values(kernel):
    inputs = op_under_test(CASES[0]).make(SMALL, torch.float32)
    options = dict(chunk_size=8, cu_seqlens=SMALL.cu_seqlens)
    both = kernel.mamba_chunk_scan_combined(
        **inputs, **options, return_final_states=True, return_varlen_states=True
    )
    y, final, varlen = both
    assert_same_bits("states", final, varlen)
    assert_same_bits("y", kernel.mamba_chunk_scan_combined(**inputs, **options), y)
    _, only = kernel.mamba_chunk_scan_combined(**inputs, **options, return_varlen_states=True)
    assert_same_bits("states", only, final)


def test_batch_rows_and_padding_between(kernel):
    """Labels of several rows: each row apart, negative labels in any row are padding."""
    case = Case("rows", gate=False, initial=False)
    op = op_under_test(case)
    inputs = op.make(Pack("", (12,)), torch.float32)
    rows = {name: inputs[name].reshape(2, 6, *inputs[name].shape[2:]) for name in ("x", "dt", "B", "C")}
    rows = {**inputs, **rows}
    x = rows["x"].requires_grad_()
    labels = torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]])
    result = op.run(rows, seq_idx=labels)
    assert result["final_states"].shape[0] == 3
    for n, (row, bos, eos) in enumerate([(0, 0, 2), (0, 2, 4), (1, 0, 6)]):
        own = {name: rows[name][row : row + 1, bos:eos] for name in ("x", "dt", "B", "C")}
        alone = op.run({**rows, **own})
        assert_same_bits("tokens", result["y"][row : row + 1, bos:eos], alone["y"])
        assert_same_bits("state", result["final_states"][n : n + 1], alone["final_states"])
    assert bool((result["y"][0, 4:] == 0).all())
    (dx,) = torch.autograd.grad(result["y"].sum() + result["final_states"].sum(), x)
    assert bool((dx[0, 4:] == 0).all())


def test_mixed_dtypes(kernel):
    """bf16 tokens with float32 parameters, as under autocast."""
    inputs = op_under_test(CASES[0]).make(SMALL, torch.float32)
    narrow = {name: value.bfloat16() if name in ("x", "B", "C", "z", "dt") else value for name, value in inputs.items()}
    wide = {name: value.double() for name, value in narrow.items()}
    op = op_under_test(CASES[0])
    ours = run_with_gradients(lambda leaves: op.run(leaves, cu_seqlens=SMALL.cu_seqlens), narrow)
    truth = run_with_gradients(lambda leaves: op.run(leaves, cu_seqlens=SMALL.cu_seqlens), wide)
    assert ours["y"].dtype == torch.bfloat16 and ours["final_states"].dtype == torch.float32
    for name, value in ours.items():
        if name.startswith("d") and name != "dt":
            assert value.dtype == narrow[name[1:]].dtype
        scale = float(truth[name].abs().max())
        torch.testing.assert_close(value.double(), truth[name], rtol=2**-6, atol=2**-7 * scale)


def test_softplus_over_its_whole_range(kernel, tier):
    """A scan of one token with B = C = x = 1 and A = 0 gives the step itself."""
    dt = torch.linspace(-80, 40, 2401)
    one = torch.ones(1, 2401, 1, 1)
    cu_seqlens = torch.arange(2402, dtype=torch.int32)
    y = kernel.mamba_chunk_scan_combined(
        one, dt[None, :, None], torch.zeros(1), one, one, 8, dt_softplus=True, cu_seqlens=cu_seqlens
    )
    torch.testing.assert_close(y.flatten().double(), F.softplus(dt.double()), rtol=1e-6, atol=0)


def test_empty_inputs(kernel):
    inputs = op_under_test(CASES[0]).make(Pack("nothing", ()), torch.float32)
    result = run_with_gradients(
        lambda leaves: op_under_test(CASES[0]).run(leaves, cu_seqlens=[0]), inputs
    )
    assert result["y"].shape == (1, 0, 4, 8) and result["final_states"].shape == (0, 4, 8, 16)
    for name in ("dA", "dD", "ddt_bias"):
        assert bool((result[name] == 0).all())


def test_gradients_of_expanded_cotangents(kernel):
    """The gradient of a plain sum arrives with stride 0."""
    op = op_under_test(CASES[0])
    inputs = op.make(SMALL, torch.float32)
    weights = {"y": torch.ones(1, 10, 4, 8, dtype=torch.float64)}
    only_y = {"y": lambda leaves: op.run(leaves, cu_seqlens=SMALL.cu_seqlens)["y"]}
    dense = run_with_gradients(lambda leaves: {"y": only_y["y"](leaves)}, inputs, weights)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    gradients = torch.autograd.grad(only_y["y"](leaves).sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        assert_same_bits(name, gradient, dense[f"d{name}"])


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(x=torch.randn(10, 4, 8)), ValueError, r"x must have 4 dimensions, got shape \(10, 4, 8\)"),
        (dict(x=torch.ones(1, 10, 4, 8, dtype=torch.int32)), TypeError, "x must have one of the dtypes .*, got int32"),
        (dict(dt=torch.randn(1, 10, 3)), ValueError, r"dt must have shape \[B, T, H\] = \(1, 10, 4\), got "),
        (dict(A=torch.randn(4, 2)), ValueError, r"A must have shape \[H\] = \(4,\), got \(4, 2\)"),
        (dict(A="no"), TypeError, "A must be a tensor, got 'no'"),
        (dict(B=torch.randn(1, 9, 2, 16)), ValueError, r"B must have shape \[B, T, G, S\] with B, T = \(1, 10\)"),
        (dict(B=torch.randn(1, 10, 3, 16)), ValueError, "B must have a number of groups that divides the 4 heads"),
        (dict(B=torch.randn(1, 10, 2, 16).bfloat16()), TypeError, "B must have x's dtype float32, got bfloat16"),
        (dict(C=torch.randn(1, 10, 2, 15)), ValueError, r"C must have shape \[B, T, G, S\] = \(1, 10, 2, 16\)"),
        (dict(D=torch.randn(5)), ValueError, r"D must have shape \[H\] = \(4,\), got \(5,\)"),
        (dict(D=torch.randn(4, 7)), ValueError, r"D must have shape \[H\] or \[H, P\] = \(4, 8\), got \(4, 7\)"),
        (dict(z=torch.randn(1, 10, 4, 7)), ValueError, r"z must have shape \[B, T, H, P\]"),
        (dict(dt_bias=torch.randn(3)), ValueError, r"dt_bias must have shape \[H\] = \(4,\), got \(3,\)"),
        (dict(initial_states=torch.randn(2, 4, 8, 16)), ValueError, r"initial_states must have shape \[N, H, P, S\]"),
        (dict(A=torch.randn(4, device="meta")), ValueError, "A must be on cpu"),
        (dict(chunk_size=0), ValueError, "chunk_size must be at least 1, got 0"),
        (dict(chunk_size=None), TypeError, "chunk_size must be an int, got None"),
        (dict(dt_limit=(2.0, 1.0)), ValueError, r"dt_limit must be \(smallest, largest\), got \(2.0, 1.0\)"),
        (dict(dt_limit=0.5), TypeError, "dt_limit must be a pair of numbers, got 0.5"),
        (dict(cu_seqlens=[0, 3, 11]), ValueError, r"cu_seqlens must end at the number of tokens \(10\) or before"),
        (dict(cu_seqlens=[0, 6, 4, 10]), ValueError, "cu_seqlens must never decrease, got 4 after 6 at index 2"),
        (dict(seq_idx=torch.tensor([[0] * 5 + [1] * 4])), ValueError, r"seq_idx must have shape \[B, T\]"),
    ],
)
def test_rejects(kernel, change, error, text):
    inputs = op_under_test(Case("plain", initial=False)).make(Pack("", (10,)), torch.float32)
    with pytest.raises(error, match="mamba_chunk_scan_combined: " + text):
        kernel.mamba_chunk_scan_combined(**{**inputs, "chunk_size": 8, **change})


def test_ops_check_what_memory_safety_needs(kernel):
    """The compiled ops refuse malformed calls that never pass through the public functions."""
    ops = kernel._ops.ops
    x, dt, A, B = torch.randn(10, 4, 3), torch.randn(10, 4), torch.randn(4), torch.randn(10, 2, 5)

    def forward(cu_seqlens, x=x, dt=dt, B=B, state=None):
        return ops.mamba2_scan_fwd(x, dt, A, B, B, None, None, None, cu_seqlens, state, True, 0.0, 1.0, True)

    good = torch.tensor([0, 10], dtype=torch.int32)
    forward(good)
    for bad in ([0, 11], [1, 10], [0, 7, 5]):
        with pytest.raises(RuntimeError, match="cu_seqlens must"):
            forward(torch.tensor(bad, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="dt must have dtype float32"):
        forward(good, dt=torch.randn(9, 4))
    with pytest.raises(RuntimeError, match="B and C"):
        forward(good, B=torch.randn(9, 2, 5))
    with pytest.raises(RuntimeError, match="initial_state must have shape"):
        forward(good, state=torch.randn(2, 4, 3, 5))
