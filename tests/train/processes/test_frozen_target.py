"""The frozen target of a launch: which process reads it, and what each process holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.held_targets import hold_targets
from support.processes import run_in_processes
from support.tiny_runs import tiny_run

from draftsmith.errors import UserError
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.target import loading
from draftsmith.models.target.features import decoder_layers
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.train.processes.frozen_target import load_frozen_target

CASES: tuple[tuple[dict[str, Any], str, float, list[int]], ...] = (
    ({}, "parallel", 1.0, [1, 1]),
    ({"source": "offline"}, "draft_model", 0.0, [1, 0]),  # starts from the target's layers
    ({"source": "offline"}, "medusa", 0.0, [0, 0]),
    ({"source": "server", "server": {"urls": ["http://localhost"]}}, "parallel", 0.0, [1, 0]),
    ({"source": "server", "server": {"urls": ["http://localhost"]}}, "medusa", 0.0, [0, 0]),  # from its LM head alone
)  # features, kind, share of the layers in each process, files that each reads


@pytest.mark.slow
def test_target_parts_of_each_process(tmp_path: Path) -> None:
    """The drafters equal those of one process.

    If the layers are dropped, only the first process reads them, or none where a drafter does not start from them.
    """
    options = {"parallel": {"feature_layers": [1, 3, -1]}}
    recipes = [
        tiny_run(
            tmp_path,
            f"case{number}",
            drafter={"kind": kind, "options": options.get(kind, {})},
            data={"features": features},
        )
        for number, (features, kind, _, _) in enumerate(CASES)
    ]
    run_in_processes(hold_targets, 2, recipes)
    for recipe, (_, kind, share, reads) in zip(recipes, CASES, strict=True):
        found = [json.loads((RunFolder(recipe).root / f"{rank}.json").read_text()) for rank in range(2)]
        target, _ = load_target(recipe.target)
        torch.manual_seed(0)
        drafter = load_drafter_class(kind).from_target(target, options.get(kind, {}))
        layers_bytes = sum(p.nbytes for layer in decoder_layers(target) for p in layer.parameters())
        expected = {name: tensor.double().sum().item() for name, tensor in drafter.state_dict().items()}
        for each in found:
            assert each["layer_bytes"] == share * layers_bytes
            assert each["drafter"] == expected
        assert [each["reads"] for each in found] == reads


def test_weights_are_loaded_directly_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are loaded one by one: host memory never holds a whole target meant for a GPU."""
    seen: dict[str, Any] = {}

    def noted(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return load_weights(*args, **options)

    load_weights = loading.load_weights
    monkeypatch.setattr(loading, "load_weights", noted)
    recipe = tiny_run(tmp_path)
    load_target(recipe.target)
    assert "device_map" not in seen
    monkeypatch.setattr(loading, "target_device", lambda _: torch.device("meta"))
    target, _ = load_target(recipe.target)
    assert seen["device_map"] == {"": torch.device("meta")}
    assert {parameter.device.type for parameter in target.parameters()} == {"meta"}


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_training_runs_no_quantised_target(tmp_path: Path, quantization: str) -> None:
    recipe = tiny_run(tmp_path, target={"quantization": quantization})
    with pytest.raises(UserError, match=rf"cannot run a target in {quantization}: .*data\.features\.source=server"):
        load_frozen_target(recipe, torch.device("cpu"))
