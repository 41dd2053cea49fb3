"""Mamba-2's fused layer as the harness calls it."""

from dataclasses import dataclass, replace
from typing import Optional

import torch
import torch.nn.functional as F

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest


@dataclass(frozen=True)
class Layer:
    """Sizes and options of a fused call."""

    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    state_dim: int = 6
    beside: int = 0
    norm: Optional[bool] = False  # norm_before_gate, or None without a norm
    projection: bool = True
    initial: bool = True

    def make(self, pack: Pack, dtype: torch.dtype):
        inner = self.heads * self.head_dim
        convolved = inner + 2 * self.groups * self.state_dim
        inputs = {
            "zxbcdt": torch.randn(1, pack.tokens, 2 * self.beside + inner + convolved + self.heads),
            "conv1d_weight": torch.randn(convolved, 4) / 2,
            "conv1d_bias": torch.randn(convolved),
            "dt_bias": torch.randn(self.heads),
            "A": -torch.rand(self.heads),
            "D": torch.randn(self.heads),
        }
        if self.initial:
            inputs["initial_states"] = torch.randn(len(pack.lengths), self.heads, self.head_dim, self.state_dim)
        if self.norm is not None:
            inputs["rmsnorm_weight"] = torch.randn(inner)
        if self.projection:
            inputs["outproj_weight"] = torch.randn(10, self.beside + inner) / inner**0.5
            inputs["outproj_bias"] = torch.randn(10)
        return {name: value.to(dtype) for name, value in inputs.items()}

    def run(self, inputs, **boundaries):
        out, states = load_kernel().mamba_split_conv1d_scan_combined(
            **inputs,
            **boundaries,
            chunk_size=16,
            return_final_states=True,
            rmsnorm_eps=1e-5,
            headdim=self.head_dim,
            ngroups=self.groups,
            norm_before_gate=bool(self.norm),
        )
        return {"out": out, "final_states": states}

    def reference(self, inputs, cu_seqlens):
        kernel = load_kernel()
        H, G, P, S = self.heads, self.groups, self.head_dim, self.state_dim
        inner = H * P
        dtype = inputs["zxbcdt"].dtype
        wide = torch.promote_types(dtype, torch.float32)
        mlp, z, xBC, dt = inputs["zxbcdt"][0].split([2 * self.beside, inner, inner + 2 * G * S, H], -1)
        xBC, _ = kernel.causal_conv1d.causal_conv1d_reference(
            xBC.t(), inputs["conv1d_weight"], inputs["conv1d_bias"], cu_seqlens, activation="silu"
        )
        x, B, C = xBC.t().split([inner, G * S, G * S], -1)
        gate = z.unflatten(-1, (H, P))
        y, states = kernel.mamba2_scan.mamba2_scan_reference(
            x.unflatten(-1, (H, P)),
            dt,
            inputs["A"],
            B.unflatten(-1, (G, S)),
            C.unflatten(-1, (G, S)),
            cu_seqlens,
            inputs["D"],
            gate if self.norm is None else None,
            inputs["dt_bias"],
            inputs.get("initial_states"),
            dt_softplus=True,
        )
        y = y.flatten(1).to(wide)
        if self.norm is not None:
            factor = F.silu(z.to(wide))
            y = y if self.norm else y * factor
            parts = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in y.chunk(G, -1)]
            y = torch.cat(parts, -1) * inputs["rmsnorm_weight"].to(wide)
            y = y * factor if self.norm else y
        y = y.to(dtype)
        if self.beside:
            y = torch.cat([F.silu(mlp[:, : self.beside]) * mlp[:, self.beside :], y], -1)
        if self.projection:
            y = F.linear(y, inputs["outproj_weight"], inputs["outproj_bias"])
            y = torch.where(torch.arange(y.shape[0])[:, None] < cu_seqlens[-1], y, 0)
        return {"out": y[None], "final_states": states}

    def without_projection(self) -> "Layer":
        """A matrix product of torch may round by its number of rows; the rest is the same bits packed or alone."""
        return replace(self, projection=False)

    def op(self) -> OpUnderTest:
        axes = {"zxbcdt": 1, "out": 1}
        states = ("initial_states", "final_states")
        return OpUnderTest("mamba2_fused", self.make, self.run, self.reference, axes, states=states)


LAYERS = [
    Layer(),
    Layer(norm=True, initial=False),
    Layer(norm=None, projection=False, groups=1),
    Layer(norm=None, beside=2, initial=False),
    Layer(beside=3),
]
