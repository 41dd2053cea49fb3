"""mamba1_scan: against its reference and transformers, packed against alone.

The faults of other packages are in test_mamba1_scan_cases.py, mamba_inner_fn in test_mamba1_inner.py.
"""


import pytest
import torch

from tests.harness import properties
from tests.harness.ops.mamba1_scan import CASES, EDGE, Case, op_under_test
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, dtype, tier):
    packs = catalogue(EDGE)
    # Every packing for the first two cases; then one that crosses a block's edge and one with empty sequences.
    for pack in packs if case in CASES[:2] else [packs[3], Pack("an edge", (3, EDGE + 1), padding=1)]:
        properties.check_against_reference(op_under_test(case), pack, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_packing_properties(dtype, tier):
    small = Case("small", channels=5, states=5)
    for pack in catalogue(EDGE):
        properties.check_all_properties(op_under_test(small), pack, dtype)
    for case in (CASES[1], CASES[8], CASES[3]):
        properties.check_all_properties(op_under_test(case), Pack("an edge", (3, EDGE + 1, 0), padding=2), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_forms(dtype):
    for case in CASES[:2]:
        properties.check_memory_forms(op_under_test(case), Pack("ragged", (5, 9, 17, 3)), dtype)


def test_gradcheck_on_the_real_backward(kernel):
    for case in (*CASES[:4], CASES[6]):
        op = op_under_test(case)
        inputs = op.make(SMALL, torch.float64)
        names = list(inputs)

        def call(*values, op=op, names=names):
            return tuple(op.run(dict(zip(names, values)), cu_seqlens=SMALL.cu_seqlens).values())

        values = [value.requires_grad_() for value in inputs.values()]
        assert torch.autograd.gradcheck(call, values, fast_mode=True)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("channels_last", [True, False])
def test_opcheck(kernel, channels_last):
    ops = kernel._ops.ops
    tokens, channels, states = SMALL.tokens, 6, 4

    def random(*shape):
        return torch.randn(shape, requires_grad=True)

    u, delta, z = (random(1, channels, tokens) for _ in range(3))
    per_token, fixed, vector = random(1, 1, states, tokens), random(channels, states), random(channels)
    state = random(3, channels, states)
    full = (u, delta, fixed, per_token, per_token, vector, z, vector, SMALL.cu_seqlens, state, True, channels_last)
    bare = (u, delta, fixed, fixed, per_token, None, None, None, SMALL.cu_seqlens, None, False, channels_last)
    torch.library.opcheck(ops.mamba1_scan_fwd.default, (*full, True))
    torch.library.opcheck(ops.mamba1_scan_fwd.default, (*bare, False))
    dy = torch.randn((1, tokens, channels) if channels_last else (1, channels, tokens))
    for arguments, dstate in ((full, state.detach()), (bare, None)):
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.library.opcheck(ops.mamba1_scan_bwd.default, (dy, dstate, *detached))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_carries_over(kernel, dtype, tier):
    """Split anywhere = whole, to the bit."""
    inputs = op_under_test(CASES[0]).make(Pack("whole", (EDGE + 9,)), dtype)
    along = {"u": 2, "delta": 2, "z": 2, "B": 3, "C": 3}

    def scan(begin, end, states):
        part = {
            name: value.narrow(along[name], begin, end - begin) if name in along else value
            for name, value in inputs.items()
            if name != "initial_states"
        }
        return kernel.selective_scan_fn(**part, delta_softplus=True, return_last_state=True, initial_states=states)

    start = inputs["initial_states"].float()
    whole, last = scan(0, EDGE + 9, start)
    assert last.dtype == torch.float32
    for cut in (0, 1, 7, EDGE - 1, EDGE, EDGE + 8, EDGE + 9):
        first, state = scan(0, cut, start)
        second, final = scan(cut, EDGE + 9, state)
        assert_same_bits(f"cut at {cut}", torch.cat([first, second], -1), whole)
        assert_same_bits(f"state, cut at {cut}", final, last)


def test_batch_rows_and_padding_between(kernel):
    """Without boundaries each row is a sequence; labels cut rows, negative labels in any row are padding."""
    op = op_under_test(CASES[0])
    rows = [op.make(Pack("row", (6,)), torch.float32) for _ in range(2)]
    shared = {name: rows[0][name] for name in ("A", "D", "delta_bias")}
    batch = {name: torch.cat([row[name] for row in rows]) for name in ("u", "delta", "B", "C", "z")}
    y, last = kernel.selective_scan_fn(**batch, **shared, return_last_state=True)
    labels = torch.tensor([[0, 0, 1, 1, -1, -1], [0] * 6])
    u = batch["u"].clone().requires_grad_()
    cut, states = kernel.selective_scan_fn(**{**batch, "u": u}, **shared, return_last_state=True, seq_idx=labels)
    assert states.shape == (3, 19, 5)
    for n, (row, bos, eos) in enumerate([(0, 0, 2), (0, 2, 4), (1, 0, 6)]):
        part = {name: value[row : row + 1, ..., bos:eos] for name, value in batch.items()}
        alone, state = kernel.selective_scan_fn(**part, **shared, return_last_state=True)
        assert_same_bits("tokens", cut[row : row + 1, :, bos:eos], alone)
        assert_same_bits("state", states[n : n + 1], state)
    assert_same_bits("second row", y[1:], cut[1:])
    assert_same_bits("second row's state", last[1:], states[2:])
    assert bool((cut[0, :, 4:] == 0).all())
    (du,) = torch.autograd.grad(cut.sum() + states.sum(), u)
    assert bool((du[0, :, 4:] == 0).all())


def test_forms_of_b_and_c(kernel):
    """[B, N, T], one group, and one group of the one for all groups of the other."""
    inputs = op_under_test(Case("plain", channels=6, initial=False)).make(SMALL, torch.float32)
    y = kernel.selective_scan_fn(**inputs)
    three = {**inputs, "B": inputs["B"][:, 0], "C": inputs["C"][:, 0].transpose(1, 2).contiguous().transpose(1, 2)}
    assert_same_bits("three axes", kernel.selective_scan_fn(**three), y)
    wide = {**inputs, "C": inputs["C"].expand(1, 3, -1, -1)}
    torch.testing.assert_close(kernel.selective_scan_fn(**wide), y)
    fixed = {**inputs, "B": inputs["B"][:, 0, :, :1].transpose(1, 2).expand(1, 6, 5)[0]}
    same = {**inputs, "B": inputs["B"][..., :1].expand(-1, -1, -1, SMALL.tokens)}
    torch.testing.assert_close(kernel.selective_scan_fn(**fixed), kernel.selective_scan_fn(**same))


def stock_scan(inputs, softplus=True):
    """The same by transformers' own function, which knows no boundaries."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    values = [inputs[name][:, 0] if name in "BC" else inputs[name] for name in names]
    return mamba_selective_scan(*values, delta_softplus=softplus, return_last_state=True)


def test_agrees_with_transformers(kernel):
    inputs = op_under_test(Case("model", states=16, initial=False)).make(Pack("one", (40,)), torch.float32)
    y, last = kernel.selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)
    stock_y, stock_last = stock_scan(inputs)
    torch.testing.assert_close(y, stock_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, stock_last, rtol=1e-5, atol=1e-5)


def test_steps_that_overflow_the_decay(kernel, tier):
    """exp(delta A) that is 0 cuts the past off; nothing becomes NaN."""
    inputs = op_under_test(Case("large", initial=False)).make(Pack("one", (EDGE + 3,)), torch.float32)
    inputs["delta"] = inputs["delta"] * 1e4
    results = run_with_gradients(lambda leaves: {"y": kernel.selective_scan_fn(**leaves, delta_softplus=True)}, inputs)
    for name, value in results.items():
        assert bool(torch.isfinite(value).all()), name


def test_gradients_of_expanded_cotangents(kernel):
    """The gradient of a plain sum arrives with stride 0."""
    inputs = op_under_test(Case("sum", initial=False)).make(SMALL, torch.float32)
    weights = {"y": torch.ones(1, 19, SMALL.tokens, dtype=torch.float64)}
    dense = run_with_gradients(lambda leaves: {"y": kernel.selective_scan_fn(**leaves)}, inputs, weights)
    leaves = {name: value.clone(memory_format=torch.preserve_format).requires_grad_() for name, value in inputs.items()}
    gradients = torch.autograd.grad(kernel.selective_scan_fn(**leaves).sum(), list(leaves.values()))
    for name, gradient in zip(leaves, gradients):
        assert_same_bits(f"d{name}", gradient, dense[f"d{name}"])


def test_long_sequence_in_bounded_memory(kernel):
    """The states of all tokens, [T, D, N], would be 268 MB here; inputs, outputs and gradients are 50."""
    tokens, channels, states = 16_384, 128, 32

    def megabytes(key):
        for line in open("/proc/self/status"):
            if line.startswith(key):
                return int(line.split()[1]) / 1024

    u = torch.randn(1, channels, tokens, requires_grad=True)
    delta = torch.rand(1, channels, tokens, requires_grad=True)
    A = -torch.rand(channels, states)
    B, C = (torch.randn(1, states, tokens, requires_grad=True) for _ in range(2))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here
    before = megabytes("VmRSS")
    y = kernel.selective_scan_fn(u, delta, A.requires_grad_(), B, C, cu_seqlens=[0, 9_000, tokens])
    torch.autograd.grad(y, (u, delta, A, B, C), torch.ones_like(y))
    assert megabytes("VmHWM") - before < 100


def arguments(**changes):
    given = {
        "u": torch.randn(1, 6, 8),
        "delta": torch.randn(1, 6, 8),
        "A": torch.randn(6, 4),
        "B": torch.randn(1, 4, 8),
        "C": torch.randn(1, 4, 8),
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(u=torch.randn(6, 8)), ValueError, r"u must have 3 dimensions, got shape \(6, 8\)"),
        (dict(u=torch.ones(1, 6, 8, dtype=torch.int32)), TypeError, "u must have one of the dtypes .*, got int32"),
        (dict(delta=torch.randn(1, 6, 7)), ValueError, r"delta must have shape \[B, D, T\] = \(1, 6, 8\), got"),
        (dict(A=torch.randn(5, 4)), ValueError, r"A must have shape \[D, N\] = \(6, 4\), got \(5, 4\)"),
        (dict(A=torch.randn(6, 4, dtype=torch.complex64)), TypeError, "A must have one of the dtypes .*complex64"),
        (dict(A=torch.randn(6, 0)), ValueError, r"A must have at least one state, got \(6, 0\)"),
        (dict(B=torch.randn(4)), ValueError, r"B must have shape \[D, N\], \[B, N, T\] or \[B, G, N, T\], got \(4,\)"),
        (dict(B=torch.randn(4, 6)), ValueError, r"B must have shape \[D, N\] = \(6, 4\), got \(4, 6\)"),
        (dict(C=torch.randn(1, 8, 4)), ValueError, r"C must have shape \[B, N, T\] = \(1, 4, 8\), got \(1, 8, 4\)"),
        (dict(C=torch.randn(1, 4, 4, 8)), ValueError, "C must have a number of groups that divides the 6 channels"),
        (
            dict(B=torch.randn(1, 2, 4, 8), C=torch.randn(1, 3, 4, 8)),
            ValueError,
            r"C must have as many groups as B \(2\), got 3",
        ),
        (dict(D=torch.randn(5)), ValueError, r"D must have shape \[D\] = \(6,\), got \(5,\)"),
        (dict(z=torch.randn(1, 6, 8, device="meta")), ValueError, "z must be on cpu"),
        (dict(delta_bias=torch.randn(6, 1)), ValueError, r"delta_bias must have shape \[D\] = \(6,\)"),
        (dict(initial_states=torch.randn(2, 6, 4)), ValueError, r"initial_states must have shape \[S, D, N\]"),
        (dict(use_mambapy=True), TypeError, "unexpected keyword argument 'use_mambapy'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rejects(kernel, change, error, text):
    with pytest.raises(error, match=text):
        kernel.selective_scan_fn(**arguments(**change))


def test_direct_op_calls_check_what_memory_safety_needs(kernel):
    fwd = kernel._ops.ops.mamba1_scan_fwd
    given = arguments()
    u, delta, A = given["u"], given["delta"], given["A"]
    B = C = given["B"][:, None]

    def call(u=u, delta=delta, A=A, B=B, C=C, D=None, z=None, offsets=(0, 8), states=None):
        offsets = torch.tensor(offsets, dtype=torch.int32)
        return fwd(u, delta, A, B, C, D, z, None, offsets, states, False, False, False)

    for offsets in ([0, 9], [1, 8], [0, 5, 3, 8], [-1, 8]):
        with pytest.raises(RuntimeError, match="cu_seqlens must"):
            call(offsets=offsets)
    for change, text in (
        (dict(delta=delta[:, :, :7]), "delta must have the shape and device of u"),
        (dict(A=A[:5]), "A must have shape"),
        (dict(B=B[..., :7]), "B must have shape"),
        (dict(C=A[:5]), "C must have shape"),
        (dict(D=torch.ones(5)), "D and delta_bias must have shape"),
        (dict(z=u.double()), "z must be float64 where u is, and only there"),
        (dict(states=torch.zeros(2, 6, 4)), "initial_states must have shape"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call(**change)
    two_rows = torch.randn(2, 6, 4)
    coefficients = torch.randn(2, 1, 4, 4)
    with pytest.raises(RuntimeError, match="cu_seqlens must end a sequence where a row ends"):
        call(u=two_rows, delta=two_rows, B=coefficients, C=coefficients)
