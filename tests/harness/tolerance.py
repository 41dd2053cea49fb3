"""How far a result may lie from the truth, for every op and dtype by one rule.

Truth is the reference in float64. The budget of a tensor is

    2 * (error of the same reference run in the working dtype) + 4 * eps(dtype) * max|truth|

for its largest error, and the same with root mean squares for its RMS error. Tensors that sum over tokens (gradients
of parameters) get sqrt(summands) times the second term: rounding errors of a sum grow like that. No test has numbers
of its own; EXCEPTIONS is the only place where a tensor may have a larger factor, with the reason.
"""

import math
from typing import Dict, Tuple

import torch
from torch import Tensor

REFERENCE_FACTOR = 2.0
ROUNDING_FACTOR = 4.0

# (op, tensor) -> (factor on the budget, reason)
EXCEPTIONS: Dict[Tuple[str, str], Tuple[float, str]] = {}


# (op, tensor, dtype) -> the largest share of its budget that the tensor used.
SHARES: Dict[Tuple[str, str, str], float] = {}


def check_close(op: str, name: str, ours: Tensor, working: Tensor, truth: Tensor, summands: int = 1) -> None:
    """Raise AssertionError if ``ours`` is further from ``truth`` than its budget.

    Args:
        op: name of the op.
        name: name of the tensor, for example ``dx``.
        ours: the kernel's result, in the working dtype or the dtype that the op returns.
        working: the reference's result in the working dtype, whose error sets the scale.
        truth: the reference's result in float64.
        summands: tokens summed into each element.
    """
    assert ours.shape == truth.shape, f"{op}: {name} has shape {tuple(ours.shape)}, truth {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    assert torch.isfinite(ours).all(), f"{op}: {name} is not finite in {int((~torch.isfinite(ours)).sum())} places"
    error = (ours.double() - truth).abs()
    baseline = (working.double() - truth).abs()
    eps = torch.finfo(ours.dtype).eps * math.sqrt(summands)
    factor, _ = EXCEPTIONS.get((op, name), (1.0, ""))
    largest = factor * (REFERENCE_FACTOR * float(baseline.max()) + ROUNDING_FACTOR * eps * float(truth.abs().max()))
    spread = factor * (REFERENCE_FACTOR * _rms(baseline) + ROUNDING_FACTOR * eps * _rms(truth))
    tiny = torch.finfo(ours.dtype).tiny
    share = max(float(error.max()) / max(largest, tiny), _rms(error) / max(spread, tiny))
    if share > 1:
        place = int(error.argmax())
        raise AssertionError(
            f"{op}: {name} ({ours.dtype}) is off by {float(error.max()):.3g}, budget {largest:.3g}; "
            f"RMS {_rms(error):.3g}, budget {spread:.3g}; worst at flat index {place}: "
            f"{float(ours.flatten()[place]):.9g} instead of {float(truth.flatten()[place]):.9g}"
        )
    note_share((op, name, str(ours.dtype).replace("torch.", "")), share)


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def note_share(key: Tuple[str, str, str], share: float) -> None:
    SHARES[key] = max(SHARES.get(key, 0.0), share)


def usage_table() -> str:
    """The largest share of its budget that each tensor used, one line each."""
    rows = [f"  {op:28} {name:16} {dtype:9} {share:6.1%}" for (op, name, dtype), share in sorted(SHARES.items())]
    return "\n".join(rows)
