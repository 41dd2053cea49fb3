"""This package's functions as layers, under the names and with the signatures that transformers registers them by.

For ``kernels.register_kernel_mapping`` and ``kernelize``, which put a layer's ``forward`` in the place of
transformers' own::

    mapping = {"causal_conv1d_fn": {"cpu": LayerRepository("...", layer_name="causal_conv1d_fn", version=1)}}

Whoever loads the package needs no mapping: its hooks reach packed calls by themselves. A mapping also serves calls
that are not packed, and decoding. Boundaries are taken from the keywords ``seq_idx``, ``cu_seqlens`` and
``cu_seq_lens_q``; all other keywords, which models hand to every function, are ignored.

The fused mixers (``mamba_split_conv1d_scan_combined``, ``mamba_inner_fn``) return None, upon which every model runs its
convolution and scan one by one: some models would change with them (see ``hooks/functions.py``).
"""

from typing import Any, Optional, Tuple, Union

import torch.nn as nn
from torch import Tensor

from .causal_conv1d import causal_conv1d_fn as _causal_conv1d_fn
from .causal_conv1d import causal_conv1d_update as _causal_conv1d_update
from .gated_delta_rule import chunk_gated_delta_rule as _chunk_gated_delta_rule
from .gated_delta_rule import fused_recurrent_gated_delta_rule as _fused_recurrent_gated_delta_rule
from .hooks.functions import explicit_boundaries as _explicit_boundaries
from .kda import chunk_kda as _chunk_kda
from .kda import fused_recurrent_kda as _fused_recurrent_kda
from .mamba1_scan import selective_scan_fn as _selective_scan_fn
from .mamba2_scan import mamba_chunk_scan_combined as _mamba_chunk_scan_combined
from .mamba2_scan import selective_state_update as _selective_state_update

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
]

_Scanned = Union[Tensor, Tuple[Tensor, Tensor]]
_Delta = Tuple[Tensor, Optional[Tensor]]


class causal_conv1d_fn(nn.Module):
    """The package's ``causal_conv1d_fn``."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        activation: Optional[str] = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states ``[B, D, T]``, weight ``[D, W]``, bias ``[D]`` -> ``[B, D, T]``."""
        cuts = _explicit_boundaries("causal_conv1d_fn", hidden_states.shape[0], hidden_states.shape[2], kwargs)
        return _causal_conv1d_fn(hidden_states, weight, bias, activation=activation, **cuts)


class causal_conv1d_update(nn.Module):
    """The package's ``causal_conv1d_update``, for decoding."""

    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        activation: Optional[str] = None,
    ) -> Tensor:
        """hidden_states ``[B, D, T]``, conv_state ``[B, D, L]`` (updated in place), weight ``[D, W]``."""
        return _causal_conv1d_update(hidden_states, conv_state, weight, bias, activation)


class chunk_gated_delta_rule(nn.Module):
    """The package's ``chunk_gated_delta_rule``. ``chunk_size`` changes nothing: ours cuts by its own."""

    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Optional[Tensor] = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> _Delta:
        """query, key ``[B, T, H, K]``, value ``[B, T, HV, V]``, g, beta ``[B, T, HV]`` -> as value, states or None."""
        return _chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **_explicit_boundaries("chunk_gated_delta_rule", query.shape[0], query.shape[1], kwargs),
        )


class fused_recurrent_gated_delta_rule(nn.Module):
    """The package's ``fused_recurrent_gated_delta_rule``, for decoding."""

    has_backward = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Optional[Tensor] = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> _Delta:
        """Shapes as ``chunk_gated_delta_rule``."""
        return _fused_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **_explicit_boundaries("fused_recurrent_gated_delta_rule", query.shape[0], query.shape[1], kwargs),
        )


class chunk_kda(nn.Module):
    """The package's ``chunk_kda``. ``chunk_size`` changes nothing: ours cuts by its own."""

    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Optional[Tensor] = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> _Delta:
        """query, key ``[B, T, H, K]``, value ``[B, T, HV, V]``, g ``[B, T, HV, K]``, beta ``[B, T, HV]``."""
        return _chunk_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **_explicit_boundaries("chunk_kda", query.shape[0], query.shape[1], kwargs),
        )


class fused_recurrent_kda(nn.Module):
    """The package's ``fused_recurrent_kda``, for decoding."""

    has_backward = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Optional[Tensor],
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> _Delta:
        """Shapes as ``chunk_kda``."""
        return _fused_recurrent_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **_explicit_boundaries("fused_recurrent_kda", query.shape[0], query.shape[1], kwargs),
        )


class mamba_chunk_scan_combined(nn.Module):
    """The package's ``mamba_chunk_scan_combined``."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Optional[Tensor] = None,
        dt_bias: Optional[Tensor] = None,
        initial_states: Optional[Tensor] = None,
        dt_softplus: bool = False,
        dt_limit: Tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: Any,
    ) -> _Scanned:
        """hidden_states ``[B, T, H, P]``, dt ``[B, T, H]``, A ``[H]``, B, C ``[B, T, G, S]``; z among the keywords."""
        return _mamba_chunk_scan_combined(
            hidden_states,
            dt,
            A,
            B,
            C,
            chunk_size,
            D=D,
            z=kwargs.get("z"),
            dt_bias=dt_bias,
            initial_states=initial_states,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=return_final_states,
            **_explicit_boundaries("mamba_chunk_scan_combined", hidden_states.shape[0], hidden_states.shape[1], kwargs),
        )


class mamba_split_conv1d_scan_combined(nn.Module):
    """Lets a model run its convolution, scan and norm one after another."""

    can_torch_compile = True

    def forward(
        self,
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Optional[Tensor],
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        initial_states: Optional[Tensor] = None,
        dt_limit: Tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        activation: str = "silu",
        rmsnorm_weight: Optional[Tensor] = None,
        rmsnorm_eps: float = 1e-6,
        outproj_weight: Optional[Tensor] = None,
        outproj_bias: Optional[Tensor] = None,
        headdim: Optional[int] = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
        **kwargs: Any,
    ) -> None:
        """None, whatever the arguments."""
        return None


class mamba_inner_fn(nn.Module):
    """Lets a model run its convolution, projections and scan one after another."""

    can_torch_compile = True

    def forward(
        self,
        xz: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Optional[Tensor],
        x_proj_weight: Tensor,
        delta_proj_weight: Tensor,
        out_proj_weight: Tensor,
        out_proj_bias: Optional[Tensor],
        A: Tensor,
        B: Optional[Tensor] = None,
        C: Optional[Tensor] = None,
        D: Optional[Tensor] = None,
        delta_bias: Optional[Tensor] = None,
        delta_softplus: bool = True,
        b_rms_weight: Optional[Tensor] = None,
        c_rms_weight: Optional[Tensor] = None,
        dt_rms_weight: Optional[Tensor] = None,
        b_c_dt_rms_eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        """None, whatever the arguments."""
        return None


class selective_scan_fn(nn.Module):
    """The package's ``selective_scan_fn``. The choice between transformers' own forms of the scan is ignored."""

    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Optional[Tensor] = None,
        z: Optional[Tensor] = None,
        delta_bias: Optional[Tensor] = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs: Any,
    ) -> _Scanned:
        """hidden_states, dt, z ``[B, D, T]``, A ``[D, N]``, B, C ``[B, N, T]``, D ``[D]``."""
        return _selective_scan_fn(
            hidden_states,
            dt,
            A,
            B,
            C,
            D=D,
            z=z,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            return_last_state=return_last_state,
            **_explicit_boundaries("selective_scan_fn", hidden_states.shape[0], hidden_states.shape[2], kwargs),
        )


class selective_state_update(nn.Module):
    """The package's ``selective_state_update``, for decoding."""

    has_backward = False

    def forward(
        self,
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Optional[Tensor] = None,
        dt_bias: Optional[Tensor] = None,
        dt_softplus: bool = False,
        z: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Tensor:
        """state ``[B, H, P, S]`` or ``[B, P, S]`` (updated in place), hidden_states, dt and z without the S."""
        return _selective_state_update(
            state, hidden_states, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus
        )
