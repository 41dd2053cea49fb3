"""Sigmoid, softplus and the log-decay of a delta rule's gate, by tensor operations that know no places.

torch's own sigmoid and softplus compute most elements in registers and the last few of a tensor, or of a thread's share
of it, by another formula, so that a token's bits would depend on what lies beside it. exp and log1p have one formula.
"""

import torch
from torch import Tensor

# exp(40) + 1 is exp(40) even in float64: from here on sigmoid is 1 and softplus the identity.
_FLAT = 40.0
# The largest exp(A_log), as a logarithm, that float32 holds with room for the factor beside it.
_STEEPEST = 70.0


def sigmoid(x: Tensor) -> Tensor:
    grown = x.clamp(max=_FLAT).exp()
    return grown / (1 + grown)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > _FLAT, x, x.clamp(max=_FLAT).exp().log1p())


def log_decay(x: Tensor, A_log: Tensor) -> Tensor:
    """``-exp(A_log) softplus(x)``, finite for any ``A_log``, which is broadcast against ``x``.

    What ``exp(A_log)`` has beyond e^70 goes into the exponent of softplus where decays still depend on it: below -40,
    where softplus is e^x. Above, such a decay is 0 in any case.
    """
    rate = A_log.clamp(max=_STEEPEST).exp()
    rest = (A_log - _STEEPEST).clamp(min=0)
    return -rate * torch.where(x < -_FLAT, (x + rest).clamp(max=0).exp(), softplus(x))
