"""One tiny model of each family through the hooks: packed against alone, while a wait for the device is an error.

Needs transformers and kernels on the machine; without them it says so and nothing is claimed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from correctness import Outcome, no_waiting, run_checks

# Model type -> changes to its tiny configuration: experts that transformers computes itself wait for values.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5_text": {},
    "kimi_linear": dict(mlp_layer_types=["dense", "dense"]),
    "bamba": {},
    "falcon_h1": {},
    "mamba": {},
    "lfm2": {},
}


def missing() -> str:
    """What this machine lacks for it, or an empty string."""
    names = [name for name in ("transformers", "kernels") if importlib.util.find_spec(name) is None]
    return f"no {' and no '.join(names)} here" if names else ""


def check(model_type: str, build: Path, device: str) -> Outcome:
    """One family, in a process of its own: the package is the one that transformers loads from ``build``."""
    if missing():
        return Outcome(left=1, notes=[missing()])
    os.environ.update(LOCAL_KERNELS=f"org/packfree-kernels={build.resolve()}", HF_HUB_OFFLINE="1")
    from tests.models.other_transformers import admit_installed_kernels

    admit_installed_kernels()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return Outcome(left=1, notes=["not in this transformers"])
    checks = [("packed as alone", lambda: _packed_as_alone(model_type, device))]
    return run_checks(f"{model_type}, fp32", checks, time.monotonic() + 600)


def _packed_as_alone(model_type: str, device: str) -> None:
    from tests.models import tiny_models

    model = tiny_models.load(model_type, **FAMILIES[model_type]).train().to(device)

    def moved(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
                for batch in batches]  # fmt: skip

    logits, gradients = tiny_models.run(model, moved(tiny_models.alone()))
    for setting in tiny_models.SETTINGS:
        batches = moved([tiny_models.pack(model_type, setting)])
        tiny_models.run(model, batches)  # compiles what is needed
        with no_waiting(device):
            packed_logits, packed_gradients = tiny_models.run(model, batches)
        tiny_models.assert_logits_equal(packed_logits, logits)
        tiny_models.assert_gradients_equal(packed_gradients, gradients)
