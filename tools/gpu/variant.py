"""Load the built variant that fits this torch, with nothing but torch: a GPU machine may lack the Hub's libraries."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import torch


def fitting(build: Path, device: str) -> Path:
    """The variant in ``build`` for ``device``, ``"cuda"`` or ``"cpu"``.

    As the Hub's loader does: the CUDA version of the variant has torch's major number and no newer minor one.

    Raises:
        FileNotFoundError: there is none.
    """
    found = []
    for metadata in sorted(build.glob("*/metadata.json")):
        name = metadata.parent.name
        backend = json.loads(metadata.read_text())["backend"]["type"]
        if backend != device:
            continue
        version = _cuda_version(name) if backend == "cuda" else (0, 0)
        if backend == "cuda":
            mine = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
            if version[0] != mine[0] or version > mine:
                continue
        found.append((version, metadata.parent))
    if not found:
        wanted = f"CUDA {torch.version.cuda}" if device == "cuda" else "the CPU"
        raise FileNotFoundError(f"no variant for {wanted} in {build}: run `make variants`")
    return max(found)[1]


def _cuda_version(name: str) -> tuple[int, int]:
    digits = name.split("-cu")[1].split("-")[0]
    return int(digits[:-1]), int(digits[-1])


def load(variant: Path) -> ModuleType:
    """The package in ``variant``, under the name ``packfree_kernels``."""
    name = "packfree_kernels"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, variant / "__init__.py", submodule_search_locations=[str(variant)]
        )
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
