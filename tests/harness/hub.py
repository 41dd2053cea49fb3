"""Processes of their own against a loopback Hub: publishing to it and loading from it as users do.

What reads its settings at import (``HF_ENDPOINT``, ``HF_HOME``, ...) runs in a child process with a Hugging Face home
of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import torch

from tests.conftest import BUILD, ROOT, load_tool
from tests.harness.loopback_hub import LoopbackHub

TOKENS = {"hf_writer": "write", "hf_reader": "read"}
CUDA_TORCH = torch.version.cuda is not None
UNREACHABLE = "http://127.0.0.1:9"

# What every child process starts with: a call whose result shows that the compiled op ran and kept samples apart.
PREAMBLE = """
import json, os, sys
import torch
from kernels import get_kernel, get_local_kernel
torch.set_num_threads(1)

def error_of(function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

def works(kernel):
    torch.manual_seed(0)
    x, weight = torch.randn(1, 8, 11), torch.randn(8, 4)
    y = kernel.causal_conv1d_fn(x, weight, cu_seqlens=torch.tensor([0, 3, 11]))
    alone = [
        torch.nn.functional.conv1d(torch.nn.functional.pad(x[..., a:b], (3, 0)), weight[:, None], groups=8)
        for a, b in ((0, 3), (3, 11))
    ]
    return bool((y - torch.cat(alone, -1)).abs().max() < 1e-5)

def where(kernel):
    return os.path.dirname(kernel.__file__)
"""

# Adds a tiny saved model and what loads it by the one string and compares a pack with its samples alone.
MODEL_PREAMBLE = (
    PREAMBLE
    + """
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

def save_model(folder):
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"],
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)

def load(folder, name, **keywords):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, **keywords).eval()

def largest_difference(folder, name, **keywords):
    model = load(folder, name, **keywords)
    tokens = torch.arange(12)[None] * 5 % 64
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        packed = model(input_ids=tokens, position_ids=positions).logits
        alone = [model(input_ids=part).logits for part in (tokens[:, :5], tokens[:, 5:])]
    return float((packed - torch.cat(alone, 1)).abs().max())
"""
)


def child_environment(home: Path, endpoint: str, **settings: str) -> Dict[str, str]:
    """This process's environment without what steers Hugging Face libraries and the kernel, then ``settings``."""
    steering = ("HF_", "PACKFREE_", "LOCAL_KERNELS", "KERNELS_CACHE")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
    return {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **settings}


def run(code: str, home: Path, endpoint: str = UNREACHABLE, preamble: str = PREAMBLE, **settings: str) -> Any:
    """Run ``code`` in a fresh process and return what it printed last, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", preamble + code],
        env=child_environment(home, endpoint, **settings),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"child process failed\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def cpu_variant() -> Path:
    """The built variant with the CPU kernels alone that the loader gives to this build of torch."""
    name = "torch-cuda" if CUDA_TORCH else f"torch-stable-abi*-cpu-{load_tool('toolkits').machine_here()}-linux"
    found = sorted(BUILD.glob(f"{name}/metadata.json"))
    assert found, "no variant of CPU kernels in build/: run `make build` first"
    return found[0].parent


def publish(endpoint: str, home: Path, *options: str, token: str = "hf_writer") -> subprocess.CompletedProcess:
    """Run tools/publish.py against a Hub."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "publish.py"), *(["--local-too"] if CUDA_TORCH else []), *options],
        env=child_environment(home, endpoint, HF_TOKEN=token),
        capture_output=True,
        text=True,
        timeout=120,
    )


def copy_variant(variant: Path, folder: Path, name: str = "", **files: str) -> Path:
    """A build folder with a copy of ``variant``, under another ``name`` if given, and a digest to match.

    ``files`` maps a module's name to its text: what a next build would bring.
    """
    from kernels._rust import Digest, DigestAlgorithm

    copy = folder / (name or variant.name)
    shutil.copytree(variant, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for module, text in files.items():
        (copy / f"{module}.py").write_text(text)
    metadata = json.loads((copy / "metadata.json").read_text())
    metadata["digest"]["files"] = dict(Digest.hash_variant(DigestAlgorithm.SHA256, copy).files)
    (copy / "metadata.json").write_text(json.dumps(metadata))
    return folder


def hub_published_twice(folder: Path) -> Any:
    """A running Hub of a trusted publisher; v1 had one file more first and is now what lies in build/."""
    server = LoopbackHub(folder / "server", tokens=TOKENS)
    with server:
        for build in (copy_variant(cpu_variant(), folder / "earlier", added_later=""), BUILD):
            done = publish(server.endpoint, folder / "home", "--yes", "--build", str(build))
            assert done.returncode == 0, done.stderr
        yield server
