"""Figures in the documents: numbers in the text, and beside it, in docs/quoted/, where each of them comes from.

One writes `[1.87](../results/smollm2/shipped.json#figures.rows.prompt-lookup@0.tau)` into a page; then

    make reference

leaves `1.87` there, ends long lines where sentences do, and puts the rest into the page's file of docs/quoted/, in the
order of the page: the number, the file in docs/results/, the place in its `figures`, and how many of the same numbers
the page has before it, since the figure before. The site has the links again (this is a mkdocs hook), and a test holds
every number against its file.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
QUOTED = DOCS / "quoted"
LONGEST_LINE, WANTED_LINE, SHORTEST_LINE = 300, 240, 60  # letters
LINK = re.compile(r"\[([^\]\[]+)\]\(((?:\.\./|docs/)*results/(?:[\w.-]+/)*[\w.-]+\.json)#([^)\s]+)\)")


class Figure(NamedTuple):
    """A number as the page has it, the file in docs/results/, the place in it, and the same numbers before it."""

    text: str
    file: str
    place: str
    earlier: int = 0


def pages() -> list[Path]:
    """Every page that may quote figures."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def file_of(page: Path) -> Path:
    """Where a page's figures are told."""
    return (QUOTED / page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT)).with_suffix(".json")


def figures_of(page: Path) -> list[Figure]:
    file = file_of(page)
    return [Figure(*each) for each in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []


def linked(page: Path, text: str | None = None) -> str:
    """The page with its figures as links.

    Raises:
        ValueError: One of them is not there any more, or not as it was.
    """
    text = page.read_text(encoding="utf-8") if text is None else text
    parts, end = [], 0
    for figure in figures_of(page):
        found = place_of(text, figure.text, end, figure.earlier)
        if found is None:
            raise ValueError(
                f"{page.relative_to(ROOT)} does not say {figure.text} any more, which {figure.file} has at "
                f"{figure.place}: write the number as a link to its file, or take it out of {file_of(page).name}"
            )
        target = posixpath.join(_to_results(page), figure.file)
        parts.append(f"{text[end:found]}[{figure.text}]({target}#{figure.place})")
        end = found + len(figure.text)
    return "".join(parts) + text[end:]


def plain(page: Path, text: str) -> tuple[str, list[Figure]]:
    """A page with links as it is kept: without them; and its figures."""
    parts, found, end, size = [], [], 0, 0
    for link in LINK.finditer(text):
        between = text[end : link.start()]
        parts += [between, link[1]]
        found.append((size + len(between), link))
        size, end = size + len(between) + len(link[1]), link.end()
    kept = "".join(parts) + text[end:]
    figures, after = [], 0
    for start, link in found:
        earlier = 0
        while (there := place_of(kept, link[1], after, earlier)) != start:
            assert there is not None, link[0]
            earlier += 1
        file = posixpath.relpath(posixpath.normpath(posixpath.join(_folder(page), link[2])), "docs/results")
        figures.append(Figure(link[1], file, link[3], earlier))
        after = start + len(link[1])
    return kept, figures


def place_of(text: str, number: str, after: int, earlier: int) -> int | None:
    """Where the number stands by itself, not within another one, after so many others like it."""
    pattern = re.compile(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)")
    for found in pattern.finditer(text, after):
        if earlier == 0:
            return found.start()
        earlier -= 1
    return None


def _folder(page: Path) -> str:
    return page.parent.relative_to(ROOT).as_posix()


def _to_results(page: Path) -> str:
    return posixpath.relpath("docs/results", _folder(page))


def ended(text: str) -> str:
    """The page without lines of prose that are too long to read in an editor: ended where a sentence or a clause is."""
    lines: list[str] = []
    in_code = False
    for line in text.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        is_prose = not in_code and not line.lstrip().startswith(("|", "<", "#", "`" * 3))
        lines += _parts(line) if is_prose and len(line) > LONGEST_LINE else [line]
    return "\n".join(lines)


def _parts(line: str) -> list[str]:
    item = re.match(r"(\s*)((?:[-*+]|\d+\.)\s+)?", line)
    assert item is not None
    indent, parts = item[1] + " " * len(item[2] or ""), []
    while len(line) > WANTED_LINE:
        spaces = [place for place in _spaces(line) if SHORTEST_LINE < place <= WANTED_LINE]
        spaces = [place for place in spaces if not re.match(r"(\d+\.|[-*+#>|])", line[place + 1 :])]
        by_sign = ([place for place in spaces if line[place - 1] in signs] for signs in (".?!", ":;", ","))
        place = max(next(filter(None, by_sign), spaces), default=None)
        if place is None:
            break
        parts.append(line[:place])
        line = indent + line[place + 1 :]
    return [*parts, line]


def _spaces(line: str) -> list[int]:
    """Where a line may end: not within code, a link or brackets."""
    found, depth, in_code = [], 0, False
    for place, letter in enumerate(line):
        in_code ^= letter == "`"
        depth += 0 if in_code else (letter in "[(") - (letter in "])")
        if letter == " " and not in_code and depth <= 0:
            found.append(place)
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: the links of a page of docs/."""
    place = DOCS / page.file.src_uri
    return linked(place, markdown) if place.is_file() else markdown


def keep() -> None:
    """Move the links of every page to docs/quoted/."""
    for page in pages():
        text, figures = plain(page, linked(page))
        text = ended(text)
        page.write_text(text, encoding="utf-8")
        file = file_of(page)
        if figures:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = ",\n".join(json.dumps(figure[: 4 if figure.earlier else 3]) for figure in figures)
            file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        else:
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    keep()
