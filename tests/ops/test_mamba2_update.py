"""Mamba's one-token update: against its reference, and going on where the scan stopped."""

import pytest
import torch

from tests.harness.ops.mamba2_scan import CASES, op_under_test
from tests.harness.packings import Pack
from tests.harness.properties import assert_same_bits
from tests.ops.test_mamba2_scan import DTYPES, between


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_update_continues_a_sequence(kernel, dtype, tier):
    op = op_under_test(CASES[0])
    inputs = op.make(Pack("whole", (12,)), dtype)
    whole = op.run(inputs)
    first = op.run(between(inputs, 0, 9))
    state = first["final_states"].clone()
    x, dt, B, C, z = (inputs[name] for name in ("x", "dt", "B", "C", "z"))
    heads, head_dim, state_dim = x.shape[2], x.shape[3], B.shape[3]
    steps = []
    for t in range(9, 12):
        steps.append(
            kernel.selective_state_update(
                state,
                x[:, t],
                dt[:, t, :, None].expand(-1, -1, head_dim),
                inputs["A"].float()[:, None, None].expand(-1, head_dim, state_dim),
                B[:, t],
                C[:, t],
                inputs["D"][:, None].expand(-1, head_dim),
                z=z[:, t],
                dt_bias=inputs["dt_bias"][:, None].expand(heads, head_dim),
                dt_softplus=True,
            )
        )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(torch.stack(steps, 1), whole["y"][:, 9:], rtol=8 * eps, atol=16 * eps)
    torch.testing.assert_close(state, whole["final_states"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("has_heads", [True, False])
def test_update_matches_reference(kernel, dtype, has_heads, tier):
    """Rates of their own for every state element (Mamba-1) and narrow or wide states."""
    H, G, P, S = (6, 3, 5, 19) if has_heads else (1, 1, 5, 19)
    x, dt, z = (torch.randn(2, H, P).to(dtype) for _ in range(3))
    A, D, bias = -torch.rand(H, P, S).to(dtype), torch.randn(H, P).to(dtype), torch.randn(H, P).to(dtype)
    B, C = (torch.randn(2, G, S).to(dtype) for _ in range(2))
    for state_dtype in {dtype, torch.promote_types(dtype, torch.float32)}:
        for optional in (dict(D=D, z=z, dt_bias=bias, dt_softplus=True), {}):
            state = torch.randn(2, H, P, S).to(state_dtype)
            y, new = kernel.mamba2_scan.selective_state_update_reference(state, x, dt, A, B, C, **optional)
            if has_heads:
                ours = kernel.selective_state_update(state, x, dt, A, B, C, **optional)
            else:
                flat = {name: value[0] if name in ("D", "dt_bias") else value for name, value in optional.items()}
                flat = {name: value[:, 0] if name == "z" else value for name, value in flat.items()}
                state = state[:, 0]
                new = new[:, 0]
                y = y[:, 0]
                ours = kernel.selective_state_update(state, x[:, 0], dt[:, 0], A[0], B[:, 0], C[:, 0], **flat)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(ours, y, rtol=4 * eps, atol=32 * torch.finfo(state_dtype).eps + 2 * eps)
            torch.testing.assert_close(state, new, rtol=4 * eps, atol=4 * eps)


def test_update_writes_into_any_layout(kernel):
    state = torch.randn(2, 4, 7, 3).transpose(2, 3)
    before = state.clone()
    x, dt = torch.randn(2, 4, 3), torch.rand(2, 4, 3)
    A, B, C = -torch.rand(4, 3, 7), torch.randn(2, 1, 7), torch.randn(2, 1, 7)
    y = kernel.selective_state_update(state, x, dt, A, B, C)
    assert_same_bits("y", y, kernel.selective_state_update(before, x, dt, A, B, C))
    assert_same_bits("state", state, before)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(x=torch.randn(2, 4, 3, 1)), ValueError, r"x must have shape \[B, H, P\] or \[B, P\]"),
        (dict(state=torch.randn(2, 4, 2, 5)), ValueError, r"state must have shape \[B, H, P, S\] = \(2, 4, 3, 5\)"),
        (dict(state=torch.randn(2, 4, 3, 5).half()), TypeError, "state must have one of the dtypes float32"),
        (dict(dt=torch.randn(2, 4, 2)), ValueError, r"dt must have shape \[B, H, P\]"),
        (dict(A=torch.randn(4, 3)), ValueError, r"A must have shape \[H, P, S\] = \(4, 3, 5\)"),
        (dict(B=torch.randn(2, 3, 5)), ValueError, "B must have a number of groups that divides the 4 heads, got 3"),
        (dict(C=torch.randn(2, 1, 5)), ValueError, r"C must have shape \[B, G, S\] = \(2, 2, 5\)"),
        (dict(D=torch.randn(4)), ValueError, r"D must have shape \[H, P\]"),
        (dict(z=torch.randn(2, 4, 2)), ValueError, r"z must have shape \[B, H, P\]"),
        (dict(state=torch.randn(1, 4, 3, 5).expand(2, 4, 3, 5)), ValueError, "state must have memory of its own"),
    ],
)
def test_update_rejects(kernel, change, error, text):
    arguments = dict(
        state=torch.randn(2, 4, 3, 5),
        x=torch.randn(2, 4, 3),
        dt=torch.randn(2, 4, 3),
        A=torch.randn(4, 3, 5),
        B=torch.randn(2, 2, 5),
        C=torch.randn(2, 2, 5),
    )
    with pytest.raises(error, match="selective_state_update: " + text):
        kernel.selective_state_update(**{**arguments, **change})
