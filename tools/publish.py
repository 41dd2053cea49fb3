"""Publish what lies in ``build/`` to a Hub kernel repository.

    python tools/publish.py                          only say what would be changed
    HF_TOKEN=hf_... python tools/publish.py --yes    change it

The variants and ``benchmarks/benchmark*.py`` go to the branch ``v<version>``, the rendered ``CARD.md`` goes to ``main``
as ``README.md``. Files of a published variant that the new build no longer has are deleted; on a new branch so is every
variant that was not built, because it would offer the previous version's API. Each branch gets one commit, and none
where nothing changed. The repository and the version come from ``build.toml``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import tomllib
from httpx2 import HTTPError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from kernels._rust import Digest, DigestAlgorithm, Metadata

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER_OWNER = "org"
ACTIONS = ("add", "replace", "keep", "delete")
IGNORED = ("__pycache__", ".pyc")
# CPU kernels under a name that every CUDA build of torch takes, on any machine: for the machine it was built on alone.
LOCAL_VARIANT = "torch-cuda"


class PublishError(Exception):
    """Something the user can put right; the text says how."""


@dataclass(frozen=True)
class Project:
    """What build.toml says about where and as what to publish."""

    root: Path
    repo_id: str
    branch: str
    general: dict[str, object]

    @staticmethod
    def read(root: Path, repo_id: str | None = None) -> Project:
        """Read ``root/build.toml``; ``repo_id`` takes the place of its ``repo-id``."""
        general = tomllib.loads((root / "build.toml").read_text())["general"]
        hub = general.get("hub", {})
        repo_id = repo_id or hub.get("repo-id")
        if not repo_id:
            raise PublishError("build.toml names no repository: set repo-id in [general.hub] or give --repo-id")
        return Project(root, repo_id, hub.get("branch", f"v{general['version']}"), general)


@dataclass(frozen=True)
class Change:
    """What happens to one path of a branch: ``add``, ``replace``, ``keep`` or ``delete``."""

    action: str
    path: str
    content: Path | bytes | None = None
    size: int = 0


@dataclass
class Plan:
    """All a publication does; ``reached`` is false where the Hub did not answer, so that nothing is known of it."""

    project: Project
    endpoint: str
    reached: bool = True
    create_repository: bool = False
    create_branch: bool = False
    version_changes: list[Change] = field(default_factory=list)
    card_changes: list[Change] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        changes = self.version_changes + self.card_changes
        created = self.create_repository or self.create_branch
        return not created and all(change.action == "keep" for change in changes)


def find_variants(build: Path, version: int, local_too: bool = False) -> list[Path]:
    """The variant folders of ``build``, each checked to be whole, of this version and of the same sources.

    ``local_too`` keeps the variant that is for this machine alone, for a Hub on this machine.

    Raises:
        PublishError: there is none, one belongs to another version or to other sources than the rest, or its files are
            not those of its digest.
    """
    variants = sorted(path.parent for path in build.glob("*/metadata.json"))
    variants = [variant for variant in variants if local_too or variant.name != LOCAL_VARIANT]
    if not variants:
        raise PublishError(f"no built variant in {build}: run `make build` first")
    sources: dict[str, str] = {}
    for variant in variants:
        metadata = Metadata.read_from_file(variant / "metadata.json")
        # An id ends in a digest of all sources, so variants of one state of the tree share it.
        sources[metadata.id.rpartition("_")[2]] = variant.name
        if metadata.version != version:
            raise PublishError(
                f"{variant.name} was built as version {metadata.version}, build.toml says {version}: run `make build`"
            )
        actual = Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
        if metadata.digest is not None and metadata.digest.files != actual:
            raise PublishError(f"the files of {variant.name} are not those of its digest: run `make build` again")
    if len(sources) > 1:
        built = ", ".join(f"{name} from {source}" for source, name in sorted(sources.items()))
        raise PublishError(f"the variants were built from different sources ({built}): run `make variants`")
    return variants


def public_names(package: Path) -> tuple[list[str], list[str]]:
    """Function names (the literal ``__all__`` without ``layers``) and layer class names, read without importing."""
    functions: list[str] = []
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            functions = [name for name in ast.literal_eval(node.value) if name != "layers"]
    source = next((path for path in (package / "layers.py", package / "layers" / "__init__.py") if path.exists()), None)
    body = ast.parse(source.read_text()).body if source else []
    layers = [node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return functions, layers


def render_card(project: Project) -> str:
    """CARD.md with its variables filled in, as the Hub shows it."""
    general = project.general
    functions, layers = public_names(project.root / "torch-ext" / str(general["name"]).replace("-", "_"))
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    card = environment.from_string((project.root / "CARD.md").read_text()).render(
        repo_id=project.repo_id,
        version=general["version"],
        functions=functions,
        layers=layers,
        has_benchmark=any((project.root / "benchmarks").glob("benchmark*.py")),
        upstream=general.get("upstream"),
        source=general.get("source"),
        license=str(general["license"]).lower(),
    )
    return card.rstrip() + "\n"


def make_plan(api: HfApi, project: Project, build: Path, local_too: bool = False) -> Plan:
    """Compare the local files with the Hub's and list what publishing would do. Only reads.

    ``local_too``: see :func:`find_variants`.

    Raises:
        PublishError: the build is not fit to be published, or the Hub refused.
    """
    variants = find_variants(build, int(str(project.general["version"])), local_too)
    plan = Plan(project, api.endpoint)
    try:
        branches = {ref.name for ref in api.list_repo_refs(project.repo_id, repo_type="kernel").branches}
    except RepositoryNotFoundError:
        branches = set()
        plan.create_repository = True
    except HfHubHTTPError as error:
        raise _refused(error, project) from error
    except HTTPError:
        branches = set()
        plan.reached, plan.create_repository = False, True
    plan.create_branch = project.branch not in branches
    remote_main = _remote_files(api, project.repo_id, "main") if "main" in branches else {}
    # A new branch starts as a copy of main, so that is what the files are compared with.
    remote_version = remote_main if plan.create_branch else _remote_files(api, project.repo_id, project.branch)

    local: dict[str, Path | bytes] = {}
    for variant in variants:
        for path in sorted(variant.rglob("*")):
            if path.is_file() and not any(mark in path.as_posix()[len(str(variant)) :] for mark in IGNORED):
                local[f"build/{variant.name}/{path.relative_to(variant).as_posix()}"] = path
    for path in sorted((project.root / "benchmarks").glob("benchmark*.py")):
        local[f"benchmarks/{path.name}"] = path
    owned = ["benchmarks/"] + (["build/"] if plan.create_branch else [f"build/{variant.name}/" for variant in variants])
    plan.version_changes = _compare(local, remote_version, owned)
    plan.card_changes = _compare({"README.md": render_card(project).encode()}, remote_main, [])
    return plan


def _remote_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo_id, recursive=True, revision=revision, repo_type="kernel")
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def _compare(local: dict[str, Path | bytes], remote: dict[str, RepoFile], owned: Iterable[str]) -> list[Change]:
    """One change for each path that is here, or there under an ``owned`` prefix."""
    changes = []
    for path, source in local.items():
        content = source if isinstance(source, bytes) else source.read_bytes()
        if path not in remote:
            action = "add"
        else:
            action = "keep" if _same_content(content, remote[path]) else "replace"
        changes.append(Change(action, path, source, len(content)))
    stale = [path for path in remote if path not in local and path.startswith(tuple(owned))]
    return changes + [Change("delete", path, None, remote[path].size) for path in sorted(stale)]


def _same_content(content: bytes, remote: RepoFile) -> bool:
    if remote.lfs is not None:
        return hashlib.sha256(content).hexdigest() == remote.lfs.sha256
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == remote.blob_id


def apply_plan(api: HfApi, plan: Plan) -> list[str]:
    """Do what the plan says and return the ids of the commits made, none where nothing changed.

    Raises:
        PublishError: the Hub refused the token or the repository, or cannot be reached.
    """
    project = plan.project
    if not plan.reached:
        raise PublishError(f"cannot reach {plan.endpoint}: check the network, or HF_ENDPOINT if it is set")
    try:
        if plan.create_repository:
            api.create_repo(project.repo_id, repo_type="kernel", exist_ok=True)
        if plan.create_branch:
            api.create_branch(project.repo_id, branch=project.branch, repo_type="kernel")
        commits = []
        for branch, changes in ((project.branch, plan.version_changes), ("main", plan.card_changes)):
            operations = [_operation(change) for change in changes if change.action != "keep"]
            if operations:
                message = f"Publish {project.general['name']} version {project.general['version']}"
                info = api.create_commit(
                    project.repo_id, operations, commit_message=message, repo_type="kernel", revision=branch
                )
                commits.append(info.oid)
        return commits
    except HfHubHTTPError as error:
        raise _refused(error, project) from error
    except HTTPError as error:
        raise PublishError(f"lost the connection to {plan.endpoint} ({error}): run the same command again") from error


def _operation(change: Change) -> CommitOperationAdd | CommitOperationDelete:
    if change.action == "delete":
        return CommitOperationDelete(path_in_repo=change.path)
    content = change.content if isinstance(change.content, bytes) else str(change.content)
    return CommitOperationAdd(path_in_repo=change.path, path_or_fileobj=content)


def _refused(error: HfHubHTTPError, project: Project) -> PublishError:
    status = error.response.status_code
    owner = project.repo_id.split("/")[0]
    if status == 401:
        return PublishError(
            "the Hub refused the token (401): log in with `hf auth login` or set HF_TOKEN, with a token that may write"
        )
    if status == 403:
        is_placeholder = owner == PLACEHOLDER_OWNER
        hint = ": put your own organisation into repo-id in build.toml, or give --repo-id" if is_placeholder else ""
        return PublishError(f"the token may not write to kernel repositories of {owner!r} (403){hint}")
    return PublishError(f"the Hub answered {status}: {error.server_message or error}")


def describe(plan: Plan, list_files: bool = False) -> str:
    """The plan as a table that fits 100 columns: one line a step, or one a file with ``list_files``."""
    project = plan.project
    lines = [f"{project.repo_id} on {plan.endpoint}"]
    if not plan.reached:
        lines.append("(the Hub does not answer; shown as for a repository that does not exist yet)")
    if plan.create_repository:
        lines.append("  create    kernel repository")
    if plan.create_branch:
        lines.append(f"  create    branch {project.branch} from main")
    for branch, changes in ((project.branch, plan.version_changes), ("main", plan.card_changes)):
        lines.append(f"  branch {branch}")
        groups: dict[str, list[Change]] = {}
        for change in changes:
            depth = 2 if change.path.startswith("build/") else 1
            name = change.path if list_files else "/".join(change.path.split("/")[:depth])
            groups.setdefault(name, []).append(change)
        width = max(map(len, groups), default=0)
        for name, group in groups.items():
            counts = Counter(change.action for change in group)
            summary = ", ".join(f"{counts[action]} {action}" for action in ACTIONS if counts[action])
            size = sum(change.size for change in group if change.action in ("add", "replace")) / 1e6
            lines.append(f"    {name:<{width}}  {summary:<24} {size:7.2f} MB")
    if plan.is_empty:
        lines.append("nothing to do: the Hub holds exactly this")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="The token is HF_TOKEN or the one of `hf auth login`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--yes", action="store_true", help="do it; without this only show what would be done")
    parser.add_argument("--repo-id", help="owner/name, in place of the one in build.toml")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder with the variants (default: build/)")
    parser.add_argument("--local-too", action="store_true", help=f"{LOCAL_VARIANT} too, for a Hub on this machine")
    parser.add_argument("--files", action="store_true", help="list every file")
    arguments = parser.parse_args()
    try:
        project = Project.read(ROOT, arguments.repo_id)
        api = HfApi()
        plan = make_plan(api, project, arguments.build, arguments.local_too)
        print(describe(plan, arguments.files))
        if not arguments.yes:
            print("dry run: nothing was changed; --yes does it" if not plan.is_empty else "")
            return 0
        for commit in apply_plan(api, plan):
            print(f"committed {commit}")
    except PublishError as error:
        print(f"publish: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
