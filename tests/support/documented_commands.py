"""Commands as documents show them: fenced bash blocks, indented ones, and code spans that are whole commands."""

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("draftsmith", "make", "python", "accelerate", "pip")
FENCED = re.compile(r"^( *)```bash\n(.*?)^\1```", re.DOTALL | re.MULTILINE)  # in lists too
ANY_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(rf"(?:^    (?:{'|'.join(PROGRAMS)}) .*\n(?:^    .*\n)*)+", re.MULTILINE)
SPAN = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) [^`\n]+)`")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Command:
    """One of them. text: as it stands there; words: after the shell, without what is assigned in front."""

    page: str
    text: str
    words: tuple[str, ...]


def commands_of(page: Path, name: str) -> list[Command]:
    """All commands of a page, in order. Variables that a line sets are known in the lines below it.

    Raises:
        ValueError: A quotation is not closed.
    """
    text = page.read_text(encoding="utf-8")
    variables: dict[str, str] = {}
    blocks = [textwrap.dedent(match[2]) for match in FENCED.finditer(text)]
    rest = ANY_FENCED.sub("", text)
    blocks += [re.sub(r"(?m)^    ", "", match[0]) for match in INDENTED.finditer(rest)]
    found = [
        Command(name, line, words)
        for block in blocks
        if not block.startswith("#!")  # a script of its own, see `scripts_of`
        for line in _lines(block)
        for words in _simple_commands(line, variables)
    ]
    spans = [
        Command(name, match[1], words) for match in SPAN.finditer(rest) for words in _simple_commands(match[1], {})
    ]
    return list(dict.fromkeys([*found, *filter(_is_whole, spans)]))


def scripts_of(page: Path) -> list[str]:
    """Blocks that are files of their own, from their `#!` on."""
    return [match[2] for match in FENCED.finditer(page.read_text(encoding="utf-8")) if match[2].startswith("#!")]


def _is_whole(command: Command) -> bool:
    """`draftsmith eval`, `draftsmith export --to vllm`, `accelerate launch` in running text are names: what they work
    on is left out."""
    words = command.words
    return words[0] not in ("draftsmith", "accelerate") or (len(words) > 2 and not words[2].startswith("-"))


def _lines(block: str) -> list[str]:
    """Logical lines: those that end in a backslash, or within a quotation, go on."""
    lines, open_line = [], ""
    for line in block.splitlines():
        open_line += line.removesuffix("\\") if line.endswith("\\") else line + "\n"
        if line.endswith("\\"):
            continue
        try:
            shlex.split(open_line, comments=True)
        except ValueError:  # no closing quotation yet
            continue
        lines.append(open_line.strip())
        open_line = ""
    if open_line.strip():
        raise ValueError(f"a quotation is not closed: {open_line}")
    return [line for line in lines if shlex.split(line, comments=True)]


def _simple_commands(line: str, variables: dict[str, str]) -> list[tuple[str, ...]]:
    """The words of each command of a pipeline; assignments alone are remembered."""
    known = re.sub(r"\$(\w+)", lambda match: variables.get(match[1], match[0]), line)
    lexer = shlex.shlex(known, posix=True, punctuation_chars="|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    pipeline: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            pipeline.append([])
        else:
            pipeline[-1].append(word)
    if all(ASSIGNMENT.match(word) for word in pipeline[0]):
        # As written, so that quotations inside are split where the variable is used.
        variables.update(word.split("=", 1) for word in pipeline[0])
        return []
    found = []
    for words in pipeline:
        while words and ASSIGNMENT.match(words[0]):
            words = words[1:]
        found.append(tuple(words))
    return found
