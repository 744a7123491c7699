"""SpecInfer: trees merged from several draft models, exactly lossless for any overlap."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.table_decoder import TableDecoder, check_three_tokens, paths_in, random_table
from support.tiny_models import tiny_drafter_of, tiny_target
from support.tiny_tokenizers import CHATML, tiny_tokenizer
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods import specinfer
from draftsmith.eval.methods.registry import DecodingSetting, make_method
from draftsmith.eval.methods.specinfer import SpecInfer
from draftsmith.eval.trees.enumeration import Outcomes
from draftsmith.eval.trees.verify import DraftTree
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.schema import MethodConfig

GREEDY = Sampling()
NO_FEATURES = torch.zeros(0)
V = 3


def build_merged(decoders: list[Any], expansion: list[int], samples: int = 1, sampling: Sampling = GREEDY) -> SpecInfer:
    method = SpecInfer("x", list[StepwiseDecoder](decoders), expansion, samples, sampling, torch.Generator())
    method.observe([7], NO_FEATURES)
    return method


# ---- greedy: the most likely tokens of each ----


def test_most_likely_tokens_of_every_model_are_merged() -> None:
    """<2, 1>. A: 0, 1, then 2 below both. B: 1, 2, then 0 below 1 and 2 below 2."""
    a = {(): torch.tensor([3.0, 2, 1]), (0,): torch.tensor([0.0, 1, 2]), (1,): torch.tensor([0.0, 1, 2])}
    b = {(): torch.tensor([1.0, 3, 2]), (1,): torch.tensor([2.0, 1, 0]), (2,): torch.tensor([0.0, 1, 2])}
    first, second = TableDecoder(a, 2), TableDecoder(b, 2)
    tree = build_merged([first, second], [2, 1], samples=3).propose()
    assert sorted(paths_in(tree)) == [(0,), (0, 2), (1,), (1, 0), (1, 2), (2,), (2, 2)]
    assert (tree.tokens[0], tree.q, tree.draws) == (7, None, None)
    # Each model reads its own nodes only, even if others drafted them too.
    assert (first.widths, second.widths) == ([2], [2])


# ---- sampled: the distribution, by enumeration of all draws ----


def every_tree(grow: Callable[[], DraftTree], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[float, DraftTree]]:
    scripts: list[list[int]] = [[]]
    while scripts:
        chooser = Outcomes(scripts.pop())

        def draw_rows(q: Tensor, count: int, *_: Any, chooser: Outcomes = chooser) -> list[list[int]]:
            return [[int(chooser.draw(row)) for _ in range(count)] for row in q]

        monkeypatch.setattr(specinfer, "draw_independently", draw_rows)
        tree = grow()
        scripts += chooser.branches
        yield chooser.probability, tree


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=2)], ids=["all", "top-k"])
@pytest.mark.parametrize(
    ("models", "expansion", "samples"),
    [(2, [2], 1), (2, [1, 1], 1), (1, [1, 1], 2), (1, [2, 1], 1), (3, [1], 1), (2, [1, 2], 1)],
)
def test_sampling_keeps_the_targets_distribution(
    models: int, expansion: list[int], samples: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p and every q depend on the whole path, and all q differ."""
    decoders = [TableDecoder(random_table(20 + model, V, 2), 2) for model in range(models)]
    method, trees = build_merged(decoders, expansion, samples, sampling), []
    for weight, tree in every_tree(method.propose, monkeypatch):
        paths = paths_in(tree)
        assert len(set(paths)) == len(paths), "equal paths must share a node"
        trees.append((weight, tree))
    assert any(
        len(draws) > len(tree.children(node)) for _, tree in trees for node, draws in enumerate(tree.draws or ())
    )
    check_three_tokens(trees, random_table(11, V, 3), sampling, V)


# ---- from a recipe ----


def setting(target: Any, tokenizer: Any, options: dict[str, Any], sampling: Sampling = GREEDY) -> DecodingSetting:
    recipe = MethodConfig(name="x", kind="specinfer", options=options)
    return DecodingSetting(recipe, target, tokenizer, Path("nowhere"), 64, sampling, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_models_and_a_trained_drafter_together(tmp_path: Path, temperature: float) -> None:
    target = tiny_target(vocab_size=400)
    tokenizer = tiny_tokenizer(CHATML)
    near = tiny_target(vocab_size=400)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    near.save_pretrained(tmp_path / "near")
    tokenizer.save_pretrained(tmp_path / "near")
    tiny_drafter_of("draft_model", target, num_layers=1).save_pretrained(tmp_path / "trained")
    tiny_drafter_of("medusa", target, num_heads=2).save_pretrained(tmp_path / "medusa")
    sampling = Sampling(temperature)
    options = {"models": [str(tmp_path / "near"), str(tmp_path / "trained")], "num_tokens": 4, "samples": 2}
    method = make_method(setting(target, tokenizer, options, sampling))
    prompt = [5, 9, 33, 12]
    with TargetSession(target, 64) as session:
        out = generate(session, method, prompt, sampling, 40, (), torch.Generator().manual_seed(1))
        assert out.rounds < 30, "hardly a draft was accepted"
        if sampling.greedy:
            assert out.ids == generate(session, Autoregressive(), prompt, GREEDY, 40).ids
    with pytest.raises(UserError, match="medusa holds a medusa drafter, but specinfer takes language models and"):
        make_method(setting(target, tokenizer, {**options, "models": [str(tmp_path / "medusa")]}))
