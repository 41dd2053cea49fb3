"""Kimi delta attention (KDA) on packed sequences."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._checks import check_dtype, check_same_device, check_tensor, value_error
from .._delta_rule import DTYPES, check_tokens, checked_number, run_packed
from .._ops import ops
from ..packing import Boundaries
from . import autograd  # noqa: F401  registers fakes and gradients


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    *,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Linear attention whose state decays by ``exp(g)`` in each key channel and is corrected towards ``v`` at ``k``.

    Formula (one value head, state ``S`` ``[K, V]``)::

        u_t = beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)
        S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T
        o_t = scale S_t^T q_t

    Each sequence starts from its initial state (or 0) and never sees another one's tokens.

    Args:
        q, k: ``[B, T, H, K]``, fp32, bf16 or fp16 (fp64 runs too, in plain scalar code).
        v: ``[B, T, HV, V]``, q's dtype. HV is a multiple of H.
        g: log-decay ``[B, T, HV, K]``, any floating dtype, computed with in fp32. Normally <= 0; positive values grow
            the state and are taken as they are. With ``use_gate_in_kernel`` it is what the gate makes the log-decay of.
        beta: ``[B, T, HV]``, any floating dtype.
        initial_state: ``[N, HV, K, V]``, any floating dtype.
        scale, output_final_state, use_qk_l2norm_in_kernel: as in :func:`chunk_gated_delta_rule`, which says more of the
            arguments above too.
        use_gate_in_kernel: compute the log-decay here, from ``x = g + dt_bias``: ``-exp(A_log) softplus(x)``, or
            ``lower_bound sigmoid(exp(A_log) x)`` if ``lower_bound`` is given. Both are finite for any ``A_log``, as are
            their gradients: ``exp(A_log)`` beyond e^70 counts only where a decay still depends on it.
        A_log: ``[HV]`` or any shape of HV elements, any floating dtype. Only with ``use_gate_in_kernel``, which
            needs it.
        dt_bias: ``[HV * K]`` or ``[HV, K]``, any floating dtype; 0 if None. Only with ``use_gate_in_kernel``.
        safe_gate: upstream's promise that no log-decay lies below -5, which its fast path needs. Every decay is safe
            here, so it changes nothing; together with ``use_gate_in_kernel`` it asks for ``lower_bound``, as there.
        lower_bound: what the log-decay of the bounded gate never falls below, negative. Only with
            ``use_gate_in_kernel``.
        cu_seqlens, seq_idx, position_ids: boundaries, as in :func:`chunk_gated_delta_rule`.

    Returns:
        ``o`` ``[B, T, HV, V]`` in q's dtype, exactly 0 at padding tokens, and the final states ``[N, HV, K, V]`` in
        fp32 (fp64 for fp64 inputs) or None. An empty sequence returns its initial state.

    Precision: products, sums, decays and states in fp32, whatever the input dtype. A decay is a product over exactly
    the tokens it spans, so neither strong decays nor small ones behind a strong one are lost.
    Gradients: of q, k, v, g, beta, A_log, dt_bias and initial_state, from both outputs, each in its tensor's dtype.
    Saved for the backward pass: the inputs only.
    Determinism: a sequence's results and gradients are the same bits packed or alone, on any number of threads; the
    gradients of A_log and dt_bias, which sum over all tokens, are the same bits in every run.
    Devices: CPU; CUDA through Triton, which takes no fp64.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not named above.
        ValueError: shapes that do not fit, a head dim above 256, HV no multiple of H, a state of another shape or
            number, a gate argument without ``use_gate_in_kernel`` or one that is missing with it, a tensor on another
            device, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Example:
        >>> # two samples of 5 and 8 tokens in one row
        >>> o, state = chunk_kda(q, k, v, g, beta, cu_seqlens=[0, 5, 13], output_final_state=True)
        >>> state.shape  # [2, HV, K, V]

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025); argument names and order
    of flash-linear-attention's function of this name. Derivation of both passes: README.md in this folder.
    """
    op = "chunk_kda"
    check_tokens(op, q, k, v, g, beta, decay_per_channel=True)
    gate = _checked_gate(op, use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound, q, g)
    return run_packed(
        op, ops.kda_fwd, q, k, v, g, beta, gate, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, seq_idx, position_ids,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    *,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """What :func:`chunk_kda` computes, token by token: for decoding, where sequences have few tokens.

    Arguments, results and errors are those of :func:`chunk_kda`; the two differ by rounding only. Forward only.

    Raises:
        NotImplementedError: in the backward pass; call :func:`chunk_kda` to train.
    """
    op = "fused_recurrent_kda"
    check_tokens(op, q, k, v, g, beta, decay_per_channel=True)
    gate = _checked_gate(op, use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound, q, g)
    return run_packed(
        op, ops.kda_recurrent_fwd, q, k, v, g, beta, gate, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, seq_idx, position_ids,
    )  # fmt: skip


def _checked_gate(
    op: str,
    use_gate: bool,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    safe_gate: bool,
    lower_bound: Optional[float],
    q: Tensor,
    g: Tensor,
) -> Tuple[Optional[Tensor], Optional[Tensor], Optional[float]]:
    """The gate's parameters as the kernels take them: A_log ``[HV]``, dt_bias ``[HV, K]``, in fp32 or fp64."""
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if value is not None:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise value_error(op, name, "be None without use_gate_in_kernel", got)
        return None, None, None
    value_heads, key_dim = g.shape[2:]
    wide = torch.promote_types(q.dtype, torch.float32)
    check_tensor(op, "A_log", A_log)
    check_dtype(op, "A_log", A_log, DTYPES)
    check_same_device(op, "A_log", A_log, q.device)
    if A_log.numel() != value_heads:
        raise value_error(op, "A_log", f"have HV = {value_heads} elements", f"shape {tuple(A_log.shape)}")
    if dt_bias is not None:
        check_tensor(op, "dt_bias", dt_bias)
        check_dtype(op, "dt_bias", dt_bias, DTYPES)
        check_same_device(op, "dt_bias", dt_bias, q.device)
        if tuple(dt_bias.shape) not in ((value_heads * key_dim,), (value_heads, key_dim)):
            expected = f"have shape [HV * K] or [HV, K] with HV, K = {(value_heads, key_dim)}"
            raise value_error(op, "dt_bias", expected, tuple(dt_bias.shape))
        dt_bias = dt_bias.reshape(value_heads, key_dim).to(wide)
    if lower_bound is not None:
        lower_bound = checked_number(op, "lower_bound", lower_bound)
        if lower_bound >= 0:
            raise value_error(op, "lower_bound", "be negative", lower_bound)
    elif safe_gate:
        raise value_error(op, "lower_bound", "be given with safe_gate and use_gate_in_kernel", None)
    return A_log.reshape(value_heads).to(wide), dt_bias, lower_bound
