"""Kimi delta attention (KDA) on packed sequences."""

from typing import Any, Optional, Tuple

from torch import Tensor

from .._checks import check_dtype, check_same_device, check_tensor, value_error, with_checked_kinds
from .._delta_rule import (
    Options,
    check_by_token,
    check_chunks,
    check_heads,
    check_no_gate,
    checked_finite,
    checked_rate,
    run_packed,
    states_lie_v_first,
    sum_dtype,
)
from .._dtypes import DTYPES
from .._ops import ops
from ..packing import Boundaries
from . import autograd  # noqa: F401  registers fakes and gradients

Gate = Tuple[Optional[Tensor], Optional[Tensor], Optional[float]]


@with_checked_kinds
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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    cp_context: Optional[Any] = None,
    use_graph: bool = False,
    max_num_seqs: Optional[int] = None,
    *,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    chunk_size: int = 64,
    transpose_state_layout: Optional[bool] = None,
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
        v: ``[B, T, HV, V]``. HV is a multiple of H.
        g: log-decay ``[B, T, HV, K]``, any floating dtype, computed with in fp32. Normally <= 0; positive values grow
            the state and are taken as they are. With ``use_gate_in_kernel`` it is what the gate makes the log-decay of.
        beta: ``[B, T, HV]``, any floating dtype.
        initial_state: ``[N, HV, K, V]``, any floating dtype.
        scale, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
            transpose_state_layout: as in :func:`chunk_gated_delta_rule`, which says more of the arguments above too.
        use_gate_in_kernel: compute the log-decay here, from ``x = g + dt_bias``: ``-exp(A_log) softplus(x)``, or
            ``lower_bound sigmoid(exp(A_log) x)`` if ``lower_bound`` is given. Both are finite for any ``A_log``, as are
            their gradients: ``exp(A_log)`` beyond e^70 counts only where a decay still depends on it.
        A_log: ``[HV]`` or any shape of HV elements, any floating dtype. Only with ``use_gate_in_kernel``, which
            needs it; with ``lower_bound`` None stands for 0.
        dt_bias: ``[HV * K]`` or ``[HV, K]``, any floating dtype; 0 if None. Only with ``use_gate_in_kernel``.
        safe_gate: upstream's promise that no log-decay lies below -5, which its fast path needs. Every decay is safe
            here, so it changes nothing; together with ``use_gate_in_kernel`` it asks for ``lower_bound``, as there.
        lower_bound: what the log-decay of the bounded gate never falls below, negative. Without ``use_gate_in_kernel``
            it says the same of ``g`` and changes nothing.
        disable_recompute: upstream keeps more for the backward pass. Here it always recomputes; changes nothing.
        return_intermediate_states: False; the states before each chunk are not kept.
        cu_seqlens, cu_seqlens_cpu, seq_idx, position_ids: boundaries, as in :func:`chunk_gated_delta_rule`.
        cp_context: None, or a :class:`ContextParallel` (or flash-linear-attention's object): the tokens are this rank's
            shard of a pack that is cut over ranks. It has the boundaries; initial states are of the samples that begin
            on this rank, final states of those that end on it.
        use_graph: upstream makes launches that fit every content of ``cu_seqlens``, so that a graph captured from them
            can be replayed. Launches depend on shapes alone here in any case; changes nothing.
        max_num_seqs: with ``use_graph`` the number of sequences in ``cu_seqlens``, empty ones included, or None.
        chunk_size: 32 or 64, as upstream. The kernel cuts by its own size, so this changes nothing.

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
            device, or malformed or contradictory boundaries.
        NotImplementedError: ``return_intermediate_states``, a second derivative, or one in forward mode; ``cp_context``
            under ``torch.compile``.

    Example:
        >>> # two samples of 5 and 8 tokens in one row
        >>> o, state = chunk_kda(q, k, v, g, beta, cu_seqlens=[0, 5, 13], output_final_state=True)
        >>> state.shape  # [2, HV, K, V]

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025); names, order
    and meaning of the arguments: flash-linear-attention's function of this name. Derivation of both passes: README.md
    in this folder.
    """
    op = "chunk_kda"
    if return_intermediate_states:
        raise NotImplementedError(
            f"{op}: return_intermediate_states must be False, got {return_intermediate_states!r}: the states before "
            "each chunk are not kept; output_final_state gives those after each sequence"
        )
    check_chunks(op, chunk_size, (32, 64))
    _check_graph(op, use_graph, max_num_seqs, cu_seqlens)
    check_heads(op, q, k, v)
    check_by_token(op, "g", g, v, "K", q.shape[3])
    check_by_token(op, "beta", beta, v)
    gate = _checked_gate(op, use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound, q, k, v)
    options = Options(
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        states_lie_v_first(op, state_v_first, transpose_state_layout), cu_seqlens, cu_seqlens_cpu, seq_idx,
        position_ids, cp_context,
    )  # fmt: skip
    return run_packed(op, ops.kda_fwd, q, k, v, g, beta, gate, options)


@with_checked_kinds
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None,
    state_v_first: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    *,
    safe_gate: bool = False,
    transpose_state_layout: Optional[bool] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """What :func:`chunk_kda` computes, token by token: for decoding, where sequences have few tokens.

    Arguments, results and errors are those of :func:`chunk_kda`; the two differ by rounding only. Forward only.

    Raises:
        NotImplementedError: in the backward pass; call :func:`chunk_kda` to train.
    """
    op = "fused_recurrent_kda"
    check_heads(op, q, k, v)
    check_by_token(op, "g", g, v, "K", q.shape[3])
    check_by_token(op, "beta", beta, v)
    gate = _checked_gate(op, use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound, q, k, v)
    options = Options(
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        states_lie_v_first(op, state_v_first, transpose_state_layout), cu_seqlens, None, seq_idx, position_ids,
    )  # fmt: skip
    return run_packed(op, ops.kda_recurrent_fwd, q, k, v, g, beta, gate, options)


def _check_graph(op: str, use_graph: bool, max_num_seqs: Optional[int], cu_seqlens: Optional[Boundaries]) -> None:
    if max_num_seqs is None:
        return
    if use_graph and cu_seqlens is not None and len(cu_seqlens) - 1 != max_num_seqs:
        raise value_error(op, "max_num_seqs", f"be the {len(cu_seqlens) - 1} sequences of cu_seqlens", max_num_seqs)


def _checked_gate(
    op: str,
    use_gate: bool,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    safe_gate: bool,
    lower_bound: Optional[float],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Gate:
    """The gate's parameters as the kernels take them: A_log ``[HV]``, dt_bias ``[HV, K]``, in fp32 or fp64."""
    if lower_bound is not None:
        lower_bound = checked_finite(op, "lower_bound", lower_bound)
        if lower_bound >= 0:
            raise value_error(op, "lower_bound", "be negative", lower_bound)
    if not use_gate:
        check_no_gate(op, A_log=A_log, dt_bias=dt_bias)
        return None, None, None
    if safe_gate and lower_bound is None:
        raise value_error(op, "lower_bound", "be given with safe_gate and use_gate_in_kernel", None)
    value_heads, key_dim = v.shape[2], q.shape[3]
    wide = sum_dtype(q, k, v)
    if dt_bias is not None:
        check_tensor(op, "dt_bias", dt_bias)
        check_dtype(op, "dt_bias", dt_bias, DTYPES)
        check_same_device(op, "dt_bias", dt_bias, q.device)
        if tuple(dt_bias.shape) not in ((value_heads * key_dim,), (value_heads, key_dim)):
            expected = f"have shape [HV * K] or [HV, K] with HV, K = {(value_heads, key_dim)}"
            raise value_error(op, "dt_bias", expected, tuple(dt_bias.shape))
        dt_bias = dt_bias.reshape(value_heads, key_dim).to(wide)
    if A_log is not None:
        return checked_rate(op, A_log, v, wide), dt_bias, lower_bound
    if lower_bound is None:
        raise value_error(op, "A_log", "be given with use_gate_in_kernel, unless lower_bound is", None)
    return v.new_zeros(value_heads, dtype=wide), dt_bias, lower_bound
