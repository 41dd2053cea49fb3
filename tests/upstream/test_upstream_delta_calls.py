"""Calls of the delta rules as code for flash-linear-attention makes them, by the keywords that it has.

Every kind of call is compared with a recurrence in float64 that is written here from the keywords' meaning upstream.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Dict

import pytest
import torch
import torch.nn.functional as F

from tests.harness import properties
from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest, assert_same_bits
from tests.harness.triton import served_by_triton

H, HV, K, V = 1, 2, 8, 6
RAGGED = Pack("ragged", (5, 9, 17, 3))
PADDED = Pack("empty ones and padding", (4, 0, 6), padding=5)


@dataclass(frozen=True)
class Kind:
    """A way to call: what it is there to show, upstream's keywords, and how its inputs look."""

    why: str
    options: Dict[str, Any] = field(default_factory=dict)
    largest_beta: float = 1.0
    only: str = ""  # in the name of every function that takes it
    without: tuple = ()
    channels: str = ""  # of decays of their own: k, v or kv

    def __str__(self):
        return self.why.replace(" ", "_")

    def asks_for(self, option):
        return bool(self.options.get(option))


SIGMOID = dict(use_beta_sigmoid_in_kernel=True)
GATE = dict(use_gate_in_kernel=True)
KINDS = [
    Kind("beta of logits", SIGMOID),
    Kind("beta of logits doubled", dict(SIGMOID, allow_neg_eigval=True)),
    Kind("beta above one", largest_beta=1.9),
    Kind("states v first", dict(state_v_first=True)),
    Kind("gate", GATE),
    Kind("gate without bias", GATE, without=("dt_bias",)),
    Kind("bounded gate", dict(GATE, lower_bound=-5.0), only="kda"),
    Kind("bounded gate without a rate", dict(GATE, lower_bound=-5.0), only="kda", without=("A_log",)),
    Kind("bound without a gate", dict(lower_bound=-5.0), only="kda"),
    Kind("all at once", dict(SIGMOID, **GATE, allow_neg_eigval=True, state_v_first=True)),
    Kind("no beta", only="recurrent_gated", without=("beta",)),
    Kind("no decay", only="recurrent_gated", without=("g",)),
    Kind("decay by key channel", only="recurrent_gated", channels="k"),
    Kind("decay by value channel", dict(state_v_first=True), only="recurrent_gated", channels="v", without=("g",)),
    Kind("decay by both and a gate", dict(SIGMOID, **GATE), only="recurrent_gated", channels="kv"),
]
FUNCTIONS = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"]
CALLS = [
    pytest.param(kind, function, id=f"{function}-{kind}")
    for function in FUNCTIONS
    for kind in KINDS
    if kind.only in function
]
every_call = pytest.mark.parametrize("kind, function", CALLS)


def inputs_of(kind, function, pack, dtype):
    wide, per_channel = torch.promote_types(dtype, torch.float32), "kda" in function
    T, N = pack.tokens, len(pack.lengths)
    gated = kind.asks_for("use_gate_in_kernel")
    decays = (1, T, HV, K) if per_channel else (1, T, HV)
    logits = kind.asks_for("use_beta_sigmoid_in_kernel")
    inputs = {
        "q": torch.randn(1, T, H, K).to(dtype),
        "k": torch.randn(1, T, H, K).to(dtype),
        "v": torch.randn(1, T, HV, V).to(dtype),
        "g": (torch.randn(decays) if gated else -0.3 * torch.rand(decays)).to(wide),
        "beta": (3 * torch.randn(1, T, HV) if logits else kind.largest_beta * torch.rand(1, T, HV)).to(wide),
        "initial_state": torch.randn((N, HV, V, K) if kind.asks_for("state_v_first") else (N, HV, K, V)).to(wide),
    }
    if gated:
        inputs["A_log"] = torch.randn(HV).to(wide)
        inputs["dt_bias"] = (torch.randn(HV * K) if per_channel else torch.randn(HV)).to(wide)
    for letter, size in (("k", K), ("v", V)):
        if letter in kind.channels:
            inputs[f"g{letter}"] = -torch.rand(1, T, HV, size).to(wide)
    return {name: value for name, value in inputs.items() if name not in kind.without}


def decays_of(kind, inputs):
    """Log-decays ``[T, HV, K or 1, V or 1]``."""
    g = inputs["g"][0] if "g" in inputs else torch.zeros_like(inputs["v"][0, ..., 0])
    if kind.asks_for("use_gate_in_kernel"):
        rate = inputs["A_log"].exp() if "A_log" in inputs else torch.ones(HV, dtype=g.dtype)
        rate = rate.view(HV, *[1] * (g.dim() - 2))
        x = g + inputs["dt_bias"].view(HV, *g.shape[2:]) if "dt_bias" in inputs else g
        bound = kind.options.get("lower_bound")
        g = -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)
    g = g[..., None] if g.dim() == 3 else g[..., None, None]
    for name, axis in (("gk", -1), ("gv", -2)):
        if name in inputs:
            g = g + inputs[name][0].unsqueeze(axis)
    return g


def recurrence(kind, inputs, cu_seqlens):
    """Token by token, in float32 or in float64."""
    dtype = torch.promote_types(inputs["q"].dtype, torch.float32)
    out_dtype, inputs = inputs["q"].dtype, {name: value.to(dtype) for name, value in inputs.items()}
    q, k = (inputs[name][0].repeat_interleave(HV // H, dim=1) for name in ("q", "k"))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    v, decay = inputs["v"][0], decays_of(kind, inputs).exp()
    beta = inputs["beta"][0] if "beta" in inputs else torch.ones_like(v[..., 0])
    if kind.asks_for("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta) * (2 if kind.asks_for("allow_neg_eigval") else 1)
    rows, states = [], []
    transposed = kind.asks_for("state_v_first")
    for n, (bos, eos) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        state = inputs["initial_state"][n].mT if transposed else inputs["initial_state"][n]
        for t in range(bos, eos):
            state = decay[t] * state
            u = beta[t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
            state = state + k[t, :, :, None] * u[:, None]
            rows.append(K**-0.5 * (q[t, :, :, None] * state).sum(1))
        states.append(state.mT if transposed else state)
    padding = v.new_zeros(v.shape[0] - len(rows), HV, V)
    return {"o": torch.cat([torch.stack(rows), padding])[None].to(out_dtype), "final_state": torch.stack(states)}


def op_under_test(kind, function):
    """The call as the harness makes it; the functions for decoding have no gradients."""
    gradients = nullcontext if function.startswith("chunk") else torch.no_grad

    def run(inputs, **boundaries):
        call = getattr(load_kernel(), function)
        with gradients():
            o, final = call(
                **inputs, **kind.options, **boundaries, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
        return {"o": o, "final_state": final}

    def reference(inputs, cu_seqlens):
        with gradients():
            return recurrence(kind, inputs, cu_seqlens)

    along_tokens = dict.fromkeys(("q", "k", "v", "g", "beta", "gk", "gv", "o"), 1)
    make = lambda pack, dtype: inputs_of(kind, function, pack, dtype)  # noqa: E731
    states = ("initial_state", "final_state")
    return OpUnderTest(function, make, run, reference, along_tokens, states)


@every_call
def test_matches_the_recurrence(kind, function):
    op = op_under_test(kind, function)
    for pack, dtype in ((PADDED, torch.float32), (RAGGED, torch.float32), (PADDED, torch.bfloat16)):
        properties.check_against_reference(op, pack, dtype)


@every_call
def test_packing_properties(kind, function):
    """Packed as alone to the bit, in any order, beside NaN, with any number of threads, by any spelling."""
    for pack in (RAGGED, PADDED):
        properties.check_all_properties(op_under_test(kind, function), pack, torch.float32)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda"])
def test_gates_over_chunks(function):
    properties.check_against_reference(op_under_test(KINDS[9], function), Pack("chunks", (70, 3)), torch.float32)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_triton_takes_the_same_keywords(kernel, function):
    op = op_under_test(KINDS[9], function)
    with served_by_triton(kernel):
        properties.check_against_reference(op, PADDED, torch.float32)


@pytest.mark.parametrize("kind", KINDS[-3:], ids=str)
def test_triton_decays_by_channel(kernel, kind):
    with served_by_triton(kernel):
        properties.check_against_reference(op_under_test(kind, FUNCTIONS[1]), PADDED, torch.float32)


@pytest.mark.parametrize("labels", [False, True], ids=["tail", "between rows"])
def test_what_lies_on_padding_reaches_no_parameter(kernel, labels):
    """Kernels do not read padding, nor may a gate in front of them: NaN there would end in A_log's gradient."""
    inputs = inputs_of(KINDS[9], FUNCTIONS[0], Pack("", (12,)), torch.float32)
    del inputs["initial_state"]
    if labels:
        inputs = {name: x.view(2, 6, *x.shape[2:]) if x.dim() > 1 else x for name, x in inputs.items()}
        where = dict(seq_idx=torch.tensor([[0, 0, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0]]))
    else:
        where = dict(cu_seqlens=torch.tensor([0, 3, 10]))
    spoilt = {name: x.clone() for name, x in inputs.items()}
    for x in spoilt.values():
        if x.dim() > 1:
            (x[0, 4:] if labels else x[0, 10:]).fill_(float("nan"))
    results = []
    for given in (inputs, spoilt):
        leaves = {name: x.requires_grad_() for name, x in given.items()}
        o, _ = kernel.chunk_gated_delta_rule(**leaves, **KINDS[9].options, **where)
        results.append([o, *torch.autograd.grad(o.square().sum(), list(leaves.values()))])
    for name, clean, dirty in zip(("o", *inputs), *results):
        assert_same_bits(name, clean, dirty)


STEEP = [-200.0, 0.0, 60.0, 71.0, 89.0, 500.0]


def test_steep_gates(kernel):
    """Rates beyond the range of exp: decays and gradients are those of float64, where it holds the rate."""
    T = 40
    x = torch.cat([torch.linspace(-250, -30, T - 8), torch.linspace(-3, 90, 8)])
    g, A_log = x[None, :, None].expand(1, T, len(STEEP)).clone(), torch.tensor(STEEP)
    q = k = torch.ones(1, T, 1, 1)
    v, beta = torch.zeros(1, T, len(STEEP), 1), torch.zeros(1, T, len(STEEP))
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (g, A_log)]
        # Each token is a sequence that decays its state of 1 and reads it.
        o, _ = kernel.chunk_gated_delta_rule(
            *(tensor.to(dtype) for tensor in (q, k, v)), leaves[0], beta, use_gate_in_kernel=True, A_log=leaves[1],
            initial_state=torch.ones(T, len(STEEP), 1, 1), cu_seqlens=range(T + 1),
        )  # fmt: skip
        results.append((o, *torch.autograd.grad(o.sum(), leaves)))
    exact = torch.exp(-A_log.double().exp() * F.softplus(g.double()))
    torch.testing.assert_close(results[0][0][..., 0].double(), exact, rtol=1e-4, atol=1e-6)
    for ours, wide in zip(*results):
        assert bool(ours.isfinite().all())
        torch.testing.assert_close(ours.double(), wide, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mixed_dtypes(kernel, function):
    """q and k in float32 beside v in float16, as after a normalisation: computed in the widest, returned in q's."""
    inputs = inputs_of(Kind(""), function, RAGGED, torch.float32)
    mixed = {**inputs, "v": inputs["v"].half()}
    o, final = getattr(kernel, function)(**mixed, cu_seqlens=RAGGED.cu_seqlens, output_final_state=True)
    wide = {**inputs, "v": mixed["v"].float()}
    expected = getattr(kernel, function)(**wide, cu_seqlens=RAGGED.cu_seqlens, output_final_state=True)
    assert_same_bits("o", o, expected[0])
    assert_same_bits("state", final, expected[1])
    narrow, _ = getattr(kernel, function)(**{**inputs, "q": inputs["q"].half()}, cu_seqlens=RAGGED.cu_seqlens)
    assert narrow.dtype == torch.float16


@pytest.mark.parametrize("function", FUNCTIONS)
def test_old_name_of_the_layout(kernel, function):
    inputs = inputs_of(KINDS[3], function, RAGGED, torch.float32)
    call = lambda **layout: getattr(kernel, function)(  # noqa: E731
        **inputs, **layout, cu_seqlens=RAGGED.cu_seqlens, output_final_state=True
    )
    with pytest.warns(DeprecationWarning, match=f"{function}: transpose_state_layout is now called state_v_first"):
        old = call(transpose_state_layout=True)
    for left, right in zip(old, call(state_v_first=True)):
        assert_same_bits("old name", left, right)
    assert old[1].is_contiguous()
    with pytest.raises(ValueError, match="transpose_state_layout must be left out beside state_v_first"):
        call(state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda"])
def test_what_changes_nothing(kernel, function):
    inputs = inputs_of(Kind(""), function, RAGGED, torch.float32)
    call, cuts = getattr(kernel, function), RAGGED.cu_seqlens
    expected, _ = call(**inputs, cu_seqlens=cuts)
    more = [dict(cu_seqlens_cpu=cuts.long()), dict(chunk_size=32)]
    if function == "chunk_kda":
        more += [dict(disable_recompute=True), dict(use_graph=True, max_num_seqs=4), dict(safe_gate=True)]
    else:
        more += [dict(chunk_indices=torch.tensor([[0, 0], [1, 0], [2, 0], [3, 0]]))]
    for keywords in more:
        assert_same_bits(str(keywords), call(**inputs, cu_seqlens=cuts, **keywords)[0], expected)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_kda"])
def test_compiles_to_one_graph(kernel, function):
    """The gates before the kernel break no graph, and other lengths make no new one."""
    graphs, kind = [], KINDS[9]

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(getattr(kernel, function), fullgraph=True, backend=count)
    for lengths in ((3, 1, 6), (4, 9), (7, 2, 5, 1)):
        pack = Pack("", lengths)
        inputs = inputs_of(kind, function, pack, torch.float32)
        call = dict(inputs, **kind.options, cu_seqlens=pack.cu_seqlens, output_final_state=True)
        for left, right in zip(compiled(**call), getattr(kernel, function)(**call)):
            torch.testing.assert_close(left, right)
    assert len(graphs) <= 2


REFUSED = [
    ("", dict(allow_neg_eigval=True), ValueError, "allow_neg_eigval must come with use_beta_sigmoid_in_kernel"),
    ("", dict(A_log=torch.ones(2)), ValueError, r"A_log must be None without use_gate_in_kernel, got shape \(2,\)"),
    ("", dict(dt_bias=torch.ones(2)), ValueError, "dt_bias must be None without use_gate_in_kernel"),
    ("", dict(use_gate_in_kernel=True), ValueError, "A_log must be given with use_gate_in_kernel"),
    ("", dict(GATE, A_log=torch.ones(3)), ValueError, r"A_log must have HV = 2 elements, got shape \(3,\)"),
    ("", dict(state_v_first=True), ValueError, r"initial_state must have shape \[N, HV, V, K\] = \(4, 2, 6, 8\)"),
    ("", dict(head_first=True), TypeError, "unexpected keyword argument 'head_first'"),
    ("gated", dict(GATE, A_log=torch.ones(2), dt_bias=torch.ones(3)), ValueError, r"dt_bias must have shape \[HV\]"),
    ("chunk", dict(cp_context=object()), TypeError, "cp_context must be a ContextParallel, or an object with"),
    ("chunk", dict(chunk_size=48), ValueError, "chunk_size must be one of (16, )?32, 64, got 48"),
    ("chunk", dict(cu_seqlens=None, cu_seqlens_cpu=torch.tensor([0, 34])), ValueError, "must come with cu_seqlens"),
    ("chunk", dict(cu_seqlens_cpu=torch.tensor([0, 34])), ValueError, "cu_seqlens_cpu must have 5 offsets"),
    ("chunk", dict(cu_seqlens_cpu=torch.tensor([0, 5, 14, 30, 34])), ValueError, "must equal cu_seqlens"),
    ("chunk", dict(cu_seqlens_cpu=[0, 34]), TypeError, "cu_seqlens_cpu must be a tensor or None, got"),
    ("chunk_gated", dict(chunk_indices=torch.zeros(4, 3).long()), ValueError, r"have shape \[chunks, 2\]"),
    ("chunk_gated", dict(cu_seqlens=None, chunk_indices=torch.zeros(4, 2).long()), ValueError, "come with cu_seqlens"),
    ("kda", dict(lower_bound=5.0), ValueError, "lower_bound must be negative, got 5.0"),
    ("chunk_kda", dict(return_intermediate_states=True), NotImplementedError, "before each chunk are not kept"),
    ("chunk_kda", dict(use_graph=True, max_num_seqs=3), ValueError, "max_num_seqs must be the 4 sequences"),
    ("recurrent_gated", dict(gk=torch.ones(1, 34, 2, 7)), ValueError, r"gk must have shape \[B, T, HV, K\]"),
    ("recurrent_gated", dict(gv=torch.ones(1, 34, 2)), ValueError, "gv must have 4 dimensions"),
    ("recurrent_gated", dict(GATE, A_log=torch.ones(2), g=None), ValueError, "g must be given with use_gate_in_kernel"),
]  # fmt: skip


@pytest.mark.parametrize("only, change, error, text", REFUSED)
def test_refused_with_the_reason(kernel, only, change, error, text):
    for function in FUNCTIONS:
        if only in function:
            inputs = inputs_of(Kind(""), function, RAGGED, torch.float32)
            with pytest.raises(error, match=f"{function}.*{text}"):
                getattr(kernel, function)(**{**inputs, "cu_seqlens": RAGGED.cu_seqlens, **change})


def test_decays_by_channel_have_no_backward_either(kernel):
    inputs = inputs_of(KINDS[-1], "fused_recurrent_gated_delta_rule", RAGGED, torch.float32)
    inputs["gk"].requires_grad_()
    o, _ = kernel.fused_recurrent_gated_delta_rule(**inputs, **KINDS[-1].options, cu_seqlens=RAGGED.cu_seqlens)
    with pytest.raises(NotImplementedError, match="has no backward pass"):
        o.sum().backward()
