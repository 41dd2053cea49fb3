"""flash_attn_varlen as the harness calls it."""

from dataclasses import dataclass
from typing import Optional, Tuple

import torch

from tests.harness.kernel import load_kernel
from tests.harness.packings import Pack
from tests.harness.properties import OpUnderTest


@dataclass(frozen=True)
class Case:
    why: str
    heads: Tuple[int, int] = (4, 2)  # query heads, key/value heads
    dims: Tuple[int, int] = (32, 32)  # key dim, value dim
    causal: bool = True
    window: Tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    query_scale: float = 1.0
    # A range of visible keys for each query: None, "blocks" (causal, and stretches that see each other both ways), the
    # same with a window, or "any" (drawn for each query, one in four sees nothing).
    ranges: Optional[str] = None

    def __str__(self) -> str:
        return self.why.replace(" ", "_")

    @property
    def settings(self):
        if self.ranges is not None:
            return dict(softcap=self.softcap)
        return dict(causal=self.causal, window_size=self.window, softcap=self.softcap)


CASES = [
    Case("grouped causal"),
    Case("one head each bidirectional", heads=(2, 2), causal=False),
    Case("one key head for all", heads=(5, 1), dims=(16, 8)),
    Case("odd dims", dims=(17, 5)),
    Case("dim one", heads=(2, 1), dims=(1, 1)),
    Case("window", window=(9, 0)),
    Case("window both ways with sinks", causal=False, window=(3, 5), sinks=True),
    Case("softcap", softcap=5.0, query_scale=4.0),
    Case("sinks softcap window", softcap=5.0, window=(7, 7), sinks=True, query_scale=4.0),
    Case("ranges of blocks", ranges="blocks"),
    Case("ranges of blocks with a window", heads=(3, 1), dims=(24, 8), ranges="windowed blocks", sinks=True),
    Case("ranges of any kind", heads=(2, 2), dims=(17, 16), ranges="any", softcap=5.0, sinks=True, query_scale=4.0),
]


def draw_ranges(kind: str, length: int) -> torch.Tensor:
    """First and last visible key of each of a sequence's queries, int32 ``[length, 2]``."""
    at = torch.arange(length)
    if kind == "any":
        first = (torch.rand(length) * length).long()
        last = first + (torch.rand(length) * (length - first)).long()
        last[torch.rand(length) < 0.25] = -1
        return torch.stack([first, last], 1).to(torch.int32)
    first = (at - 6).clamp(min=0) if kind == "windowed blocks" else torch.zeros_like(at)
    last = at.clone()
    begin = 0
    while begin < length:
        end = min(length, begin + int(torch.randint(1, 40, ())))
        if torch.rand(()) < 0.5:
            last[begin:end] = end - 1
        begin = end
    return torch.stack([first, last], 1).to(torch.int32)


def op_under_test(case: Case) -> OpUnderTest:
    kernel = load_kernel()
    (heads, kv_heads), (key_dim, value_dim) = case.heads, case.dims

    def make(pack: Pack, dtype: torch.dtype):
        inputs = {
            "q": (torch.randn(pack.tokens, heads, key_dim) * case.query_scale).to(dtype),
            "k": torch.randn(pack.tokens, kv_heads, key_dim).to(dtype),
            "v": torch.randn(pack.tokens, kv_heads, value_dim).to(dtype),
        }
        if case.sinks:
            inputs["s_aux"] = torch.randn(heads).to(dtype)
        if case.ranges is not None:
            padding = torch.full((pack.padding, 2), 2**30, dtype=torch.int32)
            inputs["visible_keys"] = torch.cat([*(draw_ranges(case.ranges, n) for n in pack.lengths), padding])
        return inputs

    def run(inputs, **boundaries):
        out, lse, _ = kernel.flash_attn_varlen_func(**inputs, **boundaries, **case.settings, return_attn_probs=True)
        return {"out": out, "lse": lse}

    def reference(inputs, cu_seqlens):
        out, lse = kernel.flash_attn_varlen.flash_attn_varlen_reference(
            inputs["q"], inputs["k"], inputs["v"], cu_seqlens, cu_seqlens, s_aux=inputs.get("s_aux"),
            visible_keys=inputs.get("visible_keys"), **case.settings,
        )  # fmt: skip
        return {"out": out, "lse": lse}

    return OpUnderTest(
        "flash_attn_varlen",
        make,
        run,
        reference,
        {"q": 0, "k": 0, "v": 0, "visible_keys": 0, "out": 0, "lse": 1},
        spellings=("cu_seqlens",),
        rename={"cu_seqlens": ("cu_seqlens_q",)},
    )


def rows_under_test() -> OpUnderTest:
    """flash_attn_func, to which the sequences of a pack, of one length, are rows."""
    op = op_under_test(Case("rows", heads=(2, 1), dims=(4, 4)))

    def run(inputs, cu_seqlens_q):
        shape = (cu_seqlens_q.shape[0] - 1, -1)
        rows = {name: inputs[name].unflatten(0, shape) for name in ("q", "k", "v")}
        out, lse, _ = load_kernel().flash_attn_func(**rows, causal=True, return_attn_probs=True)
        return {"out": out.flatten(0, 1), "lse": lse.transpose(0, 1).flatten(1)}

    op.run = run
    return op
