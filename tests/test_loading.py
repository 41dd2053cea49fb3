"""Publishing to a Hub and loading from it, from a folder, offline, and twice in one process.

A loopback Hub stands in for the real one. What reads its settings at import (``HF_ENDPOINT``, ``HF_HOME``, ...) runs in
a process of its own with a Hugging Face home of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Dict

import pytest

from tests.conftest import REPO_ID, ROOT, load_tool

BUILD = ROOT / "build"
TOKENS = {"hf_writer": "write", "hf_reader": "read"}
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


@pytest.fixture(scope="module")
def tools() -> Dict[str, ModuleType]:
    """Modules of tools/, loaded in a fixture so that collecting this file needs nothing but pytest."""
    return {"build": load_tool("build"), "hub": load_tool("loopback_hub")}


@pytest.fixture(scope="module")
def variant() -> Path:
    """The built CPU variant."""
    found = sorted(BUILD.glob("torch-stable-abi*-cpu-*/metadata.json"))
    assert found, "no CPU variant in build/: run `make build` first"
    return found[0].parent


def publish(endpoint: str, home: Path, *options: str, token: str = "hf_writer") -> subprocess.CompletedProcess:
    """Run tools/publish.py against a Hub."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "publish.py"), *options],
        env=child_environment(home, endpoint, HF_TOKEN=token),
        capture_output=True,
        text=True,
        timeout=120,
    )


def copy_with_extra_file(variant: Path, folder: Path) -> Path:
    """A build folder whose variant has one more file and a digest to match: what a next build would be."""
    from kernels._rust import Digest, DigestAlgorithm

    copy = folder / variant.name
    shutil.copytree(variant, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "added_later.py").write_text("")
    metadata = json.loads((copy / "metadata.json").read_text())
    metadata["digest"]["files"] = dict(Digest.hash_variant(DigestAlgorithm.SHA256, copy).files)
    (copy / "metadata.json").write_text(json.dumps(metadata))
    return folder


@pytest.fixture(scope="module")
def hub(tools, variant, tmp_path_factory):
    """A Hub of a trusted publisher whose v1 was published twice: with one file more first, then as built."""
    folder = tmp_path_factory.mktemp("hub")
    with tools["hub"].LoopbackHub(folder / "server", tokens=TOKENS) as server:
        for build in (copy_with_extra_file(variant, folder / "earlier"), BUILD):
            done = publish(server.endpoint, folder / "home", "--yes", "--build", str(build))
            assert done.returncode == 0, done.stderr
        yield server


# Publishing


def remote_files(server, branch: str) -> Dict[str, str]:
    repository = server.store.get(REPO_ID)
    return repository.resolve(branch).files


def test_publish_puts_the_variant_and_the_card(hub, tools, variant):
    built = {
        f"build/{variant.name}/{path.relative_to(variant).as_posix()}": tools["hub"].blob_id(path.read_bytes())
        for path in variant.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    published = remote_files(hub, "v1")
    assert {path: blob for path, blob in published.items() if path.startswith(f"build/{variant.name}/")} == built
    assert {path.split("/")[-1] for path in published if path.startswith("benchmarks/")} == {
        path.name for path in (ROOT / "benchmarks").glob("benchmark*.py")
    }
    card = hub.store.blob_path(remote_files(hub, "main")["README.md"]).read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert REPO_ID in card and "{{" not in card and "{%" not in card


def test_publish_again_removes_stale_files_and_then_commits_nothing(hub, tmp_path):
    first = hub.history(REPO_ID, "v1")
    assert "added_later.py" in str(hub.store.get(REPO_ID).commits[first[-2]].files)
    assert "added_later.py" not in str(remote_files(hub, "v1"))
    done = publish(hub.endpoint, tmp_path, "--yes")
    assert done.returncode == 0 and "nothing to do" in done.stdout and "committed" not in done.stdout
    assert hub.history(REPO_ID, "v1") == first


@pytest.mark.parametrize(("token", "expected"), [("hf_unknown", "401"), ("hf_reader", "403")])
def test_publish_with_a_refused_token_is_one_line(tools, tmp_path, token, expected):
    with tools["hub"].LoopbackHub(tmp_path / "server", tokens=TOKENS) as server:
        done = publish(server.endpoint, tmp_path / "home", "--yes", token=token)
        assert done.returncode == 1
        assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1
        assert server.history(REPO_ID, "main") == []


def test_publish_is_a_dry_run_by_default(tools, variant, tmp_path):
    with tools["hub"].LoopbackHub(tmp_path / "server") as server:
        done = publish(server.endpoint, tmp_path / "home", "--files")
        assert done.returncode == 0, done.stderr
        assert {method for method, _, _ in server.requests} == {"GET"}
    files = [path for path in variant.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        assert f"build/{variant.name}/{path.relative_to(variant).as_posix()}" in done.stdout
    assert "README.md" in done.stdout and "dry run" in done.stdout


def test_publish_without_a_network_shows_what_it_would_do_and_does_nothing(tmp_path):
    shown = publish(UNREACHABLE, tmp_path)
    assert shown.returncode == 0 and "does not answer" in shown.stdout
    refused = publish(UNREACHABLE, tmp_path, "--yes")
    assert refused.returncode == 1 and "cannot reach" in refused.stderr


def test_publish_refuses_a_build_that_was_touched(tools, variant, tmp_path):
    build = copy_with_extra_file(variant, tmp_path / "build")
    (build / variant.name / "__init__.py").write_text("")
    with tools["hub"].LoopbackHub(tmp_path / "server") as server:
        done = publish(server.endpoint, tmp_path / "home", "--yes", "--build", str(build))
        assert done.returncode == 1 and "digest" in done.stderr
        assert server.history(REPO_ID, "main") == []


# Loading


def test_loads_by_version_branch_and_earlier_commit(hub, variant, tmp_path):
    earlier, latest = hub.history(REPO_ID, "v1")[-2:]
    code = f"""
result = {{}}
choices = dict(version=dict(version=1), branch=dict(revision="v1"), earlier=dict(revision="{earlier}"))
for key, choice in choices.items():
    kernel = get_kernel("{REPO_ID}", **choice)
    result[key] = [works(kernel), where(kernel), sorted(os.listdir(where(kernel)))]
print(json.dumps(result))
"""
    loaded = run(code, tmp_path, hub.endpoint)
    for key, commit in (("version", latest), ("branch", latest), ("earlier", earlier)):
        right, folder, files = loaded[key]
        assert right, key
        assert folder.startswith(str(tmp_path)) and folder.endswith(f"{commit}/build/{variant.name}")
        assert ("added_later.py" in files) == (key == "earlier")


def test_loads_offline_once_the_branch_was_downloaded(hub, tmp_path):
    """A load fetches one variant, and huggingface_hub 2.4 refuses offline what it knows to be part of a branch."""
    code = f"""
from huggingface_hub import snapshot_download
snapshot_download("{REPO_ID}", repo_type="kernel", revision="v1")
print("null")
"""
    run(code, tmp_path, hub.endpoint)
    commit = hub.history(REPO_ID, "v1")[-1]
    code = f"""
choices = (dict(version=1), dict(revision="v1"), dict(revision="{commit}"))
print(json.dumps([works(get_kernel("{REPO_ID}", **choice)) for choice in choices]))
"""
    assert run(code, tmp_path, HF_HUB_OFFLINE="1") == [True, True, True]


def test_loads_from_folders_and_fetches_nothing(hub, variant, tmp_path):
    seen = len(hub.requests)
    code = f"""
from pathlib import Path
result = [works(get_local_kernel(Path(folder))) for folder in ("{ROOT}", "{BUILD}", "{variant}")]
for folder in ("{ROOT}", "{BUILD}", "{variant}"):
    os.environ["LOCAL_KERNELS"] = "{REPO_ID}=" + folder
    result.append(works(get_kernel("{REPO_ID}", version=1)))
print(json.dumps(result + ["transformers" in sys.modules]))
"""
    result = run(code, tmp_path / "home", hub.endpoint)
    assert result[:-1] == [True] * 6
    assert result[-1] is False, "loading the functions must not import transformers"
    assert hub.requests[seen:] == []
    assert not (tmp_path / "home").exists()


def test_one_string_by_name_and_by_revision(hub, tmp_path):
    earlier = hub.history(REPO_ID, "v1")[-2]
    code = f"""
save_model("{tmp_path}/model")
names = ["{REPO_ID}", "{REPO_ID}@v1", "{REPO_ID}@{earlier}"]
print(json.dumps([largest_difference("{tmp_path}/model", name, allow_all_kernels=True) for name in names]))
"""
    differences = run(code, tmp_path / "home", hub.endpoint, MODEL_PREAMBLE)
    assert len(differences) == 3 and max(differences) < 1e-4


def test_untrusted_publisher_needs_the_switch(tools, tmp_path):
    with tools["hub"].LoopbackHub(tmp_path / "server", trusted=False) as server:
        assert publish(server.endpoint, tmp_path / "home", "--yes").returncode == 0
        code = f"""
save_model("{tmp_path}/model")
print(json.dumps([
    error_of(get_kernel, "{REPO_ID}", version=1),
    error_of(load, "{tmp_path}/model", "{REPO_ID}"),
]))
"""
        refusals = run(code, tmp_path / "home", server.endpoint, MODEL_PREAMBLE)
        # In a new process: transformers 5.22 remembers a refused name as loaded and does not ask again.
        code = f"""
print(json.dumps([
    works(get_kernel("{REPO_ID}", version=1, trust_remote_code=True)),
    works(get_kernel("{REPO_ID}", version=1, trust_remote_code=["{REPO_ID}"])),
    largest_difference("{tmp_path}/model", "{REPO_ID}", allow_all_kernels=True) < 1e-4,
]))
"""
        works_now = run(code, tmp_path / "home", server.endpoint, MODEL_PREAMBLE)
    for refusal in refusals:
        assert refusal.startswith("ValueError") and "trust_remote_code=True" in refusal
    assert works_now == [True, True, True]


def test_c52_local_kernels_load_without_a_network(variant, tmp_path):
    code = f"""
save_model("{tmp_path}/model")
print(json.dumps([
    largest_difference("{tmp_path}/model", "{REPO_ID}", allow_all_kernels=True),
    largest_difference("{tmp_path}/model", "{REPO_ID}"),
]))
"""
    settings = {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"{REPO_ID}={ROOT}"}
    assert max(run(code, tmp_path / "home", preamble=MODEL_PREAMBLE, **settings)) < 1e-4


TIER_CODE = """
from pathlib import Path
kernel = get_local_kernel(Path("{variant}"), backend="cpu")
torch.manual_seed(1)
cu = torch.tensor([0, 5, 40], dtype=torch.int32)
q, k, v = (torch.randn(40, 2, 32) for _ in range(3))
x, w = torch.randn(1, 24, 40), torch.randn(24, 4)
g, beta = -torch.rand(1, 40, 2), torch.rand(1, 40, 2)
results = [
    kernel.flash_attn_varlen_func(q, k, v, cu, cu, causal=True),
    kernel.causal_conv1d_fn(x, w, activation="silu", cu_seqlens=cu),
    kernel.chunk_gated_delta_rule(q[None], k[None], v[None], g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0],
]
torch.save(results, "{file}")
print(json.dumps(kernel.cpu_tier()))
"""


def test_c50_lowest_tier_agrees_with_the_best(variant, tmp_path):
    import torch

    tiers, results = [], []
    for name, setting in (("best", {}), ("scalar", {"PACKFREE_CPU_TIER": "scalar"})):
        file = tmp_path / f"{name}.pt"
        tiers.append(run(TIER_CODE.format(variant=variant, file=file), tmp_path / "home", **setting))
        results.append(torch.load(file))
    assert tiers[1] == "scalar"
    for best, scalar in zip(*results):
        assert (best - scalar).abs().max() <= 1e-6 * max(1.0, float(scalar.abs().max()))


def test_c50_an_unknown_tier_is_a_catchable_error(variant, tmp_path):
    code = f"""
from pathlib import Path
kernel = get_local_kernel(Path("{variant}"))
print(json.dumps([error_of(kernel.cpu_tier), error_of(works, kernel)]))
"""
    for refusal in run(code, tmp_path, PACKFREE_CPU_TIER="sse9"):
        assert "PACKFREE_CPU_TIER" in refusal


def test_c53_two_builds_live_in_one_process(tools, variant, tmp_path):
    """A second build of the same sources under another ops id, beside stubs of the packages of the same functions."""
    build = tools["build"]
    config = build.load_build_toml()
    second = build.variant_of(config, salt="second build of a test")
    # In the work folder of the first build only the file that holds the id is compiled again.
    (shared_object,) = build.compile_variants(config, [second], BUILD / "_work" / "plain")
    build.assemble(config, second, shared_object, tmp_path / "second" / second.folder)
    code = f"""
import types
from pathlib import Path
before = types.ModuleType("causal_conv1d")
sys.modules["causal_conv1d"] = before
first = get_local_kernel(Path("{variant}"))
for name in ("flash_attn", "mamba_ssm", "fla"):
    sys.modules[name] = types.ModuleType(name)
second = get_local_kernel(Path("{tmp_path}/second"))
again = get_local_kernel(Path("{variant}"))
names = [kernel.cpu_tier.__globals__["ops"].__name__ for kernel in (first, second)]
print(json.dumps([[works(kernel) for kernel in (first, second, again)], names, again is first]))
"""
    right, names, same = run(code, tmp_path / "home")
    assert right == [True, True, True]
    assert len(set(names)) == 2, names
    assert same
