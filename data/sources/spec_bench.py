"""Spec-Bench's own 480 questions (Xia et al., arXiv 2401.07851), fetched once from its repository and checked by hash.

They are no part of this project: the sets that they were taken from have licences of their own.
"""

import hashlib
import urllib.request
from pathlib import Path

from draftsmith.recipes.cache import CACHE_VARIABLE, cache_root
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import write_atomically

SPEC_BENCH = "spec_bench"
COMMIT = "66230f10cb0a02aced5ef3ce1e85163c16160454"
URL = f"https://raw.githubusercontent.com/hemingkx/Spec-Bench/{COMMIT}/data/spec_bench/question.jsonl"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
TIMEOUT_S = 60.0


def spec_bench_file() -> Path:
    """The file in draftsmith's cache; fetched the first time.

    Raises:
        UserError: It cannot be fetched, or what came is another file.
    """
    file = cache_root() / "spec_bench" / "question.jsonl"
    if file.is_file():
        return file
    way_out = (
        f"fetch it elsewhere and name it as eval.questions, or put it at {file} (its folder is ${CACHE_VARIABLE}'s)"
    )
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
    except OSError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"Spec-Bench's questions cannot be fetched from {URL} ({reason}): {way_out}") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"what {URL} gave is not Spec-Bench's question file (another SHA-256): {way_out}")
    write_atomically(file, content.decode("utf-8"))
    return file
