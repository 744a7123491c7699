"""Links of the documents lead somewhere, their draftsmith commands are valid, and their tables follow the code."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from generate import reference
from generate.picture import pictures
from support.places import ROOT
from support.served_drafters import IN_LLAMACPP, SERVED
from typer.main import get_group

from draftsmith.cli.main import app
from draftsmith.models.formats.exporting import EXPORTERS
from draftsmith.recipes.loading import load_recipe
from draftsmith.results import RESULT_KEYS

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_link_targets_exist() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            place = (page.parent / link.partition("#")[0]).resolve()
            if not re.match(r"[a-z]+:|#", link) and not place.exists():
                broken.append((page.name, link))
    assert broken == []


@pytest.mark.slow
def test_site_builds(tmp_path: Path) -> None:
    """With `--strict` broken anchors, and pages outside the navigation, are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "contributing.html").is_file()


def test_commands_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `draftsmith` command in a bash block is parsed up to its work, and shipped recipes with their overrides."""
    group, given = get_group(app), dict[str, Any]()
    for command in group.commands.values():
        command.callback = lambda **values: given.update(values)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    wrong, count = [], 0
    for page in PAGES:
        written = reference.without_made(page.read_text(encoding="utf-8"))
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", written, re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^\s*draftsmith ([^$\n]*)$", block.replace("\\\n", ""), re.MULTILINE):
                count += 1
                given.clear()
                try:
                    group.main(shlex.split(line, comments=True), standalone_mode=False)
                    for name in [given["recipe"]] if given.get("recipe") else given.get("recipes") or []:
                        words = str(name).split()
                        if not re.search(r"/|=|\.yaml$", words[0]):
                            load_recipe(words[0], [*words[1:], *(given.get("overrides") or [])])
                except (Exception, SystemExit) as error:
                    wrong.append(f"{page.name}: draftsmith {line}: {error}")
    assert wrong == []
    assert count > 40


def test_tables_agree_with_the_code() -> None:
    """If they do not, `make reference` rewrites them."""
    texts = {page: page.read_text(encoding="utf-8") for page in reference.PAGES}
    assert [page.name for page, text in texts.items() if reference.filled(text) != text] == []
    made = {name for text in texts.values() for name in re.findall(r"^<!-- made: (\w+) -->$", text, re.MULTILINE)}
    assert made == {*reference.MADE}


def speedups(file: str, rows: str) -> list[str]:
    """Return the speedups, mean of the tasks, of some rows of a file in `docs/results`."""
    found = json.loads((ROOT / "docs" / "results" / file).read_text(encoding="utf-8"))["figures"]["rows"]
    return [f"{found[row]['over_tasks']['speedup_mean']:.2f}" for row in rows.split()]


def test_sentences_repeat_the_figures_of_their_file() -> None:
    """Outside the made tables too: README and the pages that name the headline again."""
    shipped = ROOT / "docs" / "results" / "smollm2" / "shipped.json"
    figures = json.loads(shipped.read_text(encoding="utf-8"))["figures"]
    alone, both, untrained = speedups("smollm2/shipped.json", "tree-7@0 tree-7-lookup@0 prompt-lookup@0")
    coder, coder_both = speedups("qwen/coder_0.5b_512.json", "tree-6@0 tree-6-lookup@0")
    sampled = speedups("qwen/coder_0.5b_t1.json", "tree-6@1 prompt-lookup@1 tree-6-lookup@1")
    intel = speedups("qwen/coder_0.5b_512_intel.json", "tree-6@0 prompt-lookup@0 tree-6-lookup@0")
    share = f"at {figures['baseline'][0]['share']:.0%}".replace("%", " %")
    tau = figures["rows"]["tree-7@0"]["over_tasks"]["tau"]
    smollm2 = (f"reaches {alone} times", f"lookups {both} times", f"{share} of the memory's")
    sentences = {
        "README.md": (
            f"{share} of the memory's bandwidth", "{}x, {}x and {}x".format(*sampled), "{}x, {}x and {}x".format(*intel)
        ),
        "docs/measured/results.md": (f"generates [{coder} times]", f"lookups {coder_both} times", *smollm2),
        "docs/guides/choose.md": (f"{untrained}x on SmolLM2", f"inner features: {tau:.2f} and"),
    }  # fmt: skip
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in sentences}
    assert [(page, each) for page, of_page in sentences.items() for each in of_page if each not in texts[page]] == []


def test_pictures_agree_with_the_figures() -> None:
    """If they do not, `make reference` redraws them."""
    assert [file.name for file, text in pictures().items() if file.read_text(encoding="utf-8") != text] == []


def test_results_name_their_origin() -> None:
    for file in (ROOT / "docs" / "results").rglob("*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert tuple(result) == RESULT_KEYS, file
        assert all(result.values()), file


def test_kinds_that_the_readme_calls_run_are_tested_in_real_engines() -> None:
    shown = {(kind, to) for kind, to, _ in SERVED.values()} | {(kind, "gguf") for kind, _ in IN_LLAMACPP.values()}
    assert shown == {(kind, to) for kind, to in EXPORTERS if to in reference.RUN_IN_TESTS}
