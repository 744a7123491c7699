"""Recipes: each shipped one parses; each mistake is one sentence with the file, the key and the nearest valid key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import load_recipe


def write(folder: Path, values: Any) -> Path:
    file = folder / "mine.yaml"
    file.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["vicuna-7b-parallel", "llama3-8b-parallel", "qwen3-8b-parallel"])
def test_real_recipes_carry_the_papers_hyper_parameters(name: str) -> None:
    recipe = load_recipe(name)
    train = recipe.train
    assert train["global_batch_size"] == 32
    assert (train["learning_rate"], train["adam_beta1"], train["adam_beta2"]) == (5e-4, 0.9, 0.999)
    assert (train["num_train_epochs"], train["weight_decay"]) == (20, 0.0)
    assert recipe.drafter.options["num_masks"] == 4


def test_a_shipped_recipe_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
# What stands in a recipe beside its name, and what is said of it.
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
    ("- a\n- b\n", [], "must hold a YAML mapping of sections (name, target, data, ...), not a list"),
    ("", [], "must hold a YAML mapping of sections (name, target, data, ...), not empty"),
    ("name: [a\n", [], "is not valid YAML"),
    ("name: a\nseed: 1" + "0" * 5000, [], "is not valid YAML: Exceeds the limit"),
    ("[" * 5000, [], "is not valid YAML: maximum recursion depth exceeded"),
    ("name: a\ntrain: &x\n  y: *x\n", [], "is nested without end"),
    (BOMB, [], "aliases stand for more than 10,000 values: write them out"),
    (BOMB.replace("train", "no_such_key"), [], "aliases stand for more than 10,000 values"),
    ("name: a", [f"train={FLOW_BOMB}"], "aliases stand for more than 10,000 values"),
    ("name: a\nseed: 1\nseed: 2\n", [], "the key seed is there twice"),
    ("name: a\ntrain: {x: 1, y: 2, x: 3}\n", [], "the key x is there twice"),
    ("name: a", ["seed=1" + "0" * 5000], "the value is not valid YAML"),
    ("name: a", ["seed"], "override `seed` must look like section.key=value"),
    ("name: a", ["name.x=1"], "override `name.x=1`: `name` is text, not a section with keys of its own"),
]


@pytest.mark.parametrize(
    ("values", "overrides", "sentence"),
    [*(({"name": "a", **values}, [], sentence) for values, sentence in MISTAKES), *OF_FILES],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, values: Any, overrides: list[str], sentence: str) -> None:
    file = write(tmp_path, values)
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert overrides or str(file) in str(caught.value)


def test_a_value_may_stand_in_a_file(tmp_path: Path) -> None:
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


def test_a_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"recipe file quikstart.yaml does not exist: did you mean `quickstart`\?"):
        load_recipe("quikstart.yaml")


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a recipe it stands; what is no path stays as it is."""
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
