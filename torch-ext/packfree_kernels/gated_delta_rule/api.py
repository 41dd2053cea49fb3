"""Gated delta rule (Gated DeltaNet) on packed sequences."""

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from .._checks import check_dtype, check_same_device, check_shape, check_tensor, value_error, with_checked_kinds
from .._delta_rule import (
    Options,
    check_by_token,
    check_chunk_indices,
    check_chunks,
    check_heads,
    check_no_gate,
    checked_rate,
    run_packed,
    states_lie_v_first,
    sum_dtype,
)
from .._dtypes import DTYPES
from .._gates import log_decay
from .._ops import ops
from ..packing import Boundaries
from . import autograd  # noqa: F401  registers fakes and gradients


@with_checked_kinds
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    chunk_indices: Optional[Tensor] = None,
    cp_context: Optional[Any] = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    chunk_size: int = 64,
    transpose_state_layout: Optional[bool] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Linear attention whose state decays by ``exp(g)`` and is corrected towards ``v`` at ``k``, chunk by chunk.

    Formula (one value head, state ``S`` ``[K, V]``)::

        u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)
        S_t = exp(g_t) S_{t-1} + k_t u_t^T
        o_t = scale S_t^T q_t

    Each sequence starts from its initial state (or 0) and never sees another one's tokens.

    Args:
        q: queries ``[B, T, H, K]``, fp32, bf16 or fp16 (fp64 runs too, in plain scalar code).
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``. HV is a multiple of H; value head ``h`` reads key head ``h // (HV / H)``. K and V
            are 1 to 256. If q, k and v differ in dtype, the widest is computed with.
        g: log-decay ``[B, T, HV]``, any floating dtype, computed with in fp32. Normally <= 0; positive values grow the
            state and are taken as they are. With ``use_gate_in_kernel`` it is what the gate makes the log-decay of.
        beta: strength of the correction ``[B, T, HV]``, any floating dtype and any size.
        scale: factor of q; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, one state a sequence (B states without boundaries), any floating dtype. Rows
            are the key axis.
        output_final_state: whether to return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: divide each row of q and k by ``sqrt(|x|^2 + 1e-6)`` first, in fp32.
        use_beta_sigmoid_in_kernel: ``beta`` holds logits; the strength is ``sigmoid(beta)``, computed in fp32.
        allow_neg_eigval: the strength is ``2 sigmoid(beta)``, so that a correction can turn the state's sign at ``k``.
            Only with ``use_beta_sigmoid_in_kernel``, as upstream.
        state_v_first: states come and go as ``[N, HV, V, K]``.
        cu_seqlens: offsets ``[N + 1]`` of the sequences packed in one row (B = 1), int32, int64 or a list of ints.
        cu_seqlens_cpu: a copy of ``cu_seqlens`` on the CPU. Not needed: only compared, where that costs no wait.
        chunk_indices: upstream's list of chunks ``[chunks, 2]``, beside ``cu_seqlens``. Not needed and not read: chunks
            are counted here from ``cu_seqlens``.
        cp_context: None, or a :class:`ContextParallel` (or flash-linear-attention's object): the tokens are this rank's
            shard of a pack that is cut over ranks. It has the boundaries; initial states are of the samples that begin
            on this rank, final states of those that end on it.
        use_gate_in_kernel: compute the log-decay here, ``-exp(A_log) softplus(g + dt_bias)``, in fp32. It is finite for
            any ``A_log``, as are its gradients.
        A_log: ``[HV]`` or any shape of HV elements, any floating dtype. Only with ``use_gate_in_kernel``, which
            needs it.
        dt_bias: ``[HV]``, any floating dtype; 0 if None. Only with ``use_gate_in_kernel``.
        chunk_size: 16, 32 or 64, as upstream. The kernel cuts by its own size, so this changes nothing.
        transpose_state_layout: upstream's old name of ``state_v_first``.
        seq_idx: labels ``[B, T]`` that never decrease along a row; negative labels are tail padding.
        position_ids: positions ``[T]``, ``[B, T]``, ``[3, B, T]`` or ``[4, B, T]``; used where neither of the others is
            given. Without any boundaries each row is one sequence. States beside labels or positions on a GPU wait for
            their values once, and need ``cu_seqlens`` under ``torch.compile``.

    Returns:
        ``o`` ``[B, T, HV, V]`` in q's dtype, exactly 0 at padding tokens, and the final states ``[N, HV, K, V]`` in
        fp32 (fp64 for fp64 inputs) or None. An empty sequence returns its initial state.

    Precision: products, sums and states in fp32, whatever the input dtype.
    Gradients: of q, k, v, g, beta, A_log, dt_bias and initial_state, from both outputs, each in its tensor's dtype.
    Saved for the backward pass: the inputs, and of a gate or sigmoid some numbers for each token and value head.
    Determinism: a sequence's results and gradients are the same bits packed or alone, on any number of threads; the
    gradients of A_log and dt_bias, which sum over all tokens, repeat.
    Devices: CPU; CUDA through Triton, which takes no fp64.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not named above.
        ValueError: shapes that do not fit, a head dim above 256, HV no multiple of H, a state of another shape or
            number, a tensor on another device, a gate's argument without ``use_gate_in_kernel`` or one that is missing
            with it, or malformed or contradictory boundaries.
        NotImplementedError: a second derivative, or one in forward mode; ``cp_context`` under ``torch.compile``.

    Example:
        >>> # two samples of 5 and 8 tokens in one row
        >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=[0, 5, 13], output_final_state=True)
        >>> state.shape  # [2, HV, K, V]

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); names, order and
    meaning of the arguments: flash-linear-attention's function of this name. Derivation of both passes: README.md in
    this folder.
    """
    op = "chunk_gated_delta_rule"
    check_chunks(op, chunk_size, (16, 32, 64))
    check_chunk_indices(op, chunk_indices, cu_seqlens)
    check_heads(op, q, k, v)
    check_by_token(op, "g", g, v)
    check_by_token(op, "beta", beta, v)
    options = Options(
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        states_lie_v_first(op, state_v_first, transpose_state_layout), cu_seqlens, cu_seqlens_cpu, seq_idx,
        position_ids, cp_context,
    )  # fmt: skip
    decay = _checked_gate(op, use_gate_in_kernel, A_log, dt_bias, q, k, v)
    return run_packed(op, ops.gated_delta_rule_fwd, q, k, v, g, beta, (), options, decay)


@with_checked_kinds
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor] = None,
    gk: Optional[Tensor] = None,
    gv: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    *,
    transpose_state_layout: Optional[bool] = None,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """What :func:`chunk_gated_delta_rule` computes, token by token: for decoding, where sequences have few tokens.

    Arguments, results and errors are those of :func:`chunk_gated_delta_rule`, but for those below; the two functions
    differ by rounding only. Forward only.

    Args:
        g: None is no decay.
        gk: log-decay of each key channel ``[B, T, HV, K]``, any floating dtype, beside that of ``g``.
        gv: log-decay of each value channel ``[B, T, HV, V]``, likewise. With both, V times the numbers of ``gk`` are
            made.
        beta: None is 1.

    Raises:
        NotImplementedError: in the backward pass; call :func:`chunk_gated_delta_rule` to train.
    """
    op = "fused_recurrent_gated_delta_rule"
    check_heads(op, q, k, v)
    if g is None:
        if use_gate_in_kernel:
            raise value_error(op, "g", "be given with use_gate_in_kernel", None)
        g = v.new_zeros(v.shape[:3], dtype=torch.float32)
    beta = v.new_ones(v.shape[:3], dtype=torch.float32) if beta is None else beta
    check_by_token(op, "g", g, v)
    check_by_token(op, "beta", beta, v)
    options = Options(
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        states_lie_v_first(op, state_v_first, transpose_state_layout), cu_seqlens, None, seq_idx, position_ids,
    )  # fmt: skip
    kernel = ops.gated_delta_rule_recurrent_fwd
    if gk is not None or gv is not None:
        kernel = _by_channel(op, gk, gv, q, v)
    decay = _checked_gate(op, use_gate_in_kernel, A_log, dt_bias, q, k, v)
    return run_packed(op, kernel, q, k, v, g, beta, (), options, decay)


def _checked_gate(
    op: str, use_gate: bool, A_log: Optional[Tensor], dt_bias: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Optional[Callable[[Tensor], Tensor]]:
    """What makes log-decays ``[B, T, HV]`` of the gate's input, or None where they are given."""
    if not use_gate:
        check_no_gate(op, A_log=A_log, dt_bias=dt_bias)
        return None
    if A_log is None:
        raise value_error(op, "A_log", "be given with use_gate_in_kernel", None)
    wide = sum_dtype(q, k, v)
    rate, bias = checked_rate(op, A_log, v, wide), None
    if dt_bias is not None:
        check_tensor(op, "dt_bias", dt_bias)
        check_dtype(op, "dt_bias", dt_bias, DTYPES)
        check_same_device(op, "dt_bias", dt_bias, q.device)
        check_shape(op, "dt_bias", dt_bias, (v.shape[2],), "[HV]")
        bias = dt_bias.to(wide)
    return lambda x: log_decay(x if bias is None else x + bias, rate)


def _by_channel(op: str, gk: Optional[Tensor], gv: Optional[Tensor], q: Tensor, v: Tensor) -> Callable:
    """The recurrent op where channels have decays of their own, beside the one of their head.

    With one a value channel, each channel is a value head whose state is one column: nothing else joins the channels of
    a head. With one a key channel it is KDA's recurrence.
    """
    batch, length, value_heads, value_dim = v.shape
    key_dim = q.shape[3]
    if gk is not None:
        check_by_token(op, "gk", gk, v, "K", key_dim)
        gk = gk.reshape(batch * length, value_heads, key_dim)
    if gv is not None:
        check_by_token(op, "gv", gv, v, "V", value_dim)
        gv = gv.reshape(batch * length, value_heads, value_dim)
        gk = None if gk is None else gk.repeat_interleave(value_dim, dim=1)

    def kernel(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, want_state):
        if gv is not None:
            g = (g[..., None] + gv).flatten(1)
            v, beta = v.reshape(*g.shape, 1), beta.repeat_interleave(value_dim, dim=1)
            if initial_state is not None:
                initial_state = initial_state.transpose(2, 3).reshape(-1, g.shape[1], key_dim, 1)
        rest = (cu_seqlens, initial_state, scale, l2norm, want_state)
        if gk is None:
            o, state = ops.gated_delta_rule_recurrent_fwd(q, k, v, g, beta, *rest)
        else:
            o, state = ops.kda_recurrent_fwd(q, k, v, g[..., None] + gk, beta, None, None, None, *rest)
        if gv is not None:
            o = o.reshape(-1, value_heads, value_dim)
            state = state.reshape(-1, value_heads, value_dim, key_dim).transpose(2, 3) if want_state else state
        return o, state

    return kernel
