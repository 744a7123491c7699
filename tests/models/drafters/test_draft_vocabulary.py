"""The reduced draft vocabulary: its tokens, its map in the checkpoint, its head, its losses, and drafting with it."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from support.half_right import tree_method
from support.tiny_models import LENGTH, VOCABULARY, tiny_drafter_of, tiny_target
from support.tiny_runs import make_recipe
from torch import nn

from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.models.base.group_wise import GroupWiseDrafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.drafters.eagle3 import Eagle3Drafter
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.train.drafter.stage import train_drafter

TARGET_LAYERS = 4
# Labels: 7 three times, 5 and 9 twice, 4 once; 11 is in the data, but never a label.
ROWS = Dataset.from_dict(
    {
        "input_ids": [[11, 11, 11, 11, 7, 9], [5, 7, 9, 5, 7, 4, 11]],
        "loss_mask": [[0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 0]],
    }
)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_draft_vocabulary_has_the_most_frequent_tokens(size: int, tmp_path: Path) -> None:
    """Ties and too few tokens in the data are resolved by the lowest ids; the head has the target's rows."""
    expected = {2: [5, 7], 3: [5, 7, 9], 6: [0, 1, 4, 5, 7, 9]}[size]
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    drafter = Eagle3Drafter.from_target(target, {"draft_vocab_size": size})
    drafter.prepare_draft_vocab(ROWS)
    drafter.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["d2t"].dtype == torch.int64
    assert saved["d2t"].tolist() == [token - row for row, token in enumerate(expected)]
    assert saved["t2d"].dtype == torch.bool
    assert saved["t2d"].nonzero().squeeze(1).tolist() == expected
    assert torch.equal(saved["lm_head.weight"], target.get_output_embeddings().weight[expected])


@pytest.mark.parametrize("bias", [False, True])
def test_borrowed_head_has_rows_of_the_targets(bias: bool, tmp_path: Path) -> None:
    """It is frozen, no parameter and in no checkpoint; gathered on loading, it moves with the drafter."""
    target = tiny_target()
    if bias:
        target.lm_head = nn.Linear(32, VOCABULARY).requires_grad_(False)
    drafter = tiny_drafter_of("parallel", target, draft_vocab_size=3)
    drafter.prepare_draft_vocab(ROWS)
    drafter.save_pretrained(tmp_path)
    saved = [*load_file(tmp_path / "model.safetensors"), *dict(drafter.named_parameters())]
    assert not any("head" in name for name in saved)
    for found in (drafter, load_drafter(tmp_path, target)):
        assert isinstance(found, GroupWiseDrafter)
        head = found.head()
        assert type(head) is nn.Linear  # packing linear layers finds it
        assert any(module is head for module in found.modules())
        assert torch.equal(head.weight, target.lm_head.weight[[5, 7, 9]])
        assert not head.weight.requires_grad
        hidden = torch.randn(4, 32)
        torch.testing.assert_close(head(hidden), target.lm_head(hidden)[:, [5, 7, 9]])
        assert found.double().head().weight.dtype == torch.float64


def test_train_stage_builds_the_draft_vocabulary_from_its_data(
    target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(target_folder, "reduced", max_steps=1)
    recipe.drafter.kind, recipe.drafter.options = "eagle3", {"draft_vocab_size": 12, "ttt_steps": 2}
    report = train_drafter(recipe)
    rows = load_tokens(RunFolder(recipe))
    counts = Counter(x for row in rows for x, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask)
    expected = sorted(sorted(counts, key=lambda token: (-counts[token], token))[:12])
    saved = load_file(report.folder / "model.safetensors")
    assert (saved["d2t"] + torch.arange(12)).tolist() == expected
    share = sum(counts[token] for token in expected) / counts.total()
    assert report.draft_vocabulary_coverage == pytest.approx(share)
    assert f"covers {share:.2%} of the answers' tokens" in capsys.readouterr().out
    card = (report.folder / "README.md").read_text()
    assert f"It drafts 12 of the target's tokens, which are {share:.2%} of the answers' tokens" in card


@pytest.mark.parametrize("until_first_error", [False, True])
def test_labels_outside_the_draft_vocabulary_have_no_loss(until_first_error: bool) -> None:
    """Without a teacher neither head of DSpark reads their rows: tokens 40 to 59 are labels, 0 to 39 are drafted."""
    options = {"block_size": 3, "markov_rank": 5, "loss": "ce", "draft_vocab_size": 40}
    target = tiny_target(num_hidden_layers=TARGET_LAYERS)
    drafter = tiny_drafter_of("dspark", target, **options, until_first_error=until_first_error)
    ids = torch.arange(40, 60).view(1, 20)
    features, teacher = drafter.training_features(target, ids)
    assert drafter(ids, features, torch.ones_like(ids), teacher_features=teacher).loss == 0.0


@pytest.mark.parametrize(
    ("kind", "tree", "temperature"),
    [
        ("eagle3", "static", 0.0), ("eagle3", "best_first", 1.0), ("parallel", "best_first", 0.0),
        ("parallel", "static", 1.0), ("medusa", "chain", 1.0), ("hydra", "best_first", 0.0),
    ],
)  # fmt: skip
def test_drafting_with_a_vocabulary_smaller_than_the_branching(kind: str, tree: str, temperature: float) -> None:
    """Three tokens, trees four wide: greedy output stays the target's, and no draft token is outside at T=1.

    A static tree names its places: one of four below a node is refused.
    """
    target = tiny_target(num_hidden_layers=TARGET_LAYERS).double()
    drafter = tiny_drafter_of(kind, target, draft_vocab_size=3)
    drafter.prepare_draft_vocab(ROWS)
    paths = [[0], [1], [2], [0, 0], [0, 2]] if tree == "static" else None
    keys = {"branch": 4} if paths is None else {"paths": paths}
    sampling, prompt = Sampling(temperature), [5, 9, 33, 12, 40, 7]
    generator = torch.Generator().manual_seed(5)
    with TargetSession(target, 64, drafter.feature_layers) as session:
        decoder = drafter.double().decoder(64)
        if paths is not None:
            wide = tree_method(decoder, tree, sampling, generator, paths=[*paths, [3]])
            with pytest.raises(UserError, match="is 2 deep and 4 wide, but the drafter"):
                generate(session, wide, prompt, sampling, 30)
        method = tree_method(decoder, tree, sampling, generator, **keys)
        drafted = generate(session, method, prompt, sampling, 30, generator=generator)
        assert len(drafted.ids) == 30
        if temperature == 0:
            assert drafted.ids == generate(session, Autoregressive(), prompt, sampling, 30).ids
        features = torch.zeros(LENGTH, len(drafter.feature_layers) * 32, dtype=torch.float64)
        method.start(list(range(LENGTH)), features)
        method.observe([LENGTH], features[-1:])
        nodes = method.propose().tokens[1:]
    assert nodes
    assert set(nodes) <= {5, 7, 9}
