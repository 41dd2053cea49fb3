"""The delta rules as the harness calls them: the state decays a head at a time, or in each key channel (KDA)."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest, Tensors

TOKENS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; ``gate`` and ``bias`` are for KDA."""

    why: str
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 16
    value_dim: int = 24
    l2norm: bool = True
    initial: bool = True
    decay: float = 0.1
    gate: str = ""
    bias: bool = True

    @property
    def options(self) -> Dict[str, Any]:
        """Keyword arguments that both functions of a rule take."""
        options = dict(use_qk_l2norm_in_kernel=self.l2norm)
        if self.gate:
            options.update(use_gate_in_kernel=True)
        if self.gate == "bounded":
            options.update(safe_gate=True, lower_bound=-5.0)
        return options

    def __str__(self) -> str:
        return self.why.replace(" ", "_")


CASES = [
    Case("grouped value heads"),
    Case("no l2norm no state", l2norm=False, initial=False),
    Case("fast decay", decay=5.0),
    Case("growing state", decay=-0.01),
    # Without l2norm: it would make all keys of one element +1 or -1 and the gradients of q and k nothing but rounding.
    Case("head dims of one", key_heads=4, value_heads=8, key_dim=1, value_dim=1, l2norm=False),
    Case("odd head dims", value_heads=1, key_dim=37, value_dim=19),
    Case("two key heads of three", key_heads=2, value_heads=6, key_dim=8, value_dim=8),
]


@dataclass(frozen=True)
class Rule:
    """One delta rule: the name of its ops, its two public functions, and whether it decays a channel at a time."""

    name: str
    chunk: str
    recurrent: str
    per_channel: bool

    def __str__(self) -> str:
        return self.name

    @property
    def functions(self) -> Tuple[str, str]:
        return self.chunk, self.recurrent

    def inputs(self, case: Case, pack: Pack, dtype: torch.dtype) -> Tensors:
        """Leaves of both functions by argument name."""
        wide = torch.promote_types(dtype, torch.float32)
        T, H, HV, K, V = pack.tokens, case.key_heads, case.value_heads, case.key_dim, case.value_dim
        size = 1.0 if case.l2norm else 0.25 * K**-0.5  # keys longer than 1 make the recurrence unstable
        decays = (1, T, HV, K) if self.per_channel else (1, T, HV)
        inputs = {
            "q": (torch.randn(1, T, H, K) * size).to(dtype),
            "k": (torch.randn(1, T, H, K) * size).to(dtype),
            "v": torch.randn(1, T, HV, V).to(dtype),
            "g": (torch.randn(decays) if case.gate else -case.decay * torch.rand(decays)).to(wide),
            "beta": torch.rand(1, T, HV).to(wide),
        }
        if case.gate:
            inputs["A_log"] = torch.rand(HV).to(wide)
            if case.bias:
                inputs["dt_bias"] = torch.randn(HV, K).to(wide)
        if case.initial:
            inputs["initial_state"] = torch.randn(len(pack.lengths), HV, K, V).to(wide)
        return inputs

    def small_inputs(self, case: Case = CASES[0], lengths=(5, 8), dtype=torch.float32) -> Tensors:
        return self.inputs(case, Pack("", tuple(lengths)), dtype)

    def op_under_test(self, case: Case, function: Optional[str] = None) -> OpUnderTest:
        """The chunked function, or the one named."""
        kernel = load_kernel()
        function = function or self.chunk
        # The function for decoding has no backward pass.
        gradients = nullcontext if function == self.chunk else torch.no_grad

        def run(inputs, **boundaries):
            with gradients():
                o, final = getattr(kernel, function)(**inputs, **boundaries, output_final_state=True, **case.options)
            return {"o": o, "final_state": final}

        def reference(inputs, cu_seqlens):
            gate = {name: inputs[name] for name in ("A_log", "dt_bias") if name in inputs}
            if case.gate == "bounded":
                gate["lower_bound"] = case.options["lower_bound"]
            o, final = getattr(getattr(kernel, self.name), f"{self.name}_reference")(
                *(inputs[name][0] for name in TOKENS),
                cu_seqlens,
                inputs.get("initial_state"),
                l2norm=case.l2norm,
                **gate,
            )
            return {"o": o[None], "final_state": final}

        return OpUnderTest(
            self.name,
            lambda pack, dtype: self.inputs(case, pack, dtype),
            run,
            reference,
            dict.fromkeys((*TOKENS, "o"), 1),
            states=("initial_state", "final_state"),
        )
