"""What the hooks are doing, as a record that prints readably."""

import importlib
import json
import os
import textwrap
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch

from .._devices import cuda_paths, served_devices
from . import internals

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True)
class HooksStatus:
    """State of the hooks in this process.

    Attributes:
        installed: this build's hooks are in place.
        reason: why they are not, or an empty string.
        functions: served function -> modules in which it is replaced.
        not_served: function that refuses packed calls -> modules in which it is replaced.
        plain: device types on which the served functions also take calls that hold no pack; none if that is off.
        attention: names under which transformers uses this package's attention.
        towers: image or sound towers that keep transformers' own attention -> which one.
        refused_models: model type (a trailing * stands for any ending) -> why it is refused.
        transformers: version in this process, or None while it is not imported.
        checked_transformers: minor releases the hooks were checked against, oldest first.
        variant: folder of this build, for example ``torch-stable-abi211-cpu-x86_64-linux``.
        kernel_id: the build's id.
        cpu_tier: instruction tier that the CPU kernels use, or None where it cannot be asked.
        cuda: op -> what serves it on CUDA tensors: ``"CUDA C++"``, ``"Triton"``, for attention PyTorch's kernel or
            Triton, or ``"not served"``. Empty in a build of CPU kernels alone, which leaves packed calls on a GPU to
            transformers.
        fallbacks: what serves with less than it could, one sentence each; importing the package warns of them.
    """

    installed: bool
    reason: str
    functions: Dict[str, Tuple[str, ...]]
    not_served: Dict[str, Tuple[str, ...]]
    plain: Tuple[str, ...]
    attention: Tuple[str, ...]
    towers: Dict[str, str]
    refused_models: Dict[str, str]
    transformers: Optional[str]
    checked_transformers: Tuple[str, ...]
    variant: str = field(default_factory=lambda: variant())
    kernel_id: Optional[str] = field(default_factory=lambda: kernel_id())
    cpu_tier: Optional[str] = field(default_factory=lambda: cpu_tier())
    cuda: Dict[str, str] = field(default_factory=lambda: cuda_paths() if "cuda" in served_devices() else {})

    @property
    def fallbacks(self) -> Tuple[str, ...]:
        found: List[str] = []
        forced = os.environ.get("PACKFREE_CPU_TIER")
        if forced:
            found.append(f"PACKFREE_CPU_TIER={forced} decides the CPU tier")
        elif self.cpu_tier == "scalar":
            found.append("this CPU has no AVX2, so the slow scalar tier serves")
        if torch.version.cuda is not None and not self.cuda and has_nvidia_driver():
            found.append("this build holds CPU kernels alone, in a CUDA build of torch: nothing of it serves a GPU")
        if self.reason.startswith("the hooks of another build"):
            found.append(self.reason)
        checked = self.checked_transformers
        if self.transformers is not None and internals.minor_release(self.transformers) not in checked:
            found.append(f"the hooks were not checked against transformers {self.transformers}")
        return tuple(found)

    @property
    def state(self) -> str:
        return "installed" if self.installed else f"not installed: {self.reason}"

    @property
    def _plain_calls(self) -> str:
        if not self.plain:
            return "left to transformers"
        return f"served on {' and '.join(device.upper() for device in self.plain)}, as packs are"

    def __str__(self) -> str:
        checked = f"{self.checked_transformers[0]} to {self.checked_transformers[-1]}"
        lines = [
            f"packfree-kernels hooks: {self.state}",
            f"  build          {self.variant} ({self.kernel_id or 'no metadata'})",
            f"  CPU tier       {self.cpu_tier or 'unknown'}",
            f"  transformers   {self.transformers or 'not imported'} (hooks checked against {checked})",
            f"  attention      {', '.join(self.attention) or 'no model uses it yet'}",
        ]
        if self.installed:
            lines.append(f"  plain calls    {self._plain_calls}")
        if not self.cuda:
            lines.append("  CUDA           no kernels in this build: models on a GPU keep transformers' own path")
        for path in sorted(set(self.cuda.values())):
            names = ", ".join(name for name, serves in self.cuda.items() if serves == path)
            lines += textwrap.wrap(f"  CUDA           {names}: {path}", 100, subsequent_indent=" " * 17)
        lines += [f"  fallback       {sentence}" for sentence in self.fallbacks]
        for title, table in (("served", self.functions), ("not served", self.not_served)):
            for name, modules in table.items():
                short = ", ".join(module.rpartition(".")[2].replace("modeling_", "") for module in modules)
                lines.append(f"  {title:<14} {name}: {short}")
        for name, stock in self.towers.items():
            lines.append(f"  tower          {name}: {stock} attention")
        for pattern, why in self.refused_models.items():
            lines.append(f"  refused        {pattern}: {why}")
        return "\n".join(lines)


def has_nvidia_driver() -> bool:
    """Whether this Linux machine can have a CUDA device. Asking torch would start CUDA, which later forks forbid."""
    return os.path.exists("/dev/nvidiactl")


def variant() -> str:
    return os.path.basename(_PACKAGE_FOLDER)


def kernel_id() -> Optional[str]:
    path = os.path.join(_PACKAGE_FOLDER, "metadata.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file).get("id")


def cpu_tier() -> Optional[str]:
    ask = getattr(importlib.import_module("..", __package__), "cpu_tier", None)
    if ask is None:
        return None
    try:
        return ask()
    except RuntimeError as error:
        # A wrong PACKFREE_CPU_TIER is an error of the calls that compute, not of asking how things stand.
        return f"none ({error})"
