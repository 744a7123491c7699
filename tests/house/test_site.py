"""`make docs`: the site builds, no link or anchor is broken, nothing is fetched from elsewhere, folders stay small."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.places import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


class Addresses(HTMLParser):
    """What a page fetches by itself, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.ids.update({values["id"]} if "id" in values else ())
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "canonical" not in values.get("rel", ""):
            self.fetched.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "object") and (values.get("src") or values.get("data")):
            self.fetched.append(values.get("src") or values["data"])


def addresses(page: Path) -> Addresses:
    parser = Addresses()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(ROOT, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    names = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in PAGES} | {
        "contributing.html",
        "changelog.html",
    }
    assert {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"} == names
    home = addresses(site / "index.html")
    assert names - {link.partition("#")[0] for link in home.links} == set()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    fetched = {address for page in pages for address in addresses(page).fetched}
    assert {address for address in fetched if re.match(r"(https?:)?//", address)} == set()
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", styles) == []


def test_every_link_of_the_built_pages_leads_somewhere(site: Path) -> None:
    """By the pages as they are, not by what built them: files of the repository too, which come along."""
    parsed = {page: addresses(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, found in parsed.items():
        for link in found.links:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            place = (page.parent / name).resolve() if name else page
            if not place.exists() or (place in parsed and anchor and anchor not in parsed[place].ids):
                broken.append((page.name, link))
    assert broken == []
    assert (site / "source" / "eval" / "trees" / "path_lookup.py.txt").read_bytes() == (
        ROOT / "eval" / "trees" / "path_lookup.py"
    ).read_bytes()


def test_lists_and_tables_are_none_of_running_text(site: Path) -> None:
    """mkdocs' Markdown wants an empty line before them, GitHub's does not."""
    marks = re.compile(r"^(?:\d+\.|[-*]) |^\|", re.MULTILINE)
    texts = {
        page.name: re.sub(r"<pre.*?</pre>", "", page.read_text(), flags=re.DOTALL) for page in site.rglob("*.html")
    }
    assert {name: found for name, text in texts.items() if (found := marks.findall(text))} == {}


@pytest.mark.parametrize(
    "line",
    ["[a](nowhere.md)", "[a](reference/formats.md#nowhere)", "[a](../eval/nowhere.py)", "[a](#nowhere)", "[a](/eval)"],
)
def test_a_broken_link_fails_the_build(line: str, tmp_path: Path) -> None:
    for name in (
        "mkdocs.yml",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *map(str, (file.relative_to(ROOT) for file in files_of_the_site())),
    ):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    for name in ("data", "eval", "models", "train", "recipes", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("Makefile", "LICENSE", "README.md", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    with (tmp_path / "docs" / "index.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{line}\n")
    assert build(tmp_path, tmp_path / "site").returncode != 0


def files_of_the_site() -> list[Path]:
    return [file for file in DOCS.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def test_folders_and_pages_are_small() -> None:
    folders = {DOCS, *(file.parent for file in files_of_the_site())}
    sizes = {folder: len([entry for entry in folder.iterdir() if entry.name != "__pycache__"]) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > 15} == {}
    pages = [*PAGES, ROOT / "README.md", *DOCS.rglob("*.py")]
    lengths = {page: len(page.read_text(encoding="utf-8").splitlines()) for page in pages}
    assert {page: lines for page, lines in lengths.items() if lines >= 400} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_has_one_title_and_says_what_it_is_for(page: Path) -> None:
    """One heading of the first rank, and prose right under it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    title, first = [line for line in text.splitlines() if line.strip()][:2]
    assert re.match(r"# \S", title)
    assert re.match(r"[A-Z`*]", first), first
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
