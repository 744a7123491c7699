"""`make docs`: the site builds, with the pages made from the code; no link is broken, nothing is fetched."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from generate import reference
from support.places import ROOT

from draftsmith.recipes.schema import Recipe

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
REFERENCES = {f"reference/{name}.html" for name in ("recipes", "options", "commands", "formats")}


class Addresses(HTMLParser):
    """What a page fetches by itself, and where its links lead."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.ids.update({values["id"]} if "id" in values else ())
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "canonical" not in values.get("rel", ""):
            self.fetched.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "object") and (values.get("src") or values.get("data")):
            self.fetched.append(values.get("src") or values["data"])


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """By the pages as they are built: all are in the navigation, and every link and anchor of theirs is there."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    parsed = {page: Addresses(page) for page in tmp_path.rglob("*.html") if page.name != "404.html"}
    names = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in PAGES} | REFERENCES
    assert {page.relative_to(tmp_path).as_posix() for page in parsed} == names | {"contributing.html", "changelog.html"}
    home = parsed[tmp_path / "index.html"]
    assert names - {link.partition("#")[0] for link in home.links} == set()
    assert [
        address for found in parsed.values() for address in found.fetched if re.match(r"(https?:)?//", address)
    ] == []
    broken = []
    for page, found in parsed.items():
        for link in found.links:
            name, _, anchor = link.partition("#")
            place = (page.parent / name).resolve() if name else page
            there = place.exists() and (not anchor or place not in parsed or anchor in parsed[place].ids)
            if not re.match(r"[a-z]+:", link) and not there:
                broken.append((page.name, link))
    assert broken == []
    source = tmp_path / "source" / "eval" / "trees" / "verify.py.txt"
    assert source.read_bytes() == (ROOT / "eval" / "trees" / "verify.py").read_bytes()


def test_the_recipe_reference_has_every_key() -> None:
    """By walking through a recipe itself, as it is written into a run's folder."""
    values = Recipe(name="mine", data={"conversations": {"mixture": [{"source": "a.json"}]}}).model_dump()
    headed = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", reference.recipes_page(), re.DOTALL | re.MULTILINE)
    tables = {
        heading.strip("`").replace("The recipe itself", ""): set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE))
        for heading, body in headed
    }

    def walk(section: dict[str, object], key: str) -> None:
        found = tables["data.conversations"] if key == "data.conversations.mixture" else set()
        assert set(section) <= tables[key] | found, key
        for name, value in section.items():
            place = f"{key}.{name}".lstrip(".")
            inner = value[0] if isinstance(value, list) and value else value
            if isinstance(inner, dict) and place in tables:
                walk(inner, place)

    walk(values, "")


def test_every_page_has_one_title_and_says_what_it_is_for() -> None:
    """One heading of the first rank, and prose right under it."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        title, first = [line for line in text.splitlines() if line.strip()][:2]
        assert re.match(r"# \S", title), page
        assert re.match(r"[A-Z`*]", first), page
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page
