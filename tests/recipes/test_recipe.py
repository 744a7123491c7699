"""Recipes: shipped ones parse; each mistake is one sentence with the file, the key and the nearest valid key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.errors import UserError
from draftsmith.recipes.loading import load_recipe


def write(folder: Path, values: Any) -> Path:
    file = folder / "mine.yaml"
    file.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
    return file


def test_shipped_recipe_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart") == load_recipe("recipes/quickstart.yaml")


def test_overrides_are_typed(tmp_path: Path) -> None:
    file = write(tmp_path, {"name": "a"})
    recipe = load_recipe(
        file, ["train.learning_rate=1e-4", "eval.temperatures=[0.0, 1.0]", "drafter.options.num_masks=2"]
    )
    assert recipe.train == {"learning_rate": 1e-4}
    assert recipe.eval.temperatures == [0.0, 1.0]
    assert recipe.drafter.options == {"num_masks": 2}


NAMES = ("../x", "a/b", "", ".hidden", "~", "a" * 81, "a\0b", "a b", "é", "a\n")
METHOD_NAMES = ("../../x", "a/../b", "/a", "a/", "a//b", "a" * 300, "/".join(["a" * 80] * 3), "a\0b", "*bold*", "a|b")
# Content of a recipe after its name, and the error.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"evall": {}}, "unknown key `evall`: did you mean `eval`?"),
    ({"data": {"distill": {"temprature": 1}}}, "unknown key `data.distill.temprature`: did you mean `temperature`?"),
    ({"eval": {"methods": [{"name": "x", "nods": 3}]}}, "unknown key `eval.methods.0.nods`: did you mean `nodes`?"),
    ({"target": {"zzz": 1}}, "unknown key `target.zzz`: valid keys there are attn_implementation, chat_template"),
    ({"seed": "many"}, "key `seed`: input should be a valid integer, unable to parse string as an integer, not 'many'"),
    (
        {"data": {"conversations": {"source": "someone/chats", "split": "test_sft"}}},
        "key `data.conversations.split`: must be train, heldout or all (a Hub dataset's own split is `hub_split`)",
    ),
    ({"eval": {"methods": [{"name": "x", "tree": "static"}]}}, "`paths` goes with `tree: static`"),
    ({"eval": {"limit_per_category": 2, "limit_per_task": 10}}, "`limit_per_category` and `limit_per_task` exclude"),
    ({"eval": {"stop": ["\n\n", ""]}}, "key `eval.stop.1`: string should have at least 1 character, not ''"),
    *(
        ({"name": name}, "key `name`: must be at most 80 letters, digits, ., _ and -, the first one a letter or digit")
        for name in NAMES
    ),
    *(
        ({"eval": {"methods": [{"name": name}]}}, "key `eval.methods.0.name`: must be at most 80")
        for name in METHOD_NAMES
    ),
    ({"eval": {"temperatures": []}}, "key `eval.temperatures`: list should have at least 1 item"),
    ({"eval": {"temperatures": [0.0, -1]}}, "key `eval.temperatures.1`: input should be greater than or equal to 0"),
    ({"eval": {"temperatures": [float("nan")]}}, "key `eval.temperatures.0`: input should be a finite number"),
    ({"data": {"distill": {"temperature": float("inf")}}}, "input should be a finite number"),
]
# Nine levels of nine aliases each: 387 million values in a few lines.
LEVELS = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
BOMB = "name: a\ntrain:\n  " + "\n  ".join(LEVELS) + "\n"
FLOW_BOMB = "{" + ", ".join(LEVELS) + "}"
OF_FILES = [
    ("seed: 1", [], "key `name` is missing: add it"),
    ("- a\n- b\n", [], "must contain a YAML mapping of sections (name, target, data, ...), not a list"),
    ("", [], "must contain a YAML mapping of sections (name, target, data, ...), not empty"),
    ("name: [a\n", [], "is not valid YAML"),
    ("name: a\nseed: 1" + "0" * 5000, [], "is not valid YAML: Exceeds the limit"),
    ("[" * 500, [], "is not valid YAML: maximum recursion depth exceeded"),
    ("name: a\ntrain: &x\n  y: *x\n", [], "is nested too deeply"),
    (BOMB, [], "it has more than 20 aliases: write their values out"),
    (BOMB.replace("train", "no_such_key"), [], "it has more than 20 aliases"),
    ("name: a", [f"train={FLOW_BOMB}"], "it has more than 20 aliases"),
    ("name: a\ntrain: {x: 1}  #" + "x" * 2**20, [], "mine.yaml has more than 1,048,576 characters"),
    ("name: a\nseed: 1\nseed: 2\n", [], "the key seed is repeated"),
    ("name: a\ntrain: {x: 1, y: 2, x: 3}\n", [], "the key x is repeated"),
    ("name: a", ["seed=1" + "0" * 5000], "the value is not valid YAML"),
    ("name: a", ["seed"], "override `seed` must look like section.key=value"),
    ("name: a", ["name.x=1"], "override `name.x=1`: `name` is text, not a section with keys"),
]


@pytest.mark.parametrize(
    ("values", "overrides", "sentence"),
    [*(({"name": "a", **values}, [], sentence) for values, sentence in MISTAKES), *OF_FILES],
)
def test_mistake_is_one_sentence(tmp_path: Path, values: Any, overrides: list[str], sentence: str) -> None:
    file = write(tmp_path, values)
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert overrides or str(file) in str(caught.value)


def test_override_reads_its_value_from_a_file(tmp_path: Path) -> None:
    sources = tmp_path / "sources.yaml"
    sources.write_text("- {source: a.jsonl, weight: 5}\n- source: b.jsonl\n")
    recipe = load_recipe(write(tmp_path, {"name": "a"}), [f"data.conversations.mixture=@{sources}"])
    assert [(entry.source, entry.weight) for entry in recipe.data.conversations.mixture] == [
        ("a.jsonl", 5),
        ("b.jsonl", 1),
    ]
    for place, sentence in ((tmp_path / "no.yaml", "cannot be read: No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=sentence):
            load_recipe(write(tmp_path, {"name": "a"}), [f"data.conversations.mixture=@{place}"])
    sources.write_text("[a")
    with pytest.raises(UserError, match=r"sources\.yaml is not valid YAML"):
        load_recipe(write(tmp_path, {"name": "a"}), [f"data.conversations.mixture=@{sources}"])


def test_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"recipe file quikstart.yaml does not exist: did you mean `quickstart`\?"):
        load_recipe("quikstart.yaml")


def test_run_folder_as_a_recipe_names_its_own(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(UserError, match=f"is a run's folder, not a recipe: name its recipe, {tmp_path}/recipe.yaml"):
        load_recipe(tmp_path)


def test_home_is_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every path of a recipe; other values stay unchanged."""
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {
        "name": "a",
        "runs_dir": "~/runs",
        "target": {"model": "~/target", "chat_template": "~/{{ messages }}"},
        "data": {
            "conversations": {"mixture": [{"source": "~/talk.jsonl"}], "decontaminate": ["~/q.jsonl"]},
            "distill": {"engine": "vllm", "options": {"llm": {"download_dir": "~/hub"}}},
        },
        "drafter": {"kind": "draft_model", "options": {"model": "~/small"}},
        "train": {"logging_dir": "~/logs"},
        "eval": {
            "questions": "~/q.jsonl",
            "stop": ["~/", "~"],
            "methods": [{"name": "x", "drafter": "~/drafter", "kind": "draft_model", "options": {"model": "~/small"}}],
        },
    }
    write(tmp_path, values)
    text = yaml.safe_dump(load_recipe("~/mine.yaml").model_dump())
    assert text.count(f"{tmp_path}/") == 10
    assert [line.strip() for line in text.splitlines() if "~" in line] == [
        "- ~/", "- '~'", "chat_template: ~/{{ messages }}",
    ]  # fmt: skip


# ---- extends ----


def write_files(folder: Path, **texts: str) -> Path:
    """Write NAME.yaml for each text; return the path of `child.yaml`."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "child.yaml"


def test_extends_merges_key_by_key_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    grandparent = "seed: 3\ntrain: {a: 1, b: 2, c: 3, d: 4}\neval: {temperatures: [0.0, 1.0], runs: 5}\n"
    parent = "extends: ../grandparent.yaml\nname: parent\ntarget: {dtype: float16, gguf_file: x}\n"
    parent += "train: {c: null, e: 5}\n"
    child = "extends: base/parent.yaml\nname: child\ntarget: {gguf_file: null}\ntrain: {b: 20, new: 6, d: 40}\n"
    child += "eval: {temperatures: [0.5]}\n"
    write_files(tmp_path / "base", parent=parent)
    file = write_files(tmp_path, grandparent=grandparent, child=child)
    recipe = load_recipe(file, ["train.d=41", "eval.runs=1"])
    assert (recipe.name, recipe.seed, recipe.extends) == ("child", 3, None)
    assert list(recipe.train.items()) == [("a", 1), ("b", 20), ("d", 41), ("e", 5), ("new", 6)]
    assert (recipe.target.dtype, recipe.target.gguf_file) == ("float16", None)
    assert (recipe.eval.temperatures, recipe.eval.runs) == ([0.5], 1)
    assert "extends" not in recipe.model_dump()


def test_options_are_dropped_with_their_kind(tmp_path: Path) -> None:
    shipped = "extends: llama3-8b-parallel\nname: child\n"
    recipe = load_recipe(write_files(tmp_path, child=shipped + "drafter: {options: {num_masks: 7}}\n"))
    assert recipe.drafter.options == {"num_masks": 7, "inputs": "both"}
    recipe = load_recipe(write_files(tmp_path, child=shipped + "drafter: {kind: eagle3, options: {ttt_steps: 2}}\n"))
    assert recipe.drafter.options == {"ttt_steps": 2}
    recipe = load_recipe(write_files(tmp_path, child=shipped + "data: {distill: {engine: transformers}}\n"))
    assert recipe.data.distill.options == {}


EXTENDING_MISTAKES = [
    ("name: child\nextends: nobody\n", "child.yaml, line 2: key `extends`: recipe file nobody does not exist"),
    ("name: child\nextends: quikstart\n", "did you mean `quickstart`?"),
    ("name: child\nextends: [a, b]\n", "line 2: key `extends` must be the name or the path of one recipe, not a list"),
    ("name: child\nextends: child.yaml\n", "child.yaml, line 2: key `extends` goes in a circle ("),
    ("name: child\nextends: circle.yaml\n", "circle.yaml, line 1: key `extends` goes in a circle ("),
    ("name: child\nextends: f1.yaml\n", "f19.yaml, line 1: key `extends`: more than 20 files in a chain"),
    ("name: child\nextends: list.yaml\n", "list.yaml must contain a YAML mapping"),
    ("name: child\nextends: wrong.yaml\n", "wrong.yaml, line 3: key `eval.runs`: input should be greater than"),
    ("extends: wrong.yaml\nname: child\neval:\n  runs: no\n", "child.yaml, line 4: key `eval.runs`: "),
    ("extends: typo.yaml\nname: child\neval: {runs: 1}\n", "typo.yaml, line 4: unknown key `eval.methods.1.nods`"),
    ("extends: wrong.yaml\neval: {runs: 1}\n", "child.yaml: key `name` is missing: add it"),
]


@pytest.mark.parametrize(("child", "sentence"), EXTENDING_MISTAKES)
def test_error_names_the_file_and_line(tmp_path: Path, child: str, sentence: str) -> None:
    file = write_files(
        tmp_path,
        child=child,
        circle="extends: child.yaml\n",
        **{f"f{number}": f"extends: f{number + 1}.yaml\n" for number in range(1, 20)},
        list="- a\n",
        wrong="seed: 1\neval:\n  runs: 0\n",
        typo="eval:\n  methods:\n    - name: a\n    - {name: b, nods: 3}\n",
    )
    with pytest.raises(UserError) as caught:
        load_recipe(file)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_about_an_override_names_no_line(tmp_path: Path) -> None:
    file = write_files(tmp_path, child="extends: quickstart\nname: child\neval: {runs: 2}\n")
    with pytest.raises(UserError, match=r"child\.yaml: key `eval\.runs`"):
        load_recipe(file, ["eval.runs=0"])
    with pytest.raises(UserError, match="key `extends` cannot be an override: write it into a recipe file"):
        load_recipe(file, ["extends=embedded"])
