"""`drafter.init`: weights are copied tensor by tensor, a changed source is refused, and two stages resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_drafter_of
from support.tiny_runs import InterruptAt, have_equal_weights, recipe_file, recipe_in, tiny_run, weights_of
from torch.testing import assert_close
from typer.testing import CliRunner

from draftsmith.cli import stages
from draftsmith.cli.main import app
from draftsmith.errors import UserError
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import Start, load_drafter_class
from draftsmith.models.formats import importing
from draftsmith.models.formats.exporting import export_drafter
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import first_stage
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter import stage
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.drafter.start import start_folder, start_from, start_sentence
from draftsmith.train.drafter.trainer import DrafterTrainer

STILL = {"learning_rate": 0.0, "max_steps": 1}


def drafter_config(kind: str, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "options": options}


def train_from_recipe(folder: Path, name: str, drafter: dict[str, Any], **train: Any) -> Path:
    recipe = tiny_run(folder, name, drafter=drafter, train={"max_steps": 2, **train})
    train_drafter(recipe)
    return RunFolder(recipe).drafter


def recipe_from_source(folder: Path, source: Path | str, drafter: dict[str, Any], name: str = "second") -> Recipe:
    return tiny_run(folder, name, drafter={**drafter, "init": str(source)}, train=STILL)


def test_parallel_drafter_starts_from_eagle_weights(tmp_path: Path) -> None:
    """All tensors of EAGLE are copied; the masks are initialised from the seed, as without a source."""
    source = train_from_recipe(tmp_path, "first", drafter_config("eagle"), max_steps=4)
    parallel = drafter_config("eagle_parallel", num_masks=2)
    fresh = train_from_recipe(tmp_path, "fresh", parallel, **STILL)
    recipe = recipe_from_source(tmp_path, source, parallel)
    train_drafter(recipe)
    first, alone = (load_file(folder / "model.safetensors") for folder in (source, fresh))
    second = weights_of(recipe)
    assert second.keys() == {*first, "masks"}
    assert all(torch.equal(second[name], first[name]) for name in first)
    assert torch.equal(second["masks"], alone["masks"])
    assert not any(torch.equal(alone[name], first[name]) for name in first if "norm" not in name)
    training = json.loads((RunFolder(recipe).drafter / "training.json").read_text())
    sha256 = json.loads((source / "training.json").read_text())["weights_sha256"]
    assert training["start"] == {
        "source": str(source), "kind": "eagle", "weights_sha256": sha256, "fresh": ["masks"], "unused": [],
        "draft_vocabulary": None, "imported": None,
    }  # fmt: skip
    assert training["settings"]["drafter.init (its weights)"] == sha256["model.safetensors"]
    provenance = json.loads((RunFolder(recipe).root / "provenance.json").read_text())
    assert list(provenance["train"]["inputs_sha256"].values()) == list(sha256.values())
    card = (RunFolder(recipe).drafter / "README.md").read_text()
    assert f"started from the weights of a trained eagle drafter (SHA-256 {sha256['model.safetensors'][:12]}" in card
    assert "new here: masks." in card
    assert str(tmp_path) not in card


def test_published_checkpoint_is_imported_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have another embedding, as a fine-tuned target's base has, which `import` refuses; and it comes once."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    kind, published = drafter_config("eagle3", feature_layers=[1, 2, 3]), tmp_path / "theirs"
    base = load_target(tiny_run(tmp_path).target)[0]
    drafter = tiny_drafter_of("eagle3", base, **kind["options"])
    export_drafter(drafter, "vllm", published, "TARGET", tmp_path)
    tensors = load_file(published / "model.safetensors")
    tensors["embed_tokens.weight"] = base.get_input_embeddings().weight.detach().clone()
    save_file(tensors, published / "model.safetensors")
    recipe = recipe_from_source(tmp_path, published, kind)
    arguments = ["import", recipe_file(recipe), "--from", str(published), "--to"]
    assert CliRunner().invoke(app, [*arguments, str(tmp_path / "ours")]).exit_code == 0
    for name, source in (("second", published), ("third", tmp_path / "ours")):
        recipe = recipe_from_source(tmp_path, source, kind, name)
        train_drafter(recipe)
        assert_close(weights_of(recipe), drafter.state_dict(), rtol=0, atol=0)
        card = (RunFolder(recipe).drafter / "README.md").read_text()
        assert "started from the weights of a published eagle3 drafter (SHA-256 " in card
        assert "note: " not in card
    with monkeypatch.context() as patch:
        patch.setattr(importing, "import_drafter", None)
        assert start_folder(recipe_from_source(tmp_path, published, kind)) is not None

    base.get_input_embeddings().weight.data[0] += 1
    base.save_pretrained(tmp_path / "target")
    refused = CliRunner().invoke(app, [*arguments, str(tmp_path / "again")])
    assert "embed_tokens is not the target's" in refused.stderr
    recipe = recipe_from_source(tmp_path, published, kind, "tuned")
    train_drafter(recipe)
    assert_close(weights_of(recipe), drafter.state_dict(), rtol=0, atol=0)
    assert "; note: its embed_tokens is not this target's" in (RunFolder(recipe).drafter / "README.md").read_text()
    (published / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"theirs is no trained drafter, and cannot be imported: .* is no checkpoint"):
        start_folder(recipe)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (
            drafter_config("medusa"),
            drafter_config("pass_embeddings"),
            "pass_embeddings has no parameter in common with",
        ),
        (
            drafter_config("parallel", num_masks=3),
            drafter_config("parallel", num_masks=2),
            r"masks of .* another shape \(masks \[3, \d+\], here \[2, \d+\]\): .* of those that differ: num_masks=3",
        ),
        (
            drafter_config("parallel", feature_layers=[1, -1]),
            drafter_config("parallel", feature_layers=[2, -1]),
            r"layers \[1, -1\], not \[2, -1\]: set drafter.options.feature_layers",
        ),
    ],
)
def test_incompatible_drafter_is_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], sentence: str
) -> None:
    source = train_from_recipe(tmp_path, "first", first)
    with pytest.raises(UserError, match=sentence):
        train_drafter(recipe_from_source(tmp_path, source, second))
    assert not (tmp_path / "runs" / "second" / "drafter").exists()


def test_changed_source_is_refused(tmp_path: Path) -> None:
    """Also after training; weights that training did not write are refused as well."""
    parallel = drafter_config("eagle_parallel", num_masks=2)
    source = train_from_recipe(tmp_path, "first", drafter_config("eagle"))
    other = train_from_recipe(tmp_path, "other", drafter_config("eagle"), seed=1)
    train_drafter(recipe_from_source(tmp_path, source, parallel))
    moved = source.rename(tmp_path / "elsewhere")
    assert train_drafter(recipe_from_source(tmp_path, moved, parallel)).was_finished
    with pytest.raises(UserError, match=r"started with drafter.init \(its weights\) = '[0-9a-f]{64}', now it is '"):
        train_drafter(recipe_from_source(tmp_path, other, parallel))
    with pytest.raises(UserError, match=r"drafter.init \(its weights\)"):
        train_drafter(tiny_run(tmp_path, "second", drafter=parallel, train=STILL))
    changed = {name: tensor + 1 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="are not those that training wrote"):
        train_drafter(recipe_from_source(tmp_path, other, drafter_config("eagle"), name="third"))


def test_draft_vocabulary_of_trained_rows_is_kept(tmp_path: Path) -> None:
    """Rows of own heads and of a Markov head keep their tokens; the target's head takes those of the answers."""
    target, _ = load_target(tiny_run(tmp_path).target)

    def build(kind: str, tokens: list[int], size: int | None = None, **options: Any) -> Any:
        """Build a drafter with a draft vocabulary of `size` from answers with these tokens, the most frequent first."""
        options["draft_vocab_size"] = size or len(tokens)
        drafter = load_drafter_class(kind).from_target(target, options)
        answers = [token for place, token in enumerate(tokens) for _ in range(len(tokens) - place)]
        drafter.prepare_draft_vocab(Dataset.from_dict({"input_ids": [answers], "loss_mask": [[1] * len(answers)]}))
        return drafter

    def start_drafter(drafter: Any, source: Drafter) -> tuple[list[int], Start]:
        """Start from `source`; return the draft vocabulary and the start's report."""
        source.save_pretrained(tmp_path / "source")
        start = start_from(drafter, tmp_path / "source", "source")
        assert drafter.t2d.nonzero().flatten().tolist() == drafter.draft_ids.tolist()
        assert not {"d2t", "t2d"} & {*start.fresh, *start.unused}
        return drafter.draft_ids.tolist(), start

    old, anew = list(range(20, 28)), list(range(26, 36))
    # Own heads: the old vocabulary has 26 and 27 of the answers' tokens, 10 + 9 of 55 occurrences; eight new ones 52.
    source = build("eagle3", old)
    source.lm_head.weight.data.normal_()
    own = build("eagle3", anew, 8)
    tokens, start = start_drafter(own, source)
    assert tokens == old
    assert torch.equal(own.lm_head.weight, source.lm_head.weight)
    assert start_sentence(start).endswith(
        "; its draft vocabulary of 8 tokens is that of the trained rows, which cover 34.55% of this run's answer "
        "tokens (a new one: 94.55%)"
    )
    # With another size nothing is kept.
    tokens, start = start_drafter(build("peagle", anew), source)
    assert (tokens, start.unused) == (anew, ["lm_head.weight"])
    # The target's head: as without a start if there are enough answers, although the sizes are equal.
    borrowed = build("eagle_parallel", anew, 8)
    tokens, start = start_drafter(borrowed, build("eagle", old))
    assert tokens == anew[:8]
    assert borrowed.vocab_coverage == build("eagle_parallel", anew, 8).vocab_coverage
    assert torch.equal(borrowed.head().weight, target.lm_head.weight[anew[:8]])
    # Or these and then the old ones, lower ids first.
    borrowed = build("eagle_parallel", anew[:5], 8)
    tokens, start = start_drafter(borrowed, build("eagle", old))
    assert tokens == [20, 21, 22, *anew[:5]]
    assert torch.equal(borrowed.head().weight, target.lm_head.weight[tokens])
    assert start_sentence(start).endswith("is chosen from this run's answers, and then from the trained drafter's")
    assert borrowed.vocab_coverage.coverage == 1.0
    # A Markov head has rows for its tokens if the source has trained them.
    for rank, expected in ((3, old), (0, anew[:8])):
        source = build("parallel", old, markov_rank=rank)
        if rank:
            source.markov_head.markov_w2.weight.data.normal_()
        markov = build("parallel", anew, 8, markov_rank=3)
        assert start_drafter(markov, source)[0] == expected
        assert markov.markov_head.markov_w2.weight.any() == (rank > 0)


# ---- two stages ----


def two_stages(folder: Path, runs: str) -> Recipe:
    """Write two recipes of 5 steps, the second starting from the first one's drafter, and their tokens."""
    eagle = recipe_in(folder, "eagle", drafter=drafter_config("eagle"), train={"max_steps": 5})
    drafter = {**drafter_config("eagle_parallel", num_masks=2), "init": recipe_file(eagle)}
    return tiny_run(folder, "both", drafter=drafter, train={"max_steps": 5}, runs_dir=str(folder / runs))


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [pytest.param("eagle", marks=pytest.mark.nightly), "both"])
def test_two_stages_resume_after_an_interruption_in_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """The final weights are bitwise equal to those without an interruption."""
    monkeypatch.setattr(stages, "run_distill", lambda recipe: None)
    whole, broken = two_stages(tmp_path, "runs"), two_stages(tmp_path, "other")
    stages.make_drafter(whole)

    class Interrupted(DrafterTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if interrupted in Path(str(self.args.output_dir)).parts:
                self.add_callback(InterruptAt(3))

    with monkeypatch.context() as patch:
        patch.setattr(stage, "DrafterTrainer", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            stages.make_drafter(broken)
    firsts = [first_stage(recipe) for recipe in (whole, broken)]
    assert firsts[1] is not None
    assert (RunFolder(firsts[1]).drafter / "training.json").is_file() == (interrupted == "both")
    stages.make_drafter(broken)
    for left, right in (firsts, (whole, broken)):
        assert left is not None
        assert right is not None
        assert have_equal_weights(left, right)
