"""The Hub's API in a thread, as huggingface_hub calls it: git-like repositories in memory, LFS, and faults on demand.

Bytes arrive as they would there: small text files in the commit, the rest by the LFS batch and a PUT, or by Xet. What
has arrived once is not asked for again. Downloads are plain ones.
"""

import base64
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.utils._http as hub_http
import pytest
from huggingface_hub.utils._xet import abort_xet_session
from support.xet_store import ENVIRONMENT, XetStore

from draftsmith.models.base import published

TOKEN, USER = "hf_secretOfThisTest", "tester"
XET_TOKEN, XET_TOKEN_S = "xet-of-this-test", 3600
ATTRIBUTES = b"*.safetensors filter=lfs\n*.png filter=lfs\n"
LFS_SUFFIXES = (".safetensors", ".png")


@dataclass
class Repo:
    """Branches of commits, the oldest first; a commit is (id, contents by path)."""

    private: bool
    branches: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        history = self.branches.setdefault(branch, [])
        parts = [branch, str(len(history)), *(hashlib.sha1(data).hexdigest() for data in files.values())]
        commit_id = hashlib.sha1("".join(parts).encode()).hexdigest()
        history.append((commit_id, files))
        return commit_id

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        every = (commit for history in self.branches.values() for commit in history)
        return next((commit for commit in every if commit[0] == revision), None)


# Sees `METHOD kind` (as in `counts`) and how often it was asked for. Gives a status, "hang up", or None: as usual.
Script = Callable[[str, int], int | str | None]


class HubServer:
    """Serves on `url`.

    counts: requests by `METHOD kind`: whoami, create, validate, preupload, lfs-batch, lfs, commit, branch, info, tree,
    resolve; of Xet xet-write-token, chunks, xorbs, shards. sent: SHA-256 of every file that came whole by LFS or Xet.
    read_only: names of owners whom TOKEN may not write to.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.sent: list[str] = []
        self.xet = XetStore()
        self.read_only: set[str] = set()
        self.script: Script = lambda kind, number: None
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repos[repo].at(revision)
        assert found is not None
        return {name: data for name, data in found[1].items() if name != ".gitattributes"}

    def fault(self, kind: str) -> int | str | None:
        with self._lock:
            self.counts[kind] += 1
            return self.script(kind, self.counts[kind])


@dataclass
class Answer:
    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


NO_REPO = Answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _any(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            kind = f"{self.command} {_kind(path)}"
            fault = hub.fault(kind)
            length = int(self.headers.get("Content-Length") or 0)
            if fault == "hang up":  # in the middle of what comes
                self.rfile.read(length // 2)
                self.close_connection = True
                return
            data = self._chunked() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
            if isinstance(fault, int):
                answer = Answer({"error": "by the script"}, fault)
            elif kind.endswith(" lfs"):  # a signed address, without the token
                answer = _take(hub, path.rpartition("/")[2], data)
            elif path.startswith("v1/") and self.headers.get("Authorization") == f"Bearer {XET_TOKEN}":
                answer = _take_xet(hub, kind, path.rpartition("/")[2], data)
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                answer = Answer({"error": "Invalid username or password."}, 401)
            else:
                answer = _answer(hub, kind, path, data)
            self._send(answer)

        do_GET = do_HEAD = do_POST = do_PUT = _any

        def _chunked(self) -> bytes:
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def _send(self, answer: Answer) -> None:
            data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response_only(answer.status)
            for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Handler


def _kind(path: str) -> str:
    parts = path.split("/")
    if path.endswith(".git/info/lfs/objects/batch"):
        return "lfs-batch"
    if parts[0] == "lfs":
        return "lfs"
    if parts[0] == "v1":
        return parts[1]
    if parts[2:3] == ["resolve"]:
        return "resolve"
    if parts[:2] == ["api", "models"]:
        return parts[4] if len(parts) > 4 and parts[4] != "revision" else "info"
    return {"api/whoami-v2": "whoami", "api/repos/create": "create", "api/validate-yaml": "validate"}.get(path, path)


def _take(hub: HubServer, oid: str, data: bytes) -> Answer:
    if hashlib.sha256(data).hexdigest() != oid:
        return Answer({"error": "other bytes"}, 400)
    hub.blobs[oid] = data
    hub.sent.append(oid)
    return Answer({})


def _take_xet(hub: HubServer, kind: str, address: str, data: bytes) -> Answer:
    if kind == "POST xorbs":
        hub.xet.take_xorb(address, data)
        return Answer({"was_inserted": True})
    if kind == "POST shards":
        for file in hub.xet.files(data):
            _take(hub, hashlib.sha256(file).hexdigest(), file)
        return Answer({"result": 1})
    return Answer({"error": "no such chunk"}, 404)


def _answer(hub: HubServer, kind: str, path: str, data: bytes) -> Answer:
    if kind == "GET whoami":
        return Answer({"type": "user", "name": USER, "orgs": []})
    if kind == "POST validate":
        return Answer({"errors": [], "warnings": []})
    if kind == "POST create":
        return _create(hub, json.loads(data))
    parts = path.split("/")
    name = "/".join(parts[:2] if kind.endswith("resolve") or kind == "POST lfs-batch" else parts[2:4])
    repo = hub.repos.get(name.removesuffix(".git"))
    if repo is None:
        return NO_REPO
    if name.split("/")[0] in hub.read_only and kind.split()[0] == "POST":
        return Answer({"error": "Forbidden"}, 403)
    if kind == "GET xet-write-token":
        return Answer({"casUrl": hub.url, "accessToken": XET_TOKEN, "exp": int(time.time()) + XET_TOKEN_S})
    if kind == "POST lfs-batch":
        return Answer({"transfer": "basic", "objects": [_action(hub, each) for each in json.loads(data)["objects"]]})
    if kind == "POST branch":
        if parts[5] in repo.branches:
            return Answer({"error": "there"}, 409)
        repo.branches[parts[5]] = list(repo.branches["main"])
        return Answer({})
    revision = parts[3] if kind.endswith("resolve") else parts[5] if len(parts) > 5 else "main"
    found = repo.at(revision)
    if found is None:
        return Answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
    commit_id, files = found
    if kind == "POST preupload":
        asked = [entry["path"] for entry in json.loads(data)["files"]]
        return Answer({"files": [_mode(path, files) for path in asked]})
    if kind == "POST commit":
        return _commit(hub, repo, name, revision, data)
    if kind.endswith("resolve"):
        return _content(files, "/".join(parts[4:]), commit_id)
    if kind == "GET tree":
        return Answer([_entry(path, content) for path, content in files.items()])
    siblings = [{"rfilename": path} for path in files]
    return Answer({"id": name, "sha": commit_id, "private": repo.private, "siblings": siblings, "tags": []})


def _create(hub: HubServer, asked: dict[str, Any]) -> Answer:
    name = f"{asked.get('organization') or USER}/{asked['name']}"
    if name.split("/")[0] in hub.read_only:
        return Answer({"error": "You don't have the rights"}, 403)
    if name in hub.repos:
        return Answer({"error": "You already created this model repo"}, 409)
    hub.repos[name] = Repo(asked.get("visibility") == "private")
    hub.repos[name].commit("main", {".gitattributes": ATTRIBUTES})
    return Answer({"url": f"{hub.url}/{name}", "name": name})


def _action(hub: HubServer, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["oid"] in hub.blobs:
        return asked
    return {**asked, "actions": {"upload": {"href": f"{hub.url}/lfs/{asked['oid']}"}}}


def _mode(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    lfs = path.endswith(LFS_SUFFIXES)
    oid = None if path not in files else hashlib.sha256(files[path]).hexdigest() if lfs else _blob_id(files[path])
    return {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _commit(hub: HubServer, repo: Repo, name: str, branch: str, data: bytes) -> Answer:
    files = dict((repo.at(branch) or ("", {}))[1])
    for line in map(json.loads, data.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.blobs[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    commit_id = repo.commit(branch, files)
    return Answer({"success": True, "commitOid": commit_id, "commitUrl": f"{hub.url}/{name}/commit/{commit_id}"})


def _content(files: dict[str, bytes], path: str, commit_id: str) -> Answer:
    if path not in files:
        return Answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit_id})
    lfs = path.endswith(LFS_SUFFIXES)
    etag = hashlib.sha256(files[path]).hexdigest() if lfs else _blob_id(files[path])
    return Answer(files[path], headers={"ETag": f'"{etag}"', "X-Repo-Commit": commit_id})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": _blob_id(data), "size": len(data), "path": path}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub of this process, with its token in the environment and an empty cache; nothing is slept through."""
    server = HubServer()
    constants = huggingface_hub.constants
    for name, value in {
        "ENDPOINT": server.url,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(tmp_path / "hub-cache"),
        "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hub_http, "time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None}))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    huggingface_hub.utils.close_session()  # of a test with another server, or offline
    published._fetched.cache_clear()
    yield server
    server.stop()
    huggingface_hub.utils.close_session()
    published._fetched.cache_clear()


@pytest.fixture
def xet(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The same with Xet, as huggingface_hub does wherever hf_xet is installed."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    for name, value in {**ENVIRONMENT, "HF_XET_CACHE": str(tmp_path / "xet-cache")}.items():
        monkeypatch.setenv(name, value)
    abort_xet_session()  # of other settings
    yield hub
    abort_xet_session()
