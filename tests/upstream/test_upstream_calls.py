"""Calls of the decode steps, the scan and attention as code for mamba-ssm, causal-conv1d and flash-attn makes them.

Those of the delta rules are in test_upstream_delta_calls.py, the signatures in test_upstream_signatures.py.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.harness.properties import assert_same_bits

SLOTS = [3, -1, 0, -1, 4]


def state_step(state, x, dt, A, B, C, D, z, dt_bias):
    """One token of one sequence ``[H, P]`` in float64; returns y and the next state."""
    step = F.softplus(dt + dt_bias)
    B, C = (tensor.repeat_interleave(x.shape[0] // tensor.shape[0], 0)[:, None] for tensor in (B, C))
    state = torch.exp(step[..., None] * A) * state + (step * x)[..., None] * B
    return ((state * C).sum(-1) + D * x) * F.silu(z), state


@pytest.mark.parametrize("has_heads", [True, False], ids=["heads", "no heads"])
@pytest.mark.parametrize("coefficients", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_update_of_named_rows(kernel, dtype, coefficients, has_heads, tier):
    """Rows of a cache in any order, padding between them, B and C of another dtype than x, states narrow and wide."""
    heads, groups, P, S, rows = (4, 2, 5, 19, 6) if has_heads else (1, 1, 5, 19, 6)
    batch = len(SLOTS)
    x, dt, z = (torch.randn(batch, heads, P).to(dtype) for _ in range(3))
    B, C = (torch.randn(batch, groups, S).to(coefficients) for _ in range(2))
    A, D, bias = -torch.rand(heads, P, S), torch.randn(heads, P), torch.randn(heads, P)
    for state_dtype in {dtype, torch.float32}:
        for integers in (torch.int32, torch.int64):
            state = torch.randn(rows, heads, P, S).to(state_dtype)
            before = state.clone()
            tensors = (x, dt, A, B, C, D, z, bias)
            if not has_heads:
                tensors = tuple(t[0] if t is A or t is D or t is bias else t[:, 0] for t in tensors)
                state = state[:, 0]
            y = kernel.selective_state_update(
                state, *tensors, dt_softplus=True, state_batch_indices=torch.tensor(SLOTS, dtype=integers)
            )
            y, state = (t if has_heads else t.unsqueeze(1) for t in (y, state))
            assert y.dtype == dtype
            for b, row in enumerate(SLOTS):
                if row < 0:
                    assert_same_bits("padding", y[b], torch.zeros_like(y[b]))
                    continue
                exact = [t.double() for t in (before[row], x[b], dt[b], A, B[b], C[b], D, z[b], bias)]
                truth, after = state_step(*exact)
                eps, state_eps = torch.finfo(dtype).eps, torch.finfo(state_dtype).eps
                torch.testing.assert_close(y[b].double(), truth, rtol=4 * eps, atol=64 * 2**-23 + 4 * eps)
                torch.testing.assert_close(state[row].double(), after, rtol=4 * state_eps, atol=16 * state_eps)
            for row in set(range(rows)) - set(SLOTS):
                assert_same_bits("a row that nobody names", state[row], before[row])


def test_state_update_of_named_rows_is_that_of_the_rows(kernel):
    """The same bits as rows that are taken out, updated and put back; any layout of the cache."""
    cache = torch.randn(6, 2, 7, 4).transpose(2, 3)
    x, dt = torch.randn(5, 2, 4), torch.rand(5, 2, 4)
    A, B, C = -torch.rand(2, 4, 7), torch.randn(5, 1, 7), torch.randn(5, 1, 7)
    slots = torch.tensor(SLOTS)
    live = slots >= 0
    rows, expected = cache[slots[live]], cache.clone()
    y = kernel.selective_state_update(rows, x[live], dt[live], A, B[live], C[live])
    expected[slots[live]] = rows
    ours = kernel.selective_state_update(cache, x, dt, A, B, C, state_batch_indices=slots)
    assert_same_bits("y", ours[live], y)
    assert_same_bits("cache", cache, expected)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_convolution_of_padding_slots(kernel, dtype, circular, tokens, tier):
    """Output 0 and no state touched, whatever x holds there; the others as if the slots were not there."""
    x, weight, bias = torch.randn(5, 70, tokens).to(dtype), torch.randn(70, 4), torch.randn(70)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    live = slots >= 0
    x[~live] = float("nan")
    seen = torch.tensor([7, -1, 2, 0, 5]) if circular else None
    cache = torch.randn(6, 70, 5).to(dtype)
    alone = cache.clone()
    y = kernel.causal_conv1d_update(x, cache, weight, bias, "silu", seen, slots)
    expected = kernel.causal_conv1d_update(
        x[live], alone, weight, bias, "silu", None if seen is None else seen[live], slots[live]
    )
    assert_same_bits("live", y[live], expected)
    assert_same_bits("padding", y[~live], torch.zeros_like(y[~live]))
    assert_same_bits("cache", cache, alone)
    for dense in (x[:, :, 0].contiguous(), x[:, :, :1]):
        padding = kernel.causal_conv1d_update(dense, cache, weight, conv_state_indices=torch.full((5,), -1))
        assert_same_bits("all of it", padding, torch.zeros_like(dense))
    assert_same_bits("cache", cache, alone)


def test_rows_that_cannot_be(kernel):
    x, weight, cache = torch.randn(3, 5), torch.randn(5, 4), torch.randn(3, 5, 3)
    row = (torch.randn(3, 1, 4), torch.rand(3, 1, 4), -torch.rand(1, 4, 7), torch.randn(3, 1, 7), torch.randn(3, 1, 7))
    for slots, at in (([0, 3, 1], 1), ([0, -1, 0], 2)):
        slots = torch.tensor(slots)
        with pytest.raises(RuntimeError, match=f"conv_state_indices must name different rows .* at index {at}"):
            kernel.causal_conv1d_update(x, cache, weight, conv_state_indices=slots)
        with pytest.raises(RuntimeError, match=f"state_batch_indices must name different rows .* at index {at}"):
            kernel.selective_state_update(torch.randn(3, 1, 4, 7), *row, state_batch_indices=slots)
    for slots, error in ((torch.zeros(2).long(), ValueError), (torch.zeros(3), TypeError), ([0, 1, 2], TypeError)):
        with pytest.raises(error, match="selective_state_update: state_batch_indices must"):
            kernel.selective_state_update(torch.randn(3, 1, 4, 7), *row, state_batch_indices=slots)


def scan_inputs():
    return dict(x=torch.randn(1, 9, 2, 3), dt=torch.rand(1, 9, 2), A=-torch.rand(2), B=torch.randn(1, 9, 1, 4),
                C=torch.randn(1, 9, 1, 4), chunk_size=4)  # fmt: skip


def test_state_dtype(kernel):
    """It changes nothing on a CPU, which rounds no state; a GPU computes in it where it is wider than x."""
    on = {name: torch.device(name) for name in ("cpu", "cuda")}
    dtype_of_states = kernel.mamba2_scan.api.dtype_of_states
    assert dtype_of_states(torch.bfloat16, torch.float32, on["cpu"]) == torch.bfloat16
    assert dtype_of_states(torch.bfloat16, torch.float32, on["cuda"]) == torch.float32
    assert dtype_of_states(torch.bfloat16, torch.float16, on["cuda"]) == torch.float32
    assert dtype_of_states(torch.float32, torch.bfloat16, on["cuda"]) == torch.float32
    assert dtype_of_states(torch.bfloat16, None, on["cuda"]) == torch.bfloat16
    inputs = scan_inputs()
    expected = kernel.mamba_chunk_scan_combined(**inputs, cu_seqlens=[0, 5, 9], return_final_states=True)
    for dtype in (torch.float32, torch.bfloat16):
        ours = kernel.mamba_chunk_scan_combined(
            **inputs, cu_seqlens=[0, 5, 9], return_final_states=True, state_dtype=dtype
        )
        for left, right in zip(ours, expected):
            assert_same_bits("state_dtype", left, right)
    with pytest.raises(TypeError, match="mamba_chunk_scan_combined: state_dtype must be a dtype or None"):
        kernel.mamba_chunk_scan_combined(**inputs, state_dtype="float32")
    fused = (torch.randn(1, 9, 22), torch.randn(14, 4), None, torch.randn(2), -torch.rand(2), torch.randn(2), 4)
    out = kernel.mamba_split_conv1d_scan_combined(*fused, headdim=3, state_dtype=torch.float32)
    assert_same_bits("fused", out, kernel.mamba_split_conv1d_scan_combined(*fused, headdim=3))
    with pytest.raises(TypeError, match="mamba_split_conv1d_scan_combined: state_dtype must be a floating dtype"):
        kernel.mamba_split_conv1d_scan_combined(*fused, headdim=3, state_dtype=torch.int32)


def test_complex_rates_are_refused(kernel):
    """S4's form, which mamba-ssm's scan still has."""
    complex_A = torch.randn(2, 4, dtype=torch.complex64)
    u = torch.randn(1, 2, 6)
    with pytest.raises(TypeError, match="selective_scan_fn: A must .* got complex64: complex numbers are not served"):
        kernel.selective_scan_fn(u, u.abs(), complex_A, torch.randn(1, 4, 6), torch.randn(1, 4, 6))
    with pytest.raises(TypeError, match="A must .* got complex64: complex numbers are not served"):
        kernel.mamba_chunk_scan_combined(**{**scan_inputs(), "A": torch.randn(2, dtype=torch.complex64)})
    # Its projection has two rows for each state, so the shapes fit only that A.
    with pytest.raises(TypeError, match="mamba_inner_fn: A must .* got complex64: complex numbers are not served"):
        kernel.mamba_inner_fn(
            torch.randn(1, 4, 6), torch.randn(2, 1, 4), None, torch.randn(17, 2), torch.randn(2, 1), torch.randn(3, 2),
            None, complex_A,
        )  # fmt: skip


@pytest.mark.parametrize("window", [(3, 1), [3, 1], torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32)])
def test_window_in_any_form(kernel, window):
    q, k, v = torch.randn(14, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    cuts = torch.tensor([0, 5, 14])
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 8**-0.5
    place = torch.arange(14) - torch.tensor([0] * 5 + [5] * 9)
    sample = torch.tensor([0] * 5 + [1] * 9)
    steps = place[None] - place[:, None]
    hidden = (sample[None] != sample[:, None]) | (steps < -3) | (steps > 1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    truth = torch.einsum("hqk,khd->qhd", weights, v.double().repeat_interleave(2, 1))
    out = kernel.flash_attn_varlen_func(q, k, v, cuts, window_size=window)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-6)
    rows = kernel.flash_attn_func(q[None, 5:], k[None, 5:], v[None, 5:], window_size=window)
    assert_same_bits("rows", rows[0], out[5:])
    cached = kernel.flash_attn_with_kvcache(q[None, 5:], k[None, 5:], v[None, 5:], window_size=window)
    assert_same_bits("cache", cached[0], out[5:])


def test_what_attention_refuses(kernel):
    q, cuts = torch.randn(4, 2, 8), torch.tensor([0, 4])
    for change, error, text in (
        (dict(alibi_slopes=torch.ones(2)), NotImplementedError, "alibi_slopes is not supported, got Tensor: biases"),
        (dict(block_table=torch.zeros(1, 1)), NotImplementedError, "block_table .* read by flash_attn_with_kvcache"),
        (dict(window_size=torch.tensor([1.0, 2.0])), TypeError, "window_size must have one of the dtypes int32, int64"),
        (dict(window_size=torch.tensor([1, 2, 3])), ValueError, r"window_size must be .*, got \[1, 2, 3\]"),
        (dict(window_size=torch.tensor([1, 2], device="meta")), ValueError, "window_size must .* a tensor on the CPU"),
    ):
        with pytest.raises(error, match=f"flash_attn_varlen_func: {text}"):
            kernel.flash_attn_varlen_func(q, q, q, cuts, **change)
