"""What the documents name is there: links, paths, modules, commands, make targets."""

import importlib.util
import re
from pathlib import Path

import pytest
from support.places import PACKAGES, ROOT
from typer.main import get_group

from draftsmith.eval.commands.cli import app

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "models/embedded_target/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = [
    *(file for name in (*PACKAGES, "benchmarks", "tests") for file in (ROOT / name).rglob("*.py")),
    *(ROOT / "recipes").glob("*.yaml"),
    *(
        ROOT / name
        for name in (
            "Makefile",
            "pyproject.toml",
            ".pre-commit-config.yaml",
            ".ci/run",
            ".ci/vllm_env",
            ".ci/smollm2_gguf",
            ".ci/llamacpp_env",
        )
    ),
]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def code_of(page: Path) -> list[str]:
    """Code spans, and lines of code blocks that are ours: samples of the embedded target's answers are not."""
    text = page.read_text(encoding="utf-8").partition("## Samples")[0]
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*re.findall(r"`([^`]+)`", rest), *(line for block in blocks for line in block.splitlines())]


def names(page: Path, pattern: str) -> set[str]:
    return {name for code in code_of(page) for name in re.findall(pattern, code)}


@pytest.fixture(params=PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def page(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_links(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8").partition("## Samples")[0])
    links = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_paths(page: Path) -> None:
    """Files of source anywhere in code, and folders named as `models/drafters/`."""
    files = names(page, r"(?:\w[\w.-]*/)+[\w.-]+\.(?:py|yaml|j2|toml)\b(?!/)")
    folders = {
        name for name in names(page, r"^((?:\w+/)+)$") if name.split("/")[0] in (*PACKAGES, "tests", "benchmarks")
    }
    assert [
        name for name in sorted(files | folders) if not name.startswith("runs/") and not (ROOT / name).exists()
    ] == []


def test_modules(page: Path) -> None:
    modules = names(page, r"\bdraftsmith(?:\.\w+)+")
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


def test_commands(page: Path) -> None:
    assert names(page, r"(?:^|\s)draftsmith ([a-z]\w*)") <= set(get_group(app).commands)


def test_make_targets(page: Path) -> None:
    assert names(page, r"^make ([a-z0-9-]+)") <= TARGETS


def test_commands_of_the_makefile() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"/draftsmith (\w+)", text)) <= set(get_group(app).commands)


def test_paths_in_sources() -> None:
    """Docstrings and comments that name a file of ours by its folder."""
    ours = "|".join((*PACKAGES, "tests", "benchmarks"))
    pattern = re.compile(rf"(?<![\w./-])(?:{ours})/[\w/-]+\.(?:py|yaml|j2)\b")
    found = {(file, name) for file in SOURCES for name in pattern.findall(file.read_text(encoding="utf-8"))}
    assert {(file.name, name) for file, name in found if not (ROOT / name).exists()} == set()
