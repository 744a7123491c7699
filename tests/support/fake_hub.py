"""The Hub at the level of huggingface_hub's calls: repositories in memory, and refusals as it raises them."""

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from draftsmith.cli import push
from draftsmith.data.sources import distilled
from draftsmith.models.base import registry

TOKEN, USER, URL = "hf_secretOfThisTest", "tester", "https://hub.test"


def refused(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    """Return the error that huggingface_hub raises for this status."""
    return kind(f"{status} for {URL}", response=httpx2.Response(status, request=httpx2.Request("POST", URL)))


@dataclass
class Repo:
    """The newest commit of one branch: contents by path."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


def commit_id(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class FakeHub:
    """Stands for `HfApi()` and for the functions that download.

    calls: How often each was called. faults: What each raises instead, by its name. read_only: Owners of repositories
    that the token may not write to.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.repos: dict[str, Repo] = {}
        self.calls: Counter[str] = Counter()
        self.faults: dict[str, Exception] = {}
        self.read_only: set[str] = set()

    def files(self, repo: str) -> dict[str, bytes]:
        return self.repos[repo].files

    def whoami(self) -> dict[str, str]:
        self._called("whoami")
        return {"name": USER}

    def repo_info(self, repo: str, repo_type: str) -> Any:
        files = self._repo("repo_info", repo).files
        siblings = [SimpleNamespace(rfilename=name) for name in (".gitattributes", *files)]
        return SimpleNamespace(private=self.repos[repo].private, siblings=siblings)

    def create_repo(self, repo: str, private: bool, exist_ok: bool, repo_type: str) -> None:
        self._called("create_repo")
        if repo.split("/")[0] in self.read_only:
            raise refused(403)
        self.repos.setdefault(repo, Repo(private))

    def list_repo_files(self, repo: str, revision: str | None, repo_type: str) -> list[str]:
        return [".gitattributes", *self._repo("list_repo_files", repo).files]

    def upload_folder(
        self,
        repo_id: str,
        folder_path: Path,
        commit_message: str,
        revision: str | None,
        delete_patterns: list[str],
        repo_type: str,
    ) -> Any:
        repo = self._repo("upload_folder", repo_id)
        new = {p.relative_to(folder_path).as_posix(): p.read_bytes() for p in folder_path.rglob("*") if p.is_file()}
        left = {n: d for n, d in repo.files.items() if not any(fnmatch.fnmatch(n, p) for p in delete_patterns)}
        repo.files = left | new
        return SimpleNamespace(commit_url=f"{URL}/{repo_id}/commit/{commit_id(repo.files)}")

    def hf_hub_download(
        self,
        repo: str,
        name: str,
        local_files_only: bool = False,
        repo_type: str = "model",
        revision: str | None = None,
    ) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        files = self._repo("hf_hub_download", repo).files
        if name not in files:
            raise EntryNotFoundError(f"no {name}")
        return str(self._fetched({name: files[name]}) / name)

    def snapshot_download(
        self,
        repo: str,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: tuple[str, ...] = (),
        repo_type: str = "model",
    ) -> str:
        def matches(name: str, patterns: Any) -> bool:
            return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

        files = self._repo("snapshot_download", repo).files
        asked = {n: d for n, d in files.items() if matches(n, allow_patterns) and not matches(n, ignore_patterns)}
        return str(self._fetched(asked))

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.faults:
            raise self.faults[name]

    def _repo(self, name: str, repo: str) -> Repo:
        self._called(name)
        if repo not in self.repos:
            raise refused(404, RepositoryNotFoundError)
        return self.repos[repo]

    def _fetched(self, files: dict[str, bytes]) -> Path:
        folder = self.cache / commit_id(files)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The Hub of this process, with its token in the environment and an empty cache."""
    fake = FakeHub(tmp_path / "hub-cache")
    monkeypatch.setattr(push, "HfApi", lambda: fake)
    monkeypatch.setattr(push, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(registry, "snapshot_download", fake.snapshot_download)
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(distilled, name, getattr(fake, name))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    registry._fetched.cache_clear()
    yield fake
    registry._fetched.cache_clear()
