"""How far a result may lie from the truth, for every op and dtype by one rule.

Truth is the reference in float64. The budget of a tensor is

    2 * (error of the same reference run in the working dtype) + 4 * eps(dtype) * max|truth|

for its largest error, and the same with root mean squares for its RMS error. Tensors that sum over tokens (gradients
of parameters) get sqrt(summands) times the second term: rounding errors of a sum grow like that. No test has numbers
of its own; EXCEPTIONS is the only place where a tensor may have a larger factor, with the reason.

The reference's error is one draw, and a lucky one is small: of a gradient of two elements that cancel, it was seen
anywhere between 0.1 and 20 units of rounding, and it changes with the CPU on which torch runs. A result beyond that
budget is therefore measured once more, by the largest of 1 + DRAWS errors: those of the reference run in the working
dtype on inputs that differ from these in their last place. Nothing computed in that dtype can promise more (Higham,
Accuracy and Stability of Numerical Algorithms, 1.5: forward, backward and mixed error).
"""

import math
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

REFERENCE_FACTOR = 2.0
ROUNDING_FACTOR = 4.0
DRAWS = 8

# (op, tensor) -> (factor on the budget, reason)
EXCEPTIONS: Dict[Tuple[str, str], Tuple[float, str]] = {}


# (op, tensor, dtype) -> the largest share of its budget that the tensor used.
SHARES: Dict[Tuple[str, str, str], float] = {}


def check_close(
    op: str,
    name: str,
    ours: Tensor,
    working: Tensor,
    truth: Tensor,
    summands: int = 1,
    more_errors: Optional[Callable[[], List[Tensor]]] = None,
) -> None:
    """Raise AssertionError if ``ours`` is further from ``truth`` than its budget.

    Args:
        op: name of the op.
        name: name of the tensor, for example ``dx``.
        ours: the kernel's result, in the working dtype or the dtype that the op returns.
        working: the reference's result in the working dtype, whose error sets the scale.
        truth: the reference's result in float64.
        summands: tokens summed into each element.
        more_errors: distances from ``truth`` of the reference's results in the working dtype on :func:`nudged` inputs;
            called only for a result that is beyond the budget without them.
    """
    assert ours.shape == truth.shape, f"{op}: {name} has shape {tuple(ours.shape)}, truth {tuple(truth.shape)}"
    if truth.numel() == 0:
        return
    assert torch.isfinite(ours).all(), f"{op}: {name} is not finite in {int((~torch.isfinite(ours)).sum())} places"
    error = (ours.double() - truth).abs()
    eps = torch.finfo(ours.dtype).eps * math.sqrt(summands)
    tiny = torch.finfo(ours.dtype).tiny
    factor, _ = EXCEPTIONS.get((op, name), (1.0, ""))

    errors = [(working.double() - truth).abs()]

    def budget(norm: Callable[[Tensor], float]) -> float:
        scale = max(norm(draw) for draw in errors)
        return max(factor * (REFERENCE_FACTOR * scale + ROUNDING_FACTOR * eps * norm(truth.abs())), tiny)

    def share() -> float:
        return max(norm(error) / budget(norm) for norm in (_largest, _rms))

    if share() > 1 and more_errors is not None:
        errors += more_errors()
    if share() > 1:
        place = int(error.argmax())
        raise AssertionError(
            f"{op}: {name} ({ours.dtype}) is off by {_largest(error):.3g}, budget {budget(_largest):.3g}; "
            f"RMS {_rms(error):.3g}, budget {budget(_rms):.3g}; worst at flat index {place}: "
            f"{float(ours.flatten()[place]):.9g} instead of {float(truth.flatten()[place]):.9g}"
        )
    note_share((op, name, str(ours.dtype).replace("torch.", "")), share())


def nudged(inputs: Dict[str, Tensor], draw: int) -> Dict[str, Tensor]:
    """The inputs with each number changed by one eps of its dtype, up or down by chance."""
    generator = torch.Generator().manual_seed(draw)
    changed = dict(inputs)
    for name, value in inputs.items():
        if value.is_floating_point():
            sign = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.float64) * 2 - 1
            changed[name] = (value.double() * (1 + sign * torch.finfo(value.dtype).eps)).to(value.dtype)
    return changed


def _largest(tensor: Tensor) -> float:
    return float(tensor.max())


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def note_share(key: Tuple[str, str, str], share: float) -> None:
    SHARES[key] = max(SHARES.get(key, 0.0), share)


def usage_table() -> str:
    """The largest share of its budget that each tensor used, one line each."""
    rows = [f"  {op:28} {name:16} {dtype:9} {share:6.1%}" for (op, name, dtype), share in sorted(SHARES.items())]
    return "\n".join(rows)
