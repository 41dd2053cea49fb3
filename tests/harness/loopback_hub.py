"""A Hub for kernel repositories that lives on this machine's loopback interface.

It answers the requests that ``kernels`` and ``huggingface_hub`` make to publish, list and load a kernel repository, so
that a demo or a test goes through the same steps as with the real Hub, without a network. Only the standard library is
used. Commits are kept: an id stays loadable after its branch has moved on.

In a program::

    with LoopbackHub(folder) as hub:
        api = HfApi(endpoint=hub.endpoint, token="any")

From a shell, on a free port or a fixed one::

    python -m tests.harness.loopback_hub FOLDER --port 8100
    HF_ENDPOINT=http://127.0.0.1:8100 python my_program.py

``huggingface_hub`` reads ``HF_ENDPOINT`` once, when it is imported.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT_ID = re.compile(r"[0-9a-f]{40}")


def blob_id(content: bytes) -> str:
    """The id that git gives a file's content; clients compare it with their own to skip unchanged files."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubError(Exception):
    """A refusal: HTTP status, the code that clients look at (may be empty) and a sentence."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Commit:
    """One state of a repository: its id, title, second of creation and the blob id of each path."""

    id: str
    title: str
    time: float
    files: dict[str, str]


@dataclass
class Repository:
    """Branches of one kernel repository, each a list of commit ids (oldest first), and all commits by id."""

    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, list[str]] = field(default_factory=dict)

    def resolve(self, revision: str) -> Commit:
        """The commit that a branch name, a full ref or a commit id points to."""
        name = revision.removeprefix("refs/heads/")
        if name in self.branches:
            return self.commits[self.branches[name][-1]]
        if COMMIT_ID.fullmatch(revision) and revision in self.commits:
            return self.commits[revision]
        raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def add(self, branch: str, title: str, files: dict[str, str]) -> Commit:
        """Append a commit to ``branch``; its id covers the parent, so equal contents still get ids of their own."""
        history = self.branches.setdefault(branch, [])
        parent = history[-1] if history else branch
        description = json.dumps([parent, title, sorted(files.items())])
        commit = Commit(hashlib.sha1(description.encode()).hexdigest(), title, time.time(), files)
        self.commits[commit.id] = commit
        history.append(commit.id)
        return commit


class Store:
    """Repositories on disk: ``root/blobs/<id>`` for contents, ``root/repos/<owner>/<name>.json`` for history."""

    def __init__(self, root: Path):
        self.root = root
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        for path in sorted((root / "repos").glob("*/*.json")):
            saved = json.loads(path.read_text())
            commits = {key: Commit(**value) for key, value in saved["commits"].items()}
            self.repositories[f"{path.parent.name}/{path.stem}"] = Repository(commits, saved["branches"])

    def get(self, repo_id: str) -> Repository:
        if repo_id not in self.repositories:
            raise HubError(404, "RepoNotFound", f"Repository {repo_id} not found")
        return self.repositories[repo_id]

    def save(self, repo_id: str) -> None:
        path = self.root / "repos" / f"{repo_id}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self.repositories[repo_id]), indent=1))

    def create(self, repo_id: str) -> None:
        repository = Repository()
        repository.add("main", "initial commit", {})
        self.repositories[repo_id] = repository
        self.save(repo_id)

    def write_blob(self, content: bytes) -> str:
        name = blob_id(content)
        (self.root / "blobs" / name).write_bytes(content)
        return name

    def blob_path(self, name: str) -> Path:
        return self.root / "blobs" / name


@dataclass(frozen=True)
class Request:
    """What a route gets: the decoded groups of its pattern, the query and the body."""

    groups: tuple[str, ...]
    query: dict[str, list[str]]
    body: bytes

    def flag(self, name: str) -> bool:
        return self.query.get(name, ["false"])[0].lower() in ("true", "1")

    def json(self) -> dict:
        return json.loads(self.body or b"{}")


@dataclass(frozen=True)
class Response:
    """JSON, or bytes, with a status and extra headers."""

    content: object
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[["LoopbackHub", Request], Response]
ROUTES: list[tuple[str, re.Pattern[str], bool, Route]] = []
REPO = r"([^/]+/[^/]+)"


def route(method: str, pattern: str, writes: bool = False) -> Callable[[Route], Route]:
    """Register a method of :class:`LoopbackHub` for a request; a writing one demands a token where tokens are set."""

    def register(function: Route) -> Route:
        ROUTES.append((method, re.compile(pattern.replace("REPO", REPO)), writes, function))
        return function

    return register


class LoopbackHub:
    """The server; see the module's text for use.

    Args:
        root: folder of the Hub's state; created if missing, read again if it holds an earlier state.
        port: 0 picks a free one.
        trusted: whether every organisation is a trusted kernel publisher, without which ``get_kernel`` refuses unless
            it is told ``trust_remote_code``.
        tokens: maps each accepted token to ``"write"`` or ``"read"``. Then a write without a known token is answered
            401 and one with a reader's token 403. Without ``tokens`` anybody may write.

    Attributes:
        endpoint: the address for ``HF_ENDPOINT`` or ``HfApi(endpoint=...)``.
        requests: method, path and status of each request answered so far.
        trusted: may be changed while the server runs.
        lost: a pattern or None. A request such as ``POST /api/repos/create`` that it is found in gets no answer, and
            changes nothing: its connection closes, as when a network fails. May be changed while the server runs.
    """

    def __init__(self, root: Path | str, port: int = 0, trusted: bool = True, tokens: Mapping[str, str] | None = None):
        self.trusted = trusted
        self.tokens = dict(tokens) if tokens is not None else None
        self.requests: list[tuple[str, str, int]] = []
        self.lost: str | None = None
        self.store = Store(Path(root))
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler_class(self))
        self._server.daemon_threads = True
        # Clients keep connections open; waiting for their threads would hang close().
        self._server.block_on_close = False
        self._thread: threading.Thread | None = None
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LoopbackHub:
        self._thread = threading.Thread(target=self._server.serve_forever, name="loopback-hub", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def serve_forever(self) -> None:
        """Answer requests in the calling thread until it is interrupted."""
        self._server.serve_forever()

    def history(self, repo_id: str, branch: str) -> list[str]:
        """Commit ids of a branch, oldest first; empty if there is no such branch."""
        with self.store.lock:
            repository = self.store.repositories.get(repo_id)
            return list(repository.branches.get(branch, [])) if repository else []

    def answer(self, method: str, path: str, body: bytes, authorization: str) -> Response:
        """Find the route of a request and run it; refusals become responses."""
        parts = urlsplit(path)
        # Matching precedes decoding: a revision such as "refs/heads/main" arrives with its slashes escaped.
        for route_method, pattern, writes, function in ROUTES:
            match = pattern.fullmatch(parts.path) if route_method == method else None
            if match is None:
                continue
            try:
                if writes:
                    self._check_token(authorization)
                groups = tuple(unquote(group or "") for group in match.groups())
                with self.store.lock:
                    return function(self, Request(groups, parse_qs(parts.query), body))
            except HubError as error:
                return _refusal(error)
        return _refusal(HubError(404, "", f"No such page: {method} {parts.path}"))

    def _check_token(self, authorization: str) -> None:
        if self.tokens is None:
            return
        role = self.tokens.get(authorization.removeprefix("Bearer ").strip())
        if role is None:
            raise HubError(401, "", "Invalid credentials in Authorization header")
        if role != "write":
            raise HubError(403, "", "You don't have the rights to write to this repository")

    # Reading

    @route("GET", r"/api/whoami-v2")
    def _whoami(self, request: Request) -> Response:
        return Response({"type": "user", "name": "loopback", "fullname": "loopback", "orgs": []})

    @route("GET", r"/api/organizations/([^/]+)/overview")
    def _organization(self, request: Request) -> Response:
        name = request.groups[0]
        return Response({"avatarUrl": "", "name": name, "fullname": name, "trustedKernelPublisher": self.trusted})

    @route("GET", r"/api/kernels/REPO/refs")
    def _refs(self, request: Request) -> Response:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": history[-1]}
            for name, history in sorted(self.store.get(request.groups[0]).branches.items())
        ]
        return Response({"branches": branches, "converts": [], "tags": []})

    @route("GET", r"/api/kernels/REPO(?:/revision/([^/]+))?")
    def _info(self, request: Request) -> Response:
        repo_id, revision = request.groups
        commit = self.store.get(repo_id).resolve(revision or "main")
        return Response(
            {
                "id": repo_id,
                "author": repo_id.split("/")[0],
                "sha": commit.id,
                "lastModified": _iso_time(commit.time),
                "private": False,
                "gated": False,
                "downloads": 0,
                "likes": 0,
                "trustedKernelPublisher": self.trusted,
            }
        )

    @route("GET", r"/api/kernels/REPO/commits/([^/]+)")
    def _commits(self, request: Request) -> Response:
        repo_id, revision = request.groups
        repository = self.store.get(repo_id)
        last = repository.resolve(revision).id
        history = next(ids for ids in repository.branches.values() if last in ids)
        commits = [repository.commits[name] for name in reversed(history[: history.index(last) + 1])]
        return Response(
            [
                {"id": c.id, "title": c.title, "message": "", "authors": [], "date": _iso_time(c.time)}
                for c in (commits if request.query.get("p", ["0"])[0] == "0" else [])
            ]
        )

    @route("GET", r"/api/kernels/REPO/tree/([^/]+)(?:/(.*))?")
    def _tree(self, request: Request) -> Response:
        repo_id, revision, folder = request.groups
        files = self.store.get(repo_id).resolve(revision).files
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        inside = {path[len(prefix) :]: blob for path, blob in files.items() if path.startswith(prefix)}
        if prefix and not inside:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        folders = {"/".join(path.split("/")[:n]) for path in inside for n in range(1, path.count("/") + 1)}
        entries = [
            {"type": "directory", "path": prefix + name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
            for name in folders
        ] + [
            {"type": "file", "path": prefix + name, "oid": blob, "size": self.store.blob_path(blob).stat().st_size}
            for name, blob in inside.items()
        ]
        if not request.flag("recursive"):
            entries = [entry for entry in entries if "/" not in entry["path"][len(prefix) :]]
        return Response(sorted(entries, key=lambda entry: entry["path"]))

    @route("GET", r"/kernels/REPO/resolve/([^/]+)/(.+)")
    def _file(self, request: Request) -> Response:
        repo_id, revision, path = request.groups
        commit = self.store.get(repo_id).resolve(revision)
        if path not in commit.files:
            raise HubError(404, "EntryNotFound", f"{path} does not exist on {revision}")
        blob = commit.files[path]
        headers = {"X-Repo-Commit": commit.id, "ETag": f'"{blob}"', "Accept-Ranges": "none"}
        return Response(self.store.blob_path(blob).read_bytes(), headers=headers)

    # Writing

    @route("POST", r"/api/repos/create", writes=True)
    def _create(self, request: Request) -> Response:
        wanted = request.json()
        if wanted.get("type") != "kernel":
            raise HubError(400, "", f"This Hub holds repositories of type kernel only, got {wanted.get('type')!r}")
        repo_id = f"{wanted.get('organization') or 'loopback'}/{wanted['name']}"
        answer = {"url": f"{self.endpoint}/kernels/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.store.repositories:
            return Response({"error": "You already created this kernel repo", **answer}, status=409)
        self.store.create(repo_id)
        return Response(answer)

    @route("POST", r"/api/kernels/REPO/branch/(.+)", writes=True)
    def _branch(self, request: Request) -> Response:
        repo_id, branch = request.groups
        repository = self.store.get(repo_id)
        if branch in repository.branches:
            raise HubError(409, "", f"Reference {branch} already exists")
        start = repository.resolve(request.json().get("startingPoint") or "main")
        source = next(ids for ids in repository.branches.values() if start.id in ids)
        repository.branches[branch] = source[: source.index(start.id) + 1]
        self.store.save(repo_id)
        return Response({})

    @route("POST", r"/api/validate-yaml")
    def _validate_yaml(self, request: Request) -> Response:
        return Response({"errors": [], "warnings": []})

    @route("POST", r"/api/kernels/REPO/preupload/(.+)", writes=True)
    def _preupload(self, request: Request) -> Response:
        repo_id, branch = request.groups
        present = self.store.get(repo_id).resolve(branch).files
        # "regular" for everything: the other modes need a storage service behind the Hub.
        answers = []
        for asked in request.json()["files"]:
            answer = {"path": asked["path"], "uploadMode": "regular", "shouldIgnore": False}
            if asked["path"] in present:
                answer["oid"] = present[asked["path"]]
            answers.append(answer)
        return Response({"files": answers})

    @route("POST", r"/api/kernels/REPO/commit/(.+)", writes=True)
    def _commit(self, request: Request) -> Response:
        repo_id, branch = request.groups
        repository = self.store.get(repo_id)
        if branch not in repository.branches:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        parent = repository.resolve(branch)
        files, title = dict(parent.files), "commit"
        for line in request.body.splitlines():
            step = json.loads(line)
            kind, value = step["key"], step["value"]
            if kind == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, parent.id):
                    raise HubError(412, "", f"{branch} has moved on from {value['parentCommit']}")
            elif kind == "file":
                files[value["path"]] = self.store.write_blob(base64.b64decode(value["content"]))
            elif kind == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise HubError(404, "EntryNotFound", f"A file with this name doesn't exist: {value['path']}")
            elif kind == "deletedFolder":
                prefix = value["path"].rstrip("/") + "/"
                files = {path: blob for path, blob in files.items() if not path.startswith(prefix)}
            else:
                raise HubError(400, "", f"This Hub takes no {kind!r} in a commit")
        commit = repository.add(branch, title, files)
        self.store.save(repo_id)
        url = f"{self.endpoint}/kernels/{repo_id}/commit/{commit.id}"
        return Response({"success": True, "commitOid": commit.id, "commitUrl": url, "hookOutput": ""})


def _iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def _refusal(error: HubError) -> Response:
    headers = {"X-Error-Message": str(error), **({"X-Error-Code": error.code} if error.code else {})}
    return Response({"error": str(error)}, error.status, headers)


def _handler_class(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    """The HTTP side: reads bodies, sends responses; all decisions are the hub's."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, text: str, *values: object) -> None:
            """Requests are kept in ``hub.requests``, not printed."""

        def _respond(self) -> None:
            body = self._body()
            if hub.lost is not None and re.search(hub.lost, f"{self.command} {self.path}"):
                self.close_connection = True
                return
            method = "GET" if self.command == "HEAD" else self.command
            response = hub.answer(method, self.path, body, self.headers.get("Authorization", ""))
            content = response.content
            is_json = not isinstance(content, bytes)
            payload = json.dumps(content).encode() if is_json else content
            # Logged before it is sent, so that a client that has its answer also finds it in the log.
            hub.requests.append((self.command, self.path, response.status))
            self.send_response(response.status)
            self.send_header("Content-Type", "application/json" if is_json else "application/octet-stream")
            self.send_header("Content-Length", str(len(payload)))
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(payload)

        do_GET = do_HEAD = do_POST = _respond

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="folder of the Hub's state")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--untrusted", action="store_true", help="no organisation is a trusted kernel publisher")
    parser.add_argument("--token", action="append", metavar="TOKEN", help="demand this token for writing (repeatable)")
    arguments = parser.parse_args()
    tokens = {token: "write" for token in arguments.token} if arguments.token else None
    hub = LoopbackHub(arguments.root, arguments.port, trusted=not arguments.untrusted, tokens=tokens)
    print(f"HF_ENDPOINT={hub.endpoint}", flush=True)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
