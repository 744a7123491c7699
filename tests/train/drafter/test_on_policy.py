"""`data.on_policy`: what is trained on are the rows that decoding comes to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from support.tiny_runs import make_recipe, recipe_in, tiny_run, weights_of
from torch import Tensor

from draftsmith.eval.commands.search import accepted_lengths
from draftsmith.eval.methods.drafter import drafter_method
from draftsmith.eval.trees.verify import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MethodRecipe, Recipe
from draftsmith.train.drafter.rows import rows_of_rounds
from draftsmith.train.drafter.stage import train_drafter
from draftsmith.train.features.write import project_features, write_features

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("parallel", {}),
    ("parallel", {"markov_rank": 5}),
    ("eagle_parallel", {}),
    ("eagle3", {"draft_vocab_size": 40}),
    ("hydra", {}),
    ("medusa", {}),
    ("dflash", {}),
    ("dflash2", {"selector_rank": 6, "selector_top_k": 3, "num_layers": 1}),
    ("dspark", {"markov_rank": 5}),
    ("peagle", {"draft_vocab_size": 40}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_rounds_are_those_of_decoding(kind: str, options: dict[str, Any]) -> None:
    """An answer that follows the drafter for none to all of a draft, and then another token: as a target's may."""
    target = tiny_target(num_hidden_layers=4)
    drafter = tiny_drafter_of(kind, target, **options)
    with torch.no_grad():
        for head in drafter.own_heads:  # which have just started as the target's
            head.weight.add_(0.1 * torch.randn_like(head.weight))
        if kind == "dflash2":  # a selector that decides
            drafter.candidate_selector.successor_codebook.normal_()
    depths = drafter.config.num_depths
    method = drafter_method(MethodRecipe(name="chain"), drafter.decoder(120), Sampling())
    generator = torch.Generator().manual_seed(5)

    def features_of(ids: list[int]) -> Tensor:
        return target_features(target, torch.tensor([ids]), layers=drafter.feature_layers)[0]

    def drawn(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    first, expected, accepted = 4, list[tuple[int, int]](), 0
    ids = [3 + drawn(VOCABULARY - 3) for _ in range(first + 1)]
    while len(ids) < 60:
        features_sf = features_of(ids)
        method.start(ids[:first], features_sf[:first])
        method.observe(ids[first:], features_sf[first - 1 : -1])
        drafts = method.propose().tokens[1:]
        assert len(drafts) == depths
        accepted = drawn(depths + 1)
        expected.append((len(ids) - 1, accepted))
        wrong = [drafts[accepted]] if accepted < depths else []
        ids += [*drafts[:accepted], next(t for t in range(3 + drawn(30), VOCABULARY) if t not in wrong)]
    ids_bs, mask_bs = torch.tensor([ids]), torch.tensor([[0] * first + [1] * (len(ids) - first)])
    features, teacher = drafter.training_features(target, ids_bs)
    with torch.no_grad():
        output = drafter(ids_bs, features, mask_bs, teacher_features=teacher)
    trained_gs = rows_of_rounds(output.correct_bgs, mask_bs)[0]
    rows = {(newest, depth) for newest, right in expected for depth in range(min(right + 1, depths))}
    assert {(newest, depth) for depth, newest in trained_gs.nonzero().tolist()} == rows
    lengths = accepted_lengths(method, ids, features_of(ids), first, len(ids) - 1)
    assert lengths == [right + 1 for _, right in expected]


def on_policy(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"on_policy": True})})


def test_micro_batches_are_one_batch(target_folder: Path) -> None:
    """The rounds of a step are those by its weights, and counted over all its rows; another training than without."""
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    whole, parts, without = (
        make_recipe(target_folder, name, max_steps=4, **train)
        for name, train in (
            ("whole", {"per_device_train_batch_size": 4}),
            ("parts", half),
            ("without", {"per_device_train_batch_size": 4}),
        )
    )
    for recipe in (on_policy(whole), on_policy(parts), without):
        train_drafter(recipe)
    torch.testing.assert_close(weights_of(parts), weights_of(whole), atol=1e-5, rtol=0)
    assert any((value - weights_of(without)[name]).abs().max() > 1e-2 for name, value in weights_of(whole).items())


def test_features_from_disk_have_the_same_rounds(tmp_path: Path) -> None:
    online = tiny_run(tmp_path, "online", data={"on_policy": True})
    from_disk = {"source": "offline", "dtype": "float32"}
    offline = tiny_run(tmp_path, "offline", data={"on_policy": True, "features": from_disk})
    write_features(offline, project_features(offline), progress=False)
    for recipe in (online, offline):
        train_drafter(recipe)
    torch.testing.assert_close(weights_of(offline), weights_of(online), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"kind": "eagle", "options": {}}, "`data.on_policy`: eagle is trained on one depth"),
        ({"kind": "medusa2", "options": {"num_heads": 2}}, "`data.on_policy`: medusa2 changes the target"),
    ],
)
def test_kinds_without_rounds(target_folder: Path, drafter: dict[str, Any], message: str) -> None:
    make_recipe(target_folder, "refused")
    with pytest.raises(UserError, match=message):
        train_drafter(on_policy(recipe_in(target_folder.parent, "refused", drafter=drafter)))
