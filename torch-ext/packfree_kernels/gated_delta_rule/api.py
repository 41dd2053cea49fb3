"""Gated delta rule (Gated DeltaNet) on packed sequences."""

from typing import Optional, Tuple

from torch import Tensor

from .._delta_rule import check_tokens, run_packed
from .._ops import ops
from ..packing import Boundaries
from . import autograd  # noqa: F401  registers fakes and gradients


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
    cu_seqlens: Optional[Boundaries] = None,
    *,
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
        k: keys ``[B, T, H, K]``, q's dtype.
        v: values ``[B, T, HV, V]``, q's dtype. HV is a multiple of H; value head ``h`` reads key head
            ``h // (HV / H)``. K and V are 1 to 256.
        g: log-decay ``[B, T, HV]``, any floating dtype, computed with in fp32. Normally <= 0; positive values grow the
            state and are taken as they are.
        beta: strength of the correction ``[B, T, HV]``, any floating dtype.
        scale: factor of q; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, one state a sequence (B states without boundaries), any floating dtype. Rows
            are the key axis.
        output_final_state: whether to return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: divide each row of q and k by ``sqrt(|x|^2 + 1e-6)`` first, in fp32.
        cu_seqlens: offsets ``[N + 1]`` of the sequences packed in one row (B = 1), int32, int64 or a list of ints.
        seq_idx: labels ``[B, T]`` that never decrease along a row; negative labels are tail padding.
        position_ids: positions ``[T]``, ``[B, T]``, ``[3, B, T]`` or ``[4, B, T]``; used where neither of the others is
            given. Without any boundaries each row is one sequence. Under ``torch.compile`` labels and positions stand
            for ``B * T`` sequences, most of them empty, so a smaller number of states needs ``cu_seqlens`` there.

    Returns:
        ``o`` ``[B, T, HV, V]`` in q's dtype, exactly 0 at padding tokens, and the final states ``[N, HV, K, V]`` in
        fp32 (fp64 for fp64 inputs) or None. An empty sequence returns its initial state.

    Precision: products, sums and states in fp32, whatever the input dtype.
    Gradients: of q, k, v, g, beta and initial_state, from both outputs, each in its tensor's dtype. Saved for the
    backward pass: the inputs only.
    Determinism: a sequence's results and gradients are the same bits packed or alone, on any number of threads.
    Devices: CPU; CUDA through Triton, which takes no fp64.

    Raises:
        TypeError: an argument that is no tensor, or of a dtype not named above.
        ValueError: shapes that do not fit, a head dim above 256, HV no multiple of H, a state of another shape or
            number, a tensor on another device, or malformed boundaries.
        NotImplementedError: a second derivative, or one in forward mode.

    Example:
        >>> # two samples of 5 and 8 tokens in one row
        >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=[0, 5, 13], output_final_state=True)
        >>> state.shape  # [2, HV, K, V]

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); argument order of
    flash-linear-attention's function of this name. Derivation of both passes: README.md in this folder.
    """
    op = "chunk_gated_delta_rule"
    check_tokens(op, q, k, v, g, beta, decay_per_channel=False)
    return run_packed(
        op, ops.gated_delta_rule_fwd, q, k, v, g, beta, (), scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, seq_idx, position_ids,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Optional[Boundaries] = None,
    *,
    seq_idx: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """What :func:`chunk_gated_delta_rule` computes, token by token: for decoding, where sequences have few tokens.

    Arguments, results and errors are those of :func:`chunk_gated_delta_rule`; the two differ by rounding only. Forward
    only.

    Raises:
        NotImplementedError: in the backward pass; call :func:`chunk_gated_delta_rule` to train.
    """
    op = "fused_recurrent_gated_delta_rule"
    check_tokens(op, q, k, v, g, beta, decay_per_channel=False)
    return run_packed(
        op, ops.gated_delta_rule_recurrent_fwd, q, k, v, g, beta, (), scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, seq_idx, position_ids,
    )  # fmt: skip
