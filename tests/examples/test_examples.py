"""Each script of `examples/`, in one folder: the first one that needs a drafter trains it."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from support.places import ROOT

from draftsmith.recipes import loading
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.schema import Recipe

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.slow  # one script trains the drafter that the others need


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a script with less data and fewer steps, and returns its output."""

    def load(name: str, overrides: list[str]) -> Recipe:
        return load_recipe(name, [*overrides, "data.conversations.limit=150", "train.max_steps=60"])

    def run_script(script: str, *arguments: str) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(loading, "load_recipe", load)
        monkeypatch.setattr("sys.argv", [script, *arguments])
        capsys.readouterr()
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_readme_names_each_script() -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+\.py)\)", readme)) == [script.name for script in SCRIPTS]


def test_decode_with_a_tree(run: Callable[..., str]) -> None:
    """It prints a mark for each committed token of a round."""
    out = run("decode_with_a_tree.py", "--new-tokens", "20")
    rounds = re.split(r"^round: ", out, flags=re.MULTILINE)[1:]
    assert len(rounds) == int(re.search(r"tokens in (\d+) rounds", out)[1])
    for text in rounds:
        drafted, accepted = map(int, re.match(r"(\d+) drafted, (\d+) accepted", text).groups())
        marks = re.findall(r"^  ([*+ ]) *(?:'.*'|\".*\")$", text, re.MULTILINE)
        assert (len(marks), marks.count("*"), marks.count("+")) == (drafted + 2, accepted + 1, 1)  # the root is marked
    assert sum(int(re.match(r"\d+ drafted, (\d+)", text)[1]) for text in rounds) >= 2
    assert out.endswith("identical to the target's own answer: True\n")


def test_draw_acceptance(run: Callable[..., str], folder: Path) -> None:
    assert "rounds" in run("draw_acceptance.py", "--new-tokens", "24")
    assert (folder / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_measure_a_drafter(run: Callable[..., str], folder: Path) -> None:
    """The printed figures are those of the run's result."""
    run("decode_with_a_tree.py", "--new-tokens", "4")
    out = run("measure_a_drafter.py", "runs/example/drafter", "--new-tokens", "16")
    found = re.findall(r"^(chain|tree): tau ([\d.]+), ([\d.]+)x \[([\d.]+), ([\d.]+)\], identical$", out, re.MULTILINE)
    rows = json.loads((folder / "runs/example-measured/eval/result.json").read_text())["figures"]["rows"]
    assert [name for name, *_ in found] == ["chain", "tree"]
    for name, tau, speedup, low, high in found:
        assert float(tau) == pytest.approx(rows[f"{name}@0"]["tau"], abs=0.006)
        assert float(low) <= float(speedup) <= float(high)
    assert float(found[1][1]) > float(found[0][1]) > 1  # a tree contains the chain
    assert (folder / "runs/example-measured/report.html").is_file()


def test_verify_a_distribution(run: Callable[..., str], folder: Path) -> None:
    """The script's test detects a lossy verifier."""
    p_values = {}
    for lenience in ("1.0", "0.3"):
        out = run("verify_a_distribution.py", "--samples", "700", "--lenience", lenience)
        assert "total probability 1.000000000000" in out
        p_values[lenience] = float(re.search(r"p-value ([\d.]+)$", out)[1])
    assert p_values["1.0"] > 0.01
    assert p_values["0.3"] < 0.0001


def test_train_your_own_drafter(run: Callable[..., str], folder: Path) -> None:
    out = run("train_your_own_drafter.py", "--steps", "40")
    accuracy = [int(share) for share in re.findall(r"^step .* acc (\d+)/", out, re.MULTILINE)]
    assert accuracy[-1] > 20 > accuracy[0]
    tau, same = re.search(r"tau ([\d.]+); the target's answer: (\w+)$", out).groups()
    assert float(tau) > 1
    assert same == "True"
    config = json.loads((folder / "runs/gated/drafter/config.json").read_text())
    assert config["architectures"] == ["GatedDrafter"]
