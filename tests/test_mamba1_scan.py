"""mamba1_scan: against its reference, packed against alone, and the faults other packages had."""

import importlib
import inspect

import pytest
import torch

from tests.harness import properties
from tests.harness.packings import SMALL, Pack, catalogue
from tests.harness.properties import assert_same_bits, run_with_gradients
from tests.ops import mamba1_inner
from tests.ops.mamba1_inner import mixer
from tests.ops.mamba1_scan import CASES, EDGE, Case, op_under_test

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


@pytest.mark.parametrize("spelling", ["cu_seqlens", "seq_idx", "position_ids"])
def test_compiles_to_one_graph(kernel, spelling):
    op = op_under_test(CASES[0])
    inputs = op.make(SMALL, torch.float32)

    def step(inputs, boundary):
        y = kernel.selective_scan_fn(**inputs, delta_softplus=True, **{spelling: boundary})
        return y.square().sum()

    # One entry a token is what labels and positions become while tracing: no initial state for each sequence then.
    inputs = {name: value.requires_grad_() for name, value in inputs.items() if name != "initial_states"}
    boundary = getattr(SMALL, spelling)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = list(inputs.values())
    expected = torch.autograd.grad(step(inputs, boundary), leaves)
    for left, right in zip(torch.autograd.grad(compiled(inputs, boundary), leaves), expected):
        torch.testing.assert_close(left, right)


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


# ---- mamba_inner_fn ----


@pytest.mark.parametrize("norms", mamba1_inner.CASES, ids=["plain", "norms"])
def test_inner_matches_reference_packed(norms):
    """C05's second half: every gradient equals the sum over the samples alone."""
    op, pack = mamba1_inner.op_under_test(norms), Pack("packed", (3, 5, 4))
    inputs = op.make(pack, torch.float32)
    ours = run_with_gradients(lambda leaves: op.run(leaves, position_ids=pack.position_ids), inputs)
    truth = run_with_gradients(
        lambda leaves: op.reference(leaves, pack.cu_seqlens), properties.cast(inputs, torch.float64)
    )
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        scale = float(truth[name].abs().max())
        torch.testing.assert_close(value.double(), truth[name], rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: n + m)


def test_inner_takes_given_b_and_c(kernel):
    """B and C given are those that the projection would have made."""
    inputs = {"xz": torch.randn(1, 16, 7), **mixer(False)}
    made = kernel.mamba_inner_fn(**inputs)
    x = kernel.causal_conv1d_fn(
        inputs["xz"][:, :8], inputs["conv1d_weight"][:, 0], inputs["conv1d_bias"], activation="silu"
    )
    dt_rows, b_rows, c_rows = inputs["x_proj_weight"].split([3, 4, 4])
    for names, rows in ((("B", "C"), dt_rows), (("B",), torch.cat([dt_rows, c_rows]))):
        given = {"B": b_rows @ x, "C": c_rows @ x}
        arguments = {**inputs, "x_proj_weight": rows, **{name: given[name] for name in names}}
        torch.testing.assert_close(kernel.mamba_inner_fn(**arguments), made)


def tiny_mixer(family):
    """transformers' own mixer in training mode, its module, and its input."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"mamba": "Mamba", "falcon_mamba": "FalconMamba"}[family]
    config = getattr(module, f"{name}Config")(hidden_size=48, state_size=4, num_hidden_layers=1, vocab_size=11)
    layer = getattr(module, f"{name}Mixer")(config, layer_idx=0, initialize_mixer_weights=False).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer, module, torch.randn(2, 9, 48)


def test_inner_is_the_models_mixer(kernel, monkeypatch):
    """The call of transformers' Mamba in training, argument by argument, gives what its eager path gives."""
    layer, module, hidden = tiny_mixer("mamba")
    expected = layer(hidden)
    calls = []

    def ours(*arguments, **keywords):
        calls.append(keywords)
        return kernel.mamba_inner_fn(*arguments, **keywords)

    monkeypatch.setattr(module, "mamba_inner_fn", ours)
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_scan_inside_the_models_mixer(kernel, family, monkeypatch):
    layer, module, hidden = tiny_mixer(family)
    expected = layer(hidden)
    calls = []

    def ours(*arguments, use_mambapy, use_associative_scan, **keywords):
        calls.append(keywords)
        return kernel.selective_scan_fn(*arguments, **keywords)

    monkeypatch.setattr(module, "mamba_selective_scan", ours)
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


def test_inner_under_autocast(kernel):
    inputs = {"xz": torch.randn(1, 16, 7).bfloat16(), **mixer(True)}
    with torch.autocast("cpu", torch.bfloat16):
        out = kernel.mamba_inner_fn(**inputs, cu_seqlens=[0, 3, 7])
    assert out.dtype == torch.bfloat16
    truth = kernel.mamba_inner_fn(**properties.cast(inputs, torch.float64), cu_seqlens=[0, 3, 7])
    assert float((out.double() - truth).abs().max()) < 2e-2 * float(truth.abs().max())


# ---- cases ----


def test_c05_boundaries_reach_the_scan(kernel):
    pack = Pack("c05", (3, 5, 4))
    op = op_under_test(Case("c05", channels=8, states=4, initial=False))
    properties.check_against_reference(op, pack, torch.float32)
    properties.check_packed_equals_alone(op, pack, torch.float32)
    properties.check_isolation(op, pack, torch.float32)
    properties.check_spellings(op, pack, torch.float32)


def test_c06_empty_segments(kernel):
    op = op_under_test(Case("c06", channels=6, initial=False))
    for offsets, plain in (([0, 3, 3, 8], [0, 3, 8]), ([0, 0, 8, 8, 8], [0, 8])):
        inputs = op.make(Pack("plain", (8,)), torch.float32)
        states = torch.randn(len(offsets) - 1, 6, 5, requires_grad=True)
        y, last = kernel.selective_scan_fn(**inputs, cu_seqlens=offsets, initial_states=states, return_last_state=True)
        full = [n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1]]
        empty = [n for n in range(len(offsets) - 1) if n not in full]
        assert_same_bits("tokens", y, kernel.selective_scan_fn(**inputs, cu_seqlens=plain, initial_states=states[full]))
        assert last.shape == states.shape and not last.isnan().any()
        assert_same_bits("empty segments keep their state", last[empty], states[empty])
        weights = torch.randn_like(last)
        (gradient,) = torch.autograd.grad((last * weights).sum(), states)
        assert_same_bits("and its gradient", gradient[empty], weights[empty])
        _, zeros = kernel.selective_scan_fn(**inputs, cu_seqlens=offsets, return_last_state=True)
        assert bool((zeros[empty] == 0).all())


def test_c11_boundary_dtypes(kernel):
    inputs = op_under_test(Case("c11", initial=False)).make(Pack("plain", (7,)), torch.float32)
    expected = kernel.selective_scan_fn(**inputs, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    for boundaries in (torch.tensor([0, 3, 7]), [0, 3, 7]):
        assert_same_bits("offsets", kernel.selective_scan_fn(**inputs, cu_seqlens=boundaries), expected)
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert_same_bits("labels", kernel.selective_scan_fn(**inputs, seq_idx=labels), expected)
    with pytest.raises(TypeError, match="seq_idx must be an int32 or int64 tensor, got float32"):
        kernel.selective_scan_fn(**inputs, seq_idx=labels.float())
    with pytest.raises(ValueError, match="seq_idx must hold labels that never decrease"):
        kernel.selective_scan_fn(**inputs, seq_idx=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))


def test_c26_half_precision(kernel, tier):
    """Large steps in fp16, and bf16 tokens beside fp32 steps and parameters."""
    ones = torch.ones(1, 1, 4, dtype=torch.float16)
    y = kernel.selective_scan_fn(300 * ones, 300 * ones, torch.tensor([[-1.0]]), ones, 0.01 * ones, delta_softplus=True)
    torch.testing.assert_close(y, torch.full_like(y, 900), rtol=2e-2, atol=0)

    inputs = op_under_test(Case("c26", initial=False)).make(SMALL, torch.float32)
    mixed = {name: value.bfloat16() if name in ("u", "B", "C", "z") else value for name, value in inputs.items()}
    exact = {name: value.double() for name, value in mixed.items()}

    def scan(leaves):
        return {"y": kernel.selective_scan_fn(**leaves, delta_softplus=True, cu_seqlens=SMALL.cu_seqlens)}

    ours, truth = run_with_gradients(scan, mixed), run_with_gradients(scan, exact)
    for name, value in ours.items():
        assert value.dtype == (torch.bfloat16 if name in ("y", "du", "dB", "dC", "dz") else torch.float32), name
        assert float((value.double() - truth[name]).abs().max()) <= 2e-2 * float(truth[name].abs().max()), name


def test_c55_arguments_are_named(kernel):
    for function in (kernel.selective_scan_fn, kernel.mamba_inner_fn):
        parameters = inspect.signature(function).parameters
        for name in ("seq_idx", "cu_seqlens", "position_ids"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    inputs = op_under_test(Case("c55", initial=False)).make(SMALL, torch.float32)
    assert isinstance(kernel.selective_scan_fn(**inputs, seq_idx=None, cu_seqlens=None), torch.Tensor)


def test_c58_no_tokens(kernel):
    op = op_under_test(CASES[0])
    pack = Pack("nothing", ())
    for boundaries in ({"cu_seqlens": [0]}, {}):
        inputs = op.make(pack, torch.float32)
        if not boundaries:
            inputs["initial_states"] = torch.randn(1, 19, 5)
        results = run_with_gradients(lambda leaves, b=boundaries, op=op: op.run(leaves, **b), inputs)
        assert results["y"].shape == (1, 19, 0) and results["dB"].shape == inputs["B"].shape
        assert_same_bits("state", results["last_states"], inputs["initial_states"])
        for name in ("dA", "dD", "ddelta_bias"):
            assert bool((results[name] == 0).all())


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
        (dict(cu_seqlens=[0, 3, 9]), ValueError, r"cu_seqlens must end at the number of tokens \(8\) or before, got 9"),
        (dict(cu_seqlens=[2, 8]), ValueError, "cu_seqlens must start at 0, got 2"),
        (dict(cu_seqlens=[0, 6, 4, 8]), ValueError, "cu_seqlens must never decrease, got 4 after 6 at index 2"),
        (dict(position_ids=torch.arange(7)), ValueError, r"position_ids must have shape \[8\]"),
        (dict(use_mambapy=True), TypeError, "unexpected keyword argument 'use_mambapy'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rejects(kernel, change, error, text):
    with pytest.raises(error, match=text):
        kernel.selective_scan_fn(**arguments(**change))


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(xz=torch.randn(1, 15, 7)), r"xz must have shape \[B, 2 D, T\] = \(1, 16, 7\), got \(1, 15, 7\)"),
        (dict(x_proj_weight=torch.randn(10, 8)), r"x_proj_weight must have shape .* = \(11, 8\), got \(10, 8\)"),
        (dict(dt_rms_weight=torch.ones(3)), r"dt_rms_weight must have shape \[D\] = \(8,\), got \(3,\)"),
        (dict(b_rms_weight=torch.ones(3)), r"B's bias and norm must have shape \[N\] = \(4,\), got \(3,\)"),
        (dict(cu_seqlens=[0, 9]), r"mamba_inner_fn: cu_seqlens must end at the number of tokens \(7\)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_inner_rejects(kernel, change, text):
    with pytest.raises(ValueError, match=text):
        kernel.mamba_inner_fn(**{"xz": torch.randn(1, 16, 7), **mixer(False), **change})


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
        (dict(delta=delta[:, :, :7]), "delta must be a CPU tensor with the shape of u"),
        (dict(A=A[:5]), "A must have shape"),
        (dict(B=B[..., :7]), "B must be a CPU tensor with shape"),
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
