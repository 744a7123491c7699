"""Sets of questions that `eval.questions` names, and where their publishers keep the files.

A set is fetched once, at a pinned commit. None but `embedded` is part of this project: their licences differ.
"""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Iterable
from pathlib import Path, PurePath

from draftsmith.errors import UserError, reason
from draftsmith.files import CACHE_VARIABLE, cache_root, write_atomically
from draftsmith.hub import hub_errors
from draftsmith.recipes.conversations import SourceRecipe

EMBEDDED, SPEC_BENCH, MT_BENCH = "embedded", "spec_bench", "mt_bench"
EMBEDDED_FILE = Path(__file__).parents[1] / "embedded" / "embedded.jsonl"
# Of GitHub: the file's address and its SHA-256.
GITHUB = {
    SPEC_BENCH: (
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/66230f10cb0a02aced5ef3ce1e85163c16160454/data/"
        "spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    ),
    MT_BENCH: (
        "https://raw.githubusercontent.com/lm-sys/FastChat/587d5cfa1609a43d192cedb8441cac3c17db105d/fastchat/"
        "llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
}
# Of the Hub: the dataset, its commit and the file.
HUB = {
    "humaneval": (
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "openai_humaneval/test-00000-of-00001.parquet",
    ),
    "gsm8k": ("openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", "main/test-00000-of-00001.parquet"),
    "math_500": ("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test.jsonl"),
    "mbpp": (
        "google-research-datasets/mbpp",
        "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        "full/test-00000-of-00001.parquet",
    ),
}
NAMES = (EMBEDDED, *GITHUB, *HUB)
TIMEOUT_S = 60.0


def set_name(source: str) -> str:
    """Return a question set's short name: its published name, or its file's name (for `test.*` the folder's name)."""
    if source in NAMES:
        return source
    name = PurePath(SourceRecipe(source=source).label).name
    return PurePath(source).parent.name or name if name == "test" else name


def questions_file(source: str) -> Path:
    """Return the local file of a question set; a published set is downloaded the first time.

    Raises:
        UserError: The file cannot be downloaded, or its SHA-256 is not the pinned one.
    """
    if source == EMBEDDED:
        return EMBEDDED_FILE
    if source in GITHUB:
        return _fetch_from_github(source)
    if source in HUB:
        import huggingface_hub

        dataset, commit, file = HUB[source]
        problem = f"questions `{source}` cannot be fetched (eval.questions takes the path of a copy too)"
        with hub_errors(problem, dataset):
            return Path(huggingface_hub.hf_hub_download(dataset, file, repo_type="dataset", revision=commit))
    return Path(source)


def questions_files(sources: Iterable[str]) -> dict[str, Path]:
    """Return the local files of question sets, by the sets' short names."""
    return {set_name(source): questions_file(source) for source in sources}


def _fetch_from_github(name: str) -> Path:
    file, (address, sha256) = cache_root() / name / "question.jsonl", GITHUB[name]
    if file.is_file():
        return file
    way_out = (
        f"download it elsewhere and set eval.questions to it, or put it at {file} (${CACHE_VARIABLE} sets the folder)"
    )
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except OSError as error:
        raise UserError(f"questions `{name}` cannot be fetched from {address} ({reason(error)}): {way_out}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"the file at {address} is not the pinned one of `{name}` (its SHA-256 differs): {way_out}")
    write_atomically(file, content.decode("utf-8"))
    return file
