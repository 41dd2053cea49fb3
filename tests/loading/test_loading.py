"""Loading from a Hub, from a folder, offline, and twice in one process."""

import pytest

from tests.conftest import BUILD, REPO_ID, ROOT, load_tool
from tests.harness.hub import CUDA_TORCH, MODEL_PREAMBLE, cpu_variant, hub_published_twice, publish, run
from tests.harness.loopback_hub import LoopbackHub


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    yield from hub_published_twice(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def variant():
    return cpu_variant()


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


def test_untrusted_publisher_needs_the_switch(tmp_path):
    with LoopbackHub(tmp_path / "server", trusted=False) as server:
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
        assert "PACKFREE_CPU_TIER must be one of scalar, " in refusal and refusal.endswith("on this CPU, got sse9")


def test_c53_two_builds_live_in_one_process(variant, tmp_path):
    """A second build of the same sources under another ops id, beside stubs of the packages of the same functions."""
    build = load_tool("build")
    config = build.load_build_toml()
    second = build.variant_of(config, build.CPU_IN_CUDA if CUDA_TORCH else "cpu", "second build of a test")
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
