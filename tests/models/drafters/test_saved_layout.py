"""Folders of earlier versions load: their config keys and parameters, written out, with tensors of random values."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.loader_rules import Shapes, head_block, layer_shapes
from support.tiny_models import tiny_target

from draftsmith.models.base.registry import drafter_kinds, load_drafter


def medusa_heads(lm_heads: bool) -> Shapes:
    blocks = {**head_block("blocks.0.layers.0"), **head_block("blocks.1.layers.0")}
    return {**blocks, **({f"lm_heads.{j}.weight": (61, 32) for j in (0, 1)} if lm_heads else {})}


EAGLE3_LAYER = layer_shapes("layers.0", 64, ("input", "hidden_norm"))
# Keys that every kind on top of `parallel` had, whether it had a use for them or not.
PARALLEL = {
    "attention": "folded", "depth_weights": 0.8, "feature_layers": [-1], "init": "target", "inputs": "both",
    "keep_ratio": 1.0, "loss": "ce", "mask_residual": False, "num_layers": 1, "num_masks": 4,
}  # fmt: skip
EAGLE = {"attention": "folded", "class_weight": 0.1, "feature_noise": 0.1, "loss": "kl"}
MEDUSA = {"depth_weights": 0.8, "lm_heads": "shared", "loss": "ce", "num_heads": 2, "num_layers": 1}
LORA = {
    "heads_weight": 0.5, "lm_loss": "kl", "lora_alpha": 16.0, "lora_learning_rate": 0.25, "lora_rank": 3,
    "lora_shapes": {"model.layers.1.mlp.down_proj": [48, 32]}, "lora_targets": ["down_proj"], "warmup_steps": 200,
}  # fmt: skip
SAVED: dict[str, tuple[dict[str, Any], Shapes]] = {
    "draft_model": (
        {**PARALLEL, "depth_weights": 1.0, "draft_depth": 5, "inputs": "embedding", "num_masks": 0},
        {"masks": (0, 32), **layer_shapes("layers.0"), "norm.weight": (32,)},
    ),
    "eagle": ({**EAGLE, "draft_depth": 5}, {**layer_shapes("layers.0", norms=()), "fc.weight": (32, 64)}),
    "eagle_parallel": (
        {**EAGLE, "depth_weights": 1.0, "keep_ratio": 1.0, "mask_residual": False, "num_masks": 4},
        {"masks": (4, 64), **layer_shapes("layers.0", norms=()), "fc.weight": (32, 64)},
    ),
    "eagle3": (
        {
            **PARALLEL,
            "draft_depth": 5,
            "draft_vocab_size": None,
            "feature_layers": [0, 1],
            "num_masks": 2,
            "ttt_steps": 3,
        },
        {**EAGLE3_LAYER, "norm.weight": (32,), "fc.weight": (32, 64)},
    ),
    "hydra": (
        {**MEDUSA, "attention": "folded", "embedding_norm": True, "prefix_attention": True},
        {
            **{f"heads.{j}.0.{part}.weight": (32, 64 + 32 * j) for j in (0, 1) for part in ("linear", "residual")},
            **{f"heads.{j}.0.{part}.bias": (32,) for j in (0, 1) for part in ("linear", "residual")},
            **layer_shapes("prefix.layer"),
            "prefix.norm.weight": (32,),
            "embedding_norm.weight": (32,),
        },
    ),
    "medusa": ({**MEDUSA, "lm_heads": "separate"}, medusa_heads(lm_heads=True)),
    "medusa2": (
        {**MEDUSA, **LORA},
        {
            **medusa_heads(lm_heads=False),
            "lora.model.layers.1.mlp.down_proj.lora_A.weight": (3, 48),
            "lora.model.layers.1.mlp.down_proj.lora_B.weight": (32, 3),
        },
    ),
    "parallel": (
        PARALLEL,
        {
            "masks": (4, 32),
            **layer_shapes("layers.0"),
            "norm.weight": (32,),
            "feature_norm.weight": (32,),
            "fuse.weight": (32, 64),
            "embedding_norm.weight": (32,),
        },
    ),
    "pass_embeddings": ({**PARALLEL, "inputs": "embedding", "num_layers": 2}, {"masks": (4, 32)}),
    "peagle": (
        {**PARALLEL, "draft_vocab_size": None, "feature_layers": [0, 1], "mask_token_id": 7},
        {"mask_hidden": (1, 64), **EAGLE3_LAYER, "norm.weight": (32,), "fc.weight": (32, 64)},
    ),
}


def test_no_kind_is_gone() -> None:
    assert set(SAVED) <= set(drafter_kinds())


@pytest.mark.parametrize("kind", SAVED)
def test_a_folder_of_an_earlier_version_loads(kind: str, tmp_path: Path) -> None:
    target, (options, shapes) = tiny_target(), SAVED[kind]
    config = {"model_type": f"draftsmith-{kind}", "target_config": target.config.to_dict(), **options}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    generator = torch.Generator().manual_seed(1)
    saved = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    drafter = load_drafter(tmp_path, target)
    loaded = drafter.state_dict()
    assert loaded.keys() == {name for name, value in saved.items() if value.numel()}
    assert all(torch.equal(loaded[name], saved[name]) for name in loaded)
    assert {key: getattr(drafter.config, key) for key in options} == options
