"""Texts and names of the source are in plain words: the counted habits of an older dialect may only decrease.

`CONTRIBUTING.md` has the rules. `LIMITS` are today's counts: never raise one.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from support.places import PACKAGES, ROOT

FOLDERS = (*PACKAGES, "benchmarks", "examples", "docs/generate", "embedded_target")
LIMITS = {"cli": 1, "embedded_target": 1}  # hits that are still allowed
# What to write instead, by pattern.
WORDS = {
    r"\bso (many|much)\b": "name the quantity",
    r"\banew\b": "again, from scratch",
    r"\balike\b": "equal, in the same way",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\bwhoever\b": "the caller, the client, the user",
    r"\b(is|are|was|were|be) told\b|\btold (of|in|by|that|what)\b|\btells? (of|what|how)\b": "report, log, pass",
    r"\b(is|are|was|were) asked\b|\basked (for|of|in|by)\b": "prompted, requested, called",
    r"\bcame? to\b(?! a (stop|halt))|\b(comes to|becam?es? of)\b": "the result, the outcome",
    r"\b(goes|go|going|went) on\b": "resume, continue",
    r"\bkept[ -]out\b": "held-out",
    r"\bunder way\b": "running, in flight",
    r"\bof (its|their|his|our) own\b": "separate, or `own` before the noun",
    r"\bbeg[ua]n\b": "started",
    r"\bat once\b": "immediately, or concurrently",
    r"\blikewise\b": "name it again",
    r"\b(what|that) is there\b|\bwhere there (is|are) (one|none|some)\b": "name the noun",
}
ANY_WORD = re.compile("|".join(WORDS), re.I)  # first, as most texts have none
DOCSTRINGS = {
    r"(What|Hold|Say|Tell|Let|Give)\b": "begin with another verb, or a noun phrase for a class",
    r"(Args|Raises|Returns):": "begin with a summary line",
}
NAMES = re.compile(
    r"_*(asked|said|told|wanted|whoever|gone|of_them|there|taken|found_.*|what_.*|refuse_.*|told_.*|.*_told|.*_asked)",
    re.I,
)


def habits_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, text found, what to write instead) of docstrings, comments, strings and names that are defined."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            doc = ast.get_docstring(node) or ""
            hits = ((re.match(pattern, doc), advice) for pattern, advice in DOCSTRINGS.items())
            yield from ((node.lineno, hit[0], advice) for hit, advice in hits if hit)
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "name", None)
        if isinstance(name, str) and not isinstance(node, ast.alias | ast.ExceptHandler) and NAMES.fullmatch(name):
            yield node.lineno, name, "name a function by a verb, a variable by a noun"
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from in_text(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from in_text(token.start[0], token.string)


def in_text(line: int, text: str) -> Iterator[tuple[int, str, str]]:
    for pattern, advice in WORDS.items() if ANY_WORD.search(text) else ():
        yield from ((line, hit[0], advice) for hit in re.finditer(pattern, text, re.I))


@pytest.mark.parametrize("folder", FOLDERS)
def test_plain_words(folder: str) -> None:
    places = [
        f"{file.relative_to(ROOT)}:{line}: `{words}`: {advice}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, words, advice in habits_in(file.read_text(encoding="utf-8"))
    ]
    assert len(places) <= LIMITS.get(folder, 0), "\n".join(places)


def test_check_finds_habits() -> None:
    source = """
def told(asked: int) -> None:
    \"\"\"What is asked for.\"\"\"
    print("so many, anew")  # whoever
"""
    assert [words for _, words, _ in habits_in(source)] == [
        "What", "told", "asked", "is asked", "so many", "anew", "whoever",
    ]  # fmt: skip
