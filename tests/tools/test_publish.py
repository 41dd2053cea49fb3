"""Publishing to a Hub: what arrives, what is left alone, and what a refusal or a lost connection leaves behind."""

import re

import pytest

from tests.conftest import REPO_ID, ROOT, load_tool
from tests.harness.hub import (
    TOKENS,
    UNREACHABLE,
    copy_variant,
    cpu_variant,
    hub_published_twice,
    publish,
)
from tests.harness.loopback_hub import LoopbackHub, blob_id

OTHER = "torch-stable-abi211-cu130-x86_64-linux"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    yield from hub_published_twice(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def variant():
    return cpu_variant()


def remote_files(server, branch: str) -> dict:
    repository = server.store.get(REPO_ID)
    return repository.resolve(branch).files


def test_publish_puts_the_variant_and_the_card(hub, variant):
    built = {
        f"build/{variant.name}/{path.relative_to(variant).as_posix()}": blob_id(path.read_bytes())
        for path in variant.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    published = remote_files(hub, "v1")
    assert {path: blob for path, blob in published.items() if path.startswith(f"build/{variant.name}/")} == built
    assert {path.split("/")[-1] for path in published if path.startswith("benchmarks/")} == {
        path.name for path in (ROOT / "benchmarks").glob("benchmark*.py")
    }


def test_the_card_says_what_a_stranger_needs(hub, kernel):
    card = hub.store.blob_path(remote_files(hub, "main")["README.md"]).read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert "{{" not in card and "{%" not in card and "\n\n\n" not in card
    assert f'attn_implementation="{REPO_ID}"' in card and f'get_kernel("{REPO_ID}", version=1' in card
    for name in {*kernel.__all__, *kernel.layers.__all__} - {"layers"}:
        assert f"`{name}`" in card, f"the card does not name {name}"
    for heading in ("## What it promises", "## Functions", "## Limits", "## Versions", "## Speed"):
        assert heading in card
    for requirement in (ROOT / "requirements.txt").read_text().splitlines():
        name, _, version = requirement.partition("==")
        if name in ("torch", "transformers", "kernels"):
            assert f"{name} {version}" in card
    (picture,) = re.findall(r"!\[[^]]+\]\(\S+/raw/main/(\S+)\)", card)
    assert (ROOT / picture).is_file()


def test_publish_again_removes_stale_files_and_then_commits_nothing(hub, tmp_path):
    first = hub.history(REPO_ID, "v1")
    assert "added_later.py" in str(hub.store.get(REPO_ID).commits[first[-2]].files)
    assert "added_later.py" not in str(remote_files(hub, "v1"))
    done = publish(hub.endpoint, tmp_path, "--yes")
    assert done.returncode == 0 and "nothing to do" in done.stdout and "committed" not in done.stdout
    assert hub.history(REPO_ID, "v1") == first


@pytest.mark.parametrize(("token", "expected"), [("hf_unknown", "401"), ("hf_reader", "403")])
def test_publish_with_a_refused_token_is_one_line(tmp_path, token, expected):
    with LoopbackHub(tmp_path / "server", tokens=TOKENS) as server:
        done = publish(server.endpoint, tmp_path / "home", "--yes", token=token)
        assert done.returncode == 1
        assert expected in done.stderr and len(done.stderr.strip().splitlines()) == 1
        assert server.history(REPO_ID, "main") == []


def test_publish_is_a_dry_run_by_default(variant, tmp_path):
    with LoopbackHub(tmp_path / "server") as server:
        done = publish(server.endpoint, tmp_path / "home", "--files")
        assert done.returncode == 0, done.stderr
        assert {method for method, _, _ in server.requests} == {"GET"}
    files = [path for path in variant.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        assert f"build/{variant.name}/{path.relative_to(variant).as_posix()}" in done.stdout
    assert "README.md" in done.stdout and "dry run" in done.stdout


def test_publish_leaves_out_what_is_for_this_machine_alone(variant, tmp_path):
    """torch-cuda would be taken by every CUDA build of torch, on any architecture."""
    publisher = load_tool("publish")
    build = copy_variant(variant, copy_variant(variant, tmp_path, "torch-cuda"), OTHER)
    version = publisher.Project.read(ROOT).general["version"]
    assert [path.name for path in publisher.find_variants(build, version)] == [OTHER]
    assert [path.name for path in publisher.find_variants(build, version, local_too=True)] == ["torch-cuda", OTHER]


def test_publish_without_a_network_shows_what_it_would_do_and_does_nothing(tmp_path):
    shown = publish(UNREACHABLE, tmp_path)
    assert shown.returncode == 0 and "does not answer" in shown.stdout
    refused = publish(UNREACHABLE, tmp_path, "--yes")
    assert refused.returncode == 1 and "cannot reach" in refused.stderr


def test_publish_refuses_a_build_that_was_touched(variant, tmp_path):
    build = copy_variant(variant, tmp_path / "build")
    (build / variant.name / "__init__.py").write_text("")
    with LoopbackHub(tmp_path / "server") as server:
        done = publish(server.endpoint, tmp_path / "home", "--yes", "--build", str(build))
        assert done.returncode == 1 and "digest" in done.stderr
        assert server.history(REPO_ID, "main") == []


def test_publish_refuses_variants_of_different_sources(variant, tmp_path):
    build = copy_variant(variant, copy_variant(variant, tmp_path / "build"), OTHER)
    metadata = build / OTHER / "metadata.json"
    metadata.write_text(re.sub(r'("id": "\w+_)\w+"', r'\g<1>0ther"', metadata.read_text()))
    done = publish(UNREACHABLE, tmp_path / "home", "--build", str(build))
    assert done.returncode == 1 and "different sources" in done.stderr and "make variants" in done.stderr


def published_files(server, branch="v1"):
    return {} if not server.history(REPO_ID, branch) else dict(remote_files(server, branch))


def test_publish_of_one_changed_variant_touches_nothing_else(variant, tmp_path):
    build = copy_variant(variant, copy_variant(variant, tmp_path / "build"), OTHER)
    changed = copy_variant(variant, tmp_path / "changed", OTHER, added_later="")
    with LoopbackHub(tmp_path / "server") as server:
        assert publish(server.endpoint, tmp_path / "home", "--yes", "--build", str(build)).returncode == 0
        before, main = published_files(server), server.history(REPO_ID, "main")
        done = publish(server.endpoint, tmp_path / "home", "--yes", "--build", str(changed))
        assert done.returncode == 0 and done.stdout.count("committed") == 1, done.stdout + done.stderr
        after = published_files(server)
        assert server.history(REPO_ID, "main") == main
    assert {path for path in after if after[path] != before.get(path)} == {
        f"build/{OTHER}/added_later.py",
        f"build/{OTHER}/metadata.json",
    }
    assert before.keys() <= after.keys()


@pytest.mark.parametrize(
    "lost, made, left",
    [
        ("POST /api/kernels/.*/branch/v1", 0, 2),
        ("POST /api/kernels/.*/commit/v1", 0, 2),
        ("POST /api/kernels/.*/commit/main", 1, 1),
    ],
    ids=["branch", "variants", "card"],
)
def test_publish_goes_on_where_the_connection_was_lost(tmp_path, lost, made, left):
    """A branch gets its files in one commit or not at all, and the same command does what is left to do."""
    with LoopbackHub(tmp_path / "server") as server:
        server.lost = lost
        done = publish(server.endpoint, tmp_path / "home", "--yes")
        assert done.returncode == 1 and "run the same command again" in done.stderr, done.stdout + done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert any(path.startswith("build/") for path in published_files(server)) == bool(made)
        server.lost = None
        done = publish(server.endpoint, tmp_path / "home", "--yes")
        assert done.returncode == 0 and done.stdout.count("committed") == left, done.stdout + done.stderr
        assert "README.md" in published_files(server, "main")
        assert any(path.startswith("build/") for path in published_files(server))
