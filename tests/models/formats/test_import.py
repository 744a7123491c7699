"""Published layouts with random weights import as drafters that follow the papers, and export unchanged."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle_reference import LayoutReference, rotary, rotate
from support.loader_rules import required_shapes
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from support.tiny_runs import recipe_file, recipe_in, save_target
from torch import Tensor
from typer.testing import CliRunner

from draftsmith.errors import UserError
from draftsmith.eval.commands.cli import app
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.formats import dflash, eagle
from draftsmith.models.formats.exporting import export_drafter
from draftsmith.models.formats.importing import IMPORT_FILE, import_drafter, read_checkpoint
from draftsmith.models.formats.layout import Checkpoint, renamed
from draftsmith.models.target.features import target_features

DRAFTED = 20
TARGET = tiny_target(num_hidden_layers=4)
IDS = torch.tensor([[5, 9, 33, 17, 40, 8, 21, 55]])
NEWEST = 5  # the last committed token
LAYERS: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "vocab_size": VOCABULARY, "num_hidden_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
# Configs as the authors write them.
EAGLE_AUTHORS = {**LAYERS, "bias": True, "architectures": ["LlamaForCausalLM"]}
SPECFORGE = {
    **LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}  # fmt: skip
VLLM = {
    **LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY,
    "eagle_aux_hidden_state_layer_ids": [0, 2, 3], "num_aux_hidden_states": 3,
}  # fmt: skip
EAGLE31 = {**VLLM, "fc_norm": True, "norm_output": True}
PEAGLE = {**VLLM, "pard_token": 7}
PEAGLE_NORMED = {**PEAGLE, "fc_norm": True}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFTED,
    "transformer_layer_config": LAYERS, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x/y"}},
}  # fmt: skip
SPECULATORS_NORMED = {**SPECULATORS, "norm_before_fc": True, "norm_output": True, "fc_norm": False}
# SpecForge's, and DeepSpec's, which has no nested config.
DFLASH = {
    **LAYERS, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 4, "num_hidden_layers": 2,
    "num_target_layers": 4, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}  # fmt: skip
DSPARK = {
    **LAYERS, "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "block_size": 3, "mask_token_id": 7,
    "target_layer_ids": [1, 2], "markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
# z-lab/Qwen3.8-27B-DFlash2's keys.
DFLASH2 = {
    **DFLASH, "architectures": ["DFlash2DraftModel"], "is_causal": False, "sliding_window": 6,
    "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2,
    "dflash_config": {
        **DFLASH["dflash_config"], "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 5,
        "selector_top_k": 4,
    },
}  # fmt: skip
# Keys of NVIDIA/Model-Optimizer's recipe (modelopt_recipes/general/speculative_decoding/lilicorr.yaml).
LILICORR = {
    **DFLASH, "architectures": ["LiLiCorrDraftModel"],
    "dflash_config": {
        **DFLASH["dflash_config"], "conv_kernel_size": 2, "conv_group_size": 16, "lilicorr_enabled": True,
        "lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 0, "lilicorr_factor_dim": 6, "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 4, "lilicorr_mlp_ratio": 2.0, "lilicorr_logit_scale": 7.0, "lilicorr_vector_eps": 1e-3,
    },
}  # fmt: skip
SPECULATORS_DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "draft_vocab_size": VOCABULARY,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x/y"}},
    "transformer_layer_config": {
        **LAYERS, "model_type": "qwen3", "sliding_window": 6, "use_sliding_window": True,
        "layer_types": ["sliding_attention"],
    },
    "block_size": 4, "aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 7, "sample_from_anchor": False,
    "sliding_window_non_causal": True, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 5,
    "selector_top_k": 4,
}  # fmt: skip
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2, "hidden_size": 32, "vocab_size": VOCABULARY}
HYDRA = {
    "hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True,
    "hidden_state_offset": 0, "hidden_size": 32, "vocab_size": VOCABULARY,
}  # fmt: skip
# The kind of each import, its weight file, and the format to export it to.
LAYOUTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "eagle": (EAGLE_AUTHORS, "eagle", "pytorch_model.bin", "eagle"),
    "specforge": (SPECFORGE, "eagle3", "model.safetensors", "eagle"),
    "vllm": (VLLM, "eagle3", "model.safetensors", "vllm"),
    "eagle3.1": (EAGLE31, "eagle3", "model.safetensors", "vllm"),
    "peagle": (PEAGLE, "peagle", "model.safetensors", "vllm"),
    "peagle-normed": (PEAGLE_NORMED, "peagle", "model.safetensors", "vllm"),
    "speculators": (SPECULATORS, "eagle3", "model.safetensors", "speculators"),
    "speculators-normed": (SPECULATORS_NORMED, "eagle3", "model.safetensors", "speculators"),
    "dflash": (DFLASH, "dflash", "model.safetensors", "vllm"),
    "dflash2": (DFLASH2, "dflash2", "model.safetensors", "vllm"),
    "speculators-dflash2": (SPECULATORS_DFLASH2, "dflash2", "model.safetensors", "speculators"),
    "lilicorr": (LILICORR, "lilicorr", "model.safetensors", "vllm"),
    "dspark": (DSPARK, "dspark", "model.safetensors", "sglang"),
    "hydra": (HYDRA, "hydra", "hydra_lm_head.pt", "hydra"),
    "medusa": (MEDUSA, "medusa", "medusa_lm_head.pt", "medusa"),
}


def random_tensors(kind: str, to: str, config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = required_shapes(kind, to, config)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1.0
    if "d2t" in tensors:
        chosen = torch.arange(DRAFTED) * 3 + 1
        tensors["d2t"], tensors["t2d"] = chosen - torch.arange(DRAFTED), torch.zeros(VOCABULARY, dtype=torch.bool)
        tensors["t2d"][chosen] = True
    return tensors


def write_checkpoint(folder: Path, layout: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a checkpoint in a published layout."""
    config, kind, file, to = LAYOUTS[layout]
    tensors = random_tensors(kind, to, config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return config, tensors


def import_layout(folder: Path, layout: str) -> tuple[Drafter, dict[str, Tensor]]:
    _, tensors = write_checkpoint(folder / "theirs", layout)
    import_drafter(str(folder / "theirs"), TARGET, folder / "ours")
    return load_drafter(folder / "ours", TARGET), tensors


def reference(tensors: dict[str, Tensor]) -> LayoutReference:
    return LayoutReference(tensors, TARGET.get_input_embeddings().weight, TARGET.get_output_embeddings().weight)


def start_decoder(drafter: Drafter) -> tuple[Any, Tensor]:
    """Return a decoder that has read tokens 0..NEWEST, and the target's features at all of them."""
    features = target_features(TARGET, IDS, layers=drafter.feature_layers)[0]
    decoder = drafter.decoder(IDS.shape[1])
    decoder.start(IDS[0, :3], features[:3])
    decoder.observe(IDS[0, 3 : NEWEST + 1], features[2:NEWEST])
    return decoder, features


def draft_chain(decoder: Any, depths: int) -> Tensor:
    """Return the logits [depths, V'] of a chain along the true tokens."""
    if hasattr(decoder, "draft"):
        return decoder.draft()[:depths]
    rows = [decoder.begin()[0]]
    for depth in range(1, depths):
        rows.append(decoder.expand([int(IDS[0, NEWEST + depth])], [depth - 1])[0])
    return torch.stack(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_import_and_export_keep_every_tensor(layout: str, tmp_path: Path) -> None:
    drafter, tensors = import_layout(tmp_path, layout)
    export_drafter(drafter, LAYOUTS[layout][3], tmp_path / "back", "TARGET", tmp_path / "ours")
    back = read_checkpoint(tmp_path / "back").tensors
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in tensors)


def test_lattice_with_names_of_the_first_checkpoints(tmp_path: Path) -> None:
    """Its two-layer maps were sequences that included norm and activation."""
    drafter, tensors = import_layout(tmp_path, "lilicorr")
    numbered = renamed(tensors, dflash.TWO_LAYER_NAMES)
    names = {"feature_mlp.0.bias", "feature_mlp.3.weight", "layers.1.mlp.0.weight", "layers.0.mlp.2.bias"}
    assert {f"lilicorr.{name}" for name in names} < numbered.keys() - tensors.keys()
    save_file(numbered, tmp_path / "theirs" / "model.safetensors")
    import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "again")
    again = load_drafter(tmp_path / "again", TARGET).state_dict()
    assert all(torch.equal(again[name], value) for name, value in drafter.state_dict().items())


def test_feature_layers_of_blocks_count_outputs(tmp_path: Path) -> None:
    """Published ids are one less than ours; the kind's default reading applies if the config has no setting."""
    for layout, layers, from_anchor in (("dflash", [1, 3], False), ("dspark", [2, 3], True)):
        (tmp_path / layout).mkdir()
        config = import_layout(tmp_path / layout, layout)[0].config
        assert (config.feature_layers, config.sample_from_anchor, config.mask_token_id) == (layers, from_anchor, 7)


def test_windows_of_blocks_are_imported(tmp_path: Path) -> None:
    """Layers with a window are causal unless the config says otherwise (vLLM 0.32, `_dflash_layer_causal`)."""
    slides, full = "sliding_attention", "full_attention"
    cases = [
        ({"layer_types": [slides, slides], "sliding_window": 9}, {}, (9, True)),
        ({"layer_types": [slides, slides], "sliding_window": 9, "is_causal": False}, {}, (9, False)),
        ({"layer_types": [full, full], "sliding_window": 9}, {"use_swa": True, "swa_window_size": 7}, (7, True)),
        ({"layer_types": [full, full], "sliding_window": 9}, {}, (None, False)),
        ({"layer_types": [slides, full], "sliding_window": 9}, {}, "one `sliding_window` in all layers"),
        ({"layer_types": [slides, slides]}, {}, ", its number of tokens, is missing"),
    ]
    for at_top, in_blocks, expected in cases:
        config = {**DFLASH, **at_top, "dflash_config": {**DFLASH["dflash_config"], **in_blocks}}
        read = partial(dflash.parameters, Checkpoint(config, {}), TARGET.config.to_dict())
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                read()
        else:
            options = read().options
            assert (options["sliding_window"], options["causal"]) == expected


@pytest.mark.parametrize(
    ("layout", "layers", "normed"),
    [
        ("specforge", (1, 2, 3), False),
        ("vllm", (0, 2, 3), False),
        ("eagle3.1", (0, 2, 3), False),
        ("speculators", (1, 2, 3), True),
        ("speculators-normed", (1, 2, 3), True),
    ],
)
def test_eagle3(layout: str, layers: tuple[int, ...], normed: bool, tmp_path: Path) -> None:
    """SpecForge numbers feature layers one lower; speculators adds the attention to the normed feature.

    With `norm_output` the next depth reads the state after the final norm.
    """
    drafter, tensors = import_layout(tmp_path, layout)
    assert drafter.feature_layers == layers
    theirs, (decoder, features) = reference(tensors), start_decoder(drafter)
    tokens, g = IDS[0, 1 : NEWEST + 1].tolist(), theirs.eagle3_fused(features[:NEWEST])
    expected = []
    for depth in range(3):
        out = theirs.eagle3_slots(tokens, g, normed)[-1]
        expected.append(theirs.eagle3_logits(out))
        read = theirs.eagle3_feedback(out, bool(LAYOUTS[layout][0].get("norm_output")))
        tokens, g = [*tokens, int(IDS[0, NEWEST + depth + 1]) if depth < 2 else 0], torch.cat([g, read[None]])
    torch.testing.assert_close(draft_chain(decoder, 3), torch.stack(expected), atol=1e-4, rtol=1e-4)
    if "d2t" in tensors:
        assert drafter.vocab.columns.tokens([0, 1, 19]) == [1, 4, 58]


@pytest.mark.parametrize("layout", ["peagle", "peagle-normed"])
def test_peagle(layout: str, tmp_path: Path) -> None:
    drafter, tensors = import_layout(tmp_path, layout)
    theirs, (decoder, features) = reference(tensors), start_decoder(drafter)
    tokens = [*IDS[0, 1 : NEWEST + 1].tolist(), 7, 7]
    g = theirs.eagle3_fused(torch.cat([features[:NEWEST], tensors["mask_hidden"], tensors["mask_hidden"]]))
    out = theirs.eagle3_slots(tokens, g)
    torch.testing.assert_close(draft_chain(decoder, 3), theirs.eagle3_logits(out[-3:]), atol=1e-4, rtol=1e-4)


# The keys of torchspec/config/dflash_draft_config.json; AngelSpec's, in angelspec/models/draft/dspark.py, are more.
TORCHSPEC = {
    **{key: LAYERS[key] for key in LAYERS if key not in ("model_type", "head_dim", "hidden_act")},
    "architectures": ["DFlashDraftModel"], "model_type": "dflash", "num_hidden_layers": 2, "num_target_layers": 2,
    "target_hidden_size": 32, "target_num_hidden_layers": 4, "target_layer_ids": [0, 2], "mask_token_id": 7,
}  # fmt: skip
ANGELSPEC = {
    **TORCHSPEC, "architectures": ["DSparkDraftModel"], "model_type": "dspark", "fusion_type": "concat_fc",
    "markov_rank": 5, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def torchspec_logits(tensors: dict[str, Tensor], features_rf: Tensor, block: list[int]) -> Tensor:
    """[B, V] of a block, as DFlashDraftModel.forward computes them: keys of context and block, no mask."""
    theirs, count = reference(tensors), len(features_rf)
    context = theirs.norm("context_norm", theirs.product("context_proj", features_rf))
    cos, sin = rotary(list(range(count + len(block))), 8, 10_000.0, torch.float32)
    out = theirs.embedding[block]
    for number in range(2):
        name = f"layers.{number}"
        x = theirs.norm(f"{name}.input_layernorm", out)
        kept = torch.cat([context, x])
        q = theirs.product(f"{name}.self_attn.q_proj", x).unflatten(-1, (4, 8))
        k, v = (theirs.product(f"{name}.self_attn.{part}_proj", kept).unflatten(-1, (2, 8)) for part in "kv")
        q, k = theirs.norm(f"{name}.self_attn.q_norm", q), theirs.norm(f"{name}.self_attn.k_norm", k)
        q = rotate(q.transpose(0, 1), cos[count:], sin[count:])
        k = rotate(k.transpose(0, 1), cos, sin).repeat_interleave(2, 0)
        seen = (q @ k.mT / 8**0.5).softmax(-1) @ v.transpose(0, 1).repeat_interleave(2, 0)
        out = out + theirs.product(f"{name}.self_attn.o_proj", seen.transpose(0, 1).flatten(1))
        x = theirs.norm(f"{name}.post_attention_layernorm", out)
        gate = torch.nn.functional.silu(theirs.product(f"{name}.mlp.gate_proj", x))
        out = out + theirs.product(f"{name}.mlp.down_proj", gate * theirs.product(f"{name}.mlp.up_proj", x))
    return theirs.norm("final_norm", out) @ theirs.head.T


@pytest.mark.parametrize(("theirs", "size"), [(TORCHSPEC, 16), (TORCHSPEC, 4), (ANGELSPEC, 7)])
def test_torchspec_and_angelspec(theirs: dict[str, Any], size: int, tmp_path: Path) -> None:
    """Row j of a block predicts the token at its own place, the first one nothing; the size is in no config."""
    config = {**theirs, "block_size": size} if size == 4 else theirs
    kind = "dspark" if "markov_rank" in theirs else "dflash"
    ours = random_tensors(kind, "vllm", {**config, "model_type": "qwen3"})
    tensors = renamed(ours, dflash.TORCHSPEC_NAMES)
    assert {"context_proj.weight", "context_norm.weight", "final_norm.weight"} == tensors.keys() - ours.keys()
    tensors["embed_tokens.weight"] = TARGET.get_input_embeddings().weight.detach().clone()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    made = import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "ours")
    assert [f"names no block_size: {size} was taken" in each for each in made.assumed] == [True] * (size != 4)
    drafter = load_drafter(tmp_path / "ours", TARGET)
    assert (drafter.feature_layers, drafter.config.sample_from_anchor, made.kind) == ((1, 3), False, kind)
    decoder, features = start_decoder(drafter)
    expected = torchspec_logits(tensors, features[:NEWEST], [int(IDS[0, NEWEST]), *[7] * (size - 1)])[1:]
    if kind == "dspark":  # angelspec/models/draft/dspark.py: the token before each of these changes its logits
        before = IDS[0, NEWEST : NEWEST + 2]
        bias = tensors["markov_head.markov_w1.weight"][before] @ tensors["markov_head.markov_w2.weight"].T
        expected = expected[:2] + bias
    torch.testing.assert_close(draft_chain(decoder, len(expected)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ("dflash", "block_size"),
        ("dflash", "mask_token_id"),
        ("dspark", "target_layer_ids"),
        ("dflash2", "selector_rank"),
        ("peagle", "pard_token"),
    ],
)
def test_a_key_without_which_it_would_be_another_drafter(layout: str, key: str, tmp_path: Path) -> None:
    """As in SpecForge's configs/qwen3-8b-peagle.json, which names no mask token."""
    config, _ = write_checkpoint(tmp_path / "theirs", layout)
    nested = {name: value for name, value in config.get("dflash_config", {}).items() if name != key}
    silent = {name: value for name, value in config.items() if name != key} | (
        {"dflash_config": nested} if nested else {}
    )
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(silent))
    with pytest.raises(UserError, match=rf"config\.json.*{key}.*add .*trained with"):
        import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "ours")


def test_medusa(tmp_path: Path) -> None:
    drafter, tensors = import_layout(tmp_path, "medusa")
    theirs, (decoder, features) = reference(tensors), start_decoder(drafter)
    expected = []
    for head in range(3):
        hidden = features[NEWEST - 1]
        for block in range(2):
            hidden = hidden + torch.nn.functional.silu(theirs.product(f"{head}.{block}.linear", hidden))
        expected.append(theirs.product(f"{head}.2", hidden))
    torch.testing.assert_close(draft_chain(decoder, 3), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_hydra(tmp_path: Path) -> None:
    """Head i reads the feature and i + 1 embeddings; its second block has the size of the first."""
    drafter, tensors = import_layout(tmp_path, "hydra")
    theirs, (decoder, features) = reference(tensors), start_decoder(drafter)
    read, expected = features[NEWEST - 1], []
    for head in range(3):
        read = torch.cat([read, theirs.embedding[IDS[0, NEWEST + head]]])
        first = f"hydra_mlp.{head}.0"
        hidden = theirs.product(f"{first}.res_connection", read)
        hidden = hidden + torch.nn.functional.silu(theirs.product(f"{first}.linear", read))
        hidden = hidden + torch.nn.functional.silu(theirs.product(f"hydra_mlp.{head}.1.linear", hidden))
        expected.append(theirs.product(f"hydra_lm_head.{head}", hidden))
    torch.testing.assert_close(draft_chain(decoder, 3), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_separate_head_for_all_tokens_is_kept(tmp_path: Path) -> None:
    """EAGLE-3 for Vicuna has one: 32,000 of 32,000 tokens. It is not a copy of the target's."""
    config, tensors = write_checkpoint(tmp_path / "theirs", "vllm")
    tensors["lm_head.weight"] = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(8))
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "ours")
    drafter = load_drafter(tmp_path / "ours", TARGET)
    assert torch.equal(drafter.lm_head.weight, tensors["lm_head.weight"])
    export_drafter(drafter, "vllm", tmp_path / "back", "TARGET", tmp_path / "ours")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert config["draft_vocab_size"] == VOCABULARY


def test_only_the_targets_embedding_is_accepted(tmp_path: Path) -> None:
    _, tensors = write_checkpoint(tmp_path / "theirs", "eagle")
    tensors["embed_tokens.weight"] = TARGET.get_input_embeddings().weight.clone()
    torch.save(tensors, tmp_path / "theirs" / "pytorch_model.bin")
    import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "ours")
    tensors["embed_tokens.weight"][3, 3] += 1.0
    torch.save(tensors, tmp_path / "theirs" / "pytorch_model.bin")
    with pytest.raises(
        UserError, match="embed_tokens is not the target's, and eagle drafters here have no separate one"
    ):
        import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_block_head_must_have_the_targets_rows(tmp_path: Path) -> None:
    config, theirs = {**DSPARK, "draft_vocab_size": DRAFTED}, tmp_path / "theirs"
    tensors = random_tensors("dspark", "vllm", config)
    chosen = tensors["d2t"] + torch.arange(DRAFTED)
    tensors["lm_head.weight"] = TARGET.get_output_embeddings().weight.detach()[chosen].clone()
    theirs.mkdir()
    (theirs / "config.json").write_text(json.dumps(config))
    save_file(tensors, theirs / "model.safetensors")
    import_drafter(str(theirs), TARGET, tmp_path / "ours")
    drafter = load_drafter(tmp_path / "ours", TARGET)
    assert drafter.vocab.columns.tokens([0, 1, 19]) == chosen[[0, 1, 19]].tolist()
    export_drafter(drafter, "vllm", tmp_path / "back", "TARGET", tmp_path / "ours")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    tensors["lm_head.weight"][3, 3] += 1.0
    save_file(tensors, theirs / "model.safetensors")
    with pytest.raises(UserError, match="lm_head is not the target's, and dspark drafters here have no separate one"):
        import_drafter(str(theirs), TARGET, tmp_path / "other")


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        (
            "vllm",
            lambda c, t: c.update(rms_norm_eps=1e-5),
            "rms_norm_eps is 1e-05 where the target's layers have 1e-06",
        ),
        ("vllm", lambda c, t: c.update(intermediate_size=64), "intermediate_size is 64 where"),
        ("vllm", lambda c, t: c.update(vocab_size=99), "vocab_size is 99 where the target has 61"),
        ("vllm", lambda c, t: c.update(fc_norm=True), "fc_norm.0.weight, fc_norm.1.weight, .* missing"),
        ("vllm", lambda c, t: c.update(fc_norm=True, norm_before_fc=True), "exclude each other"),
        ("vllm", lambda c, t: c.pop("eagle_aux_hidden_state_layer_ids"), "names no eagle_aux_hidden_state_layer_ids"),
        ("vllm", lambda c, t: c.update(num_aux_hidden_states=2), "num_aux_hidden_states is 2, and .* names 3 layers"),
        ("vllm", lambda c, t: c.update(use_aux_hidden_state=False), "json: use_aux_hidden_state is false"),
        (
            "specforge",
            lambda c, t: (c.update(eagle_config={"use_aux_hidden_state": False}), t.pop("fc.weight")),
            "eagle_config.use_aux_hidden_state is false, .* trained on fused layers",
        ),
        ("vllm", lambda c, t: c.update(rope_scaling={"rope_type": "odd"}), "rope_type odd"),
        ("vllm", lambda c, t: t.pop("midlayer.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight missing"),
        ("vllm", lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), "q_norm.weight not in a"),
        ("eagle", lambda c, t: t.pop("fc.weight"), "none of the supported layouts"),
        ("medusa", lambda c, t: t.pop("0.2.weight"), "missing"),
        ("hydra", lambda c, t: c.update(hydra_head_arch="prefix-mlp"), "hydra_head_arch: prefix-mlp"),
        ("hydra", lambda c, t: c.pop("grounded_heads"), "grounded_heads: False"),
    ],
)
def test_incompatible_checkpoint_is_reported(layout: str, change: Change, sentence: str, tmp_path: Path) -> None:
    config, tensors = write_checkpoint(tmp_path / "theirs", layout)
    config = dict(config)
    change(config, tensors)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "theirs" / LAYOUTS[layout][2]
    save_file(tensors, file) if file.suffix == ".safetensors" else torch.save(tensors, file)
    with pytest.raises(UserError, match=sentence):
        import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "ours")
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


def assumed(folder: Path) -> list[str]:
    found: list[str] = json.loads((folder / IMPORT_FILE).read_text())["assumed"]
    return found


def test_guessed_layers_are_reported(tmp_path: Path) -> None:
    """The guess is that of other readers, 2, L/2 and L-3; layers named in the config are not reported."""
    deep = tiny_target(num_hidden_layers=8)
    config, _ = write_checkpoint(tmp_path / "theirs", "vllm")
    import_drafter(str(tmp_path / "theirs"), deep, tmp_path / "named")
    assert assumed(tmp_path / "named") == []
    silent = {key: value for key, value in config.items() if key != "eagle_aux_hidden_state_layer_ids"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(silent))
    made = import_drafter(str(tmp_path / "theirs"), deep, tmp_path / "guessed")
    assert load_drafter(tmp_path / "guessed", deep).feature_layers == (2, 4, 5)
    (sentence,) = assumed(tmp_path / "guessed")
    assert made.assumed == [sentence]
    assert "names no eagle_aux_hidden_state_layer_ids: [2, 4, 5] were guessed" in sentence


def test_feature_layers_named_twice_are_refused(tmp_path: Path) -> None:
    config, _ = write_checkpoint(tmp_path / "theirs", "vllm")
    for ids, count in (([-1, 1, 2], 0), ([0, 1, 2], 1)):
        both = {**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
        (tmp_path / "theirs" / "config.json").write_text(json.dumps(both))
        made = import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / f"ours-{count}")
        assert len(made.assumed) == count
        assert load_drafter(tmp_path / f"ours-{count}", TARGET).feature_layers == (0, 2, 3)


@pytest.mark.parametrize("layout", ["vllm", "specforge", "eagle", "peagle", "dflash", "dspark", "speculators"])
@pytest.mark.parametrize("theta", [500_000.0, None])
def test_rope_of_the_drafter_is_kept(layout: str, theta: float | None, tmp_path: Path) -> None:
    """It is that of the checkpoint's config, or the readers' default if it names none; the export has it again."""
    target = tiny_target(num_hidden_layers=4, rope_parameters={"rope_type": "default", "rope_theta": 30_000.0})
    config, tensors = write_checkpoint(tmp_path / "theirs", layout)
    layers = config.get("transformer_layer_config", config)
    changed = {**layers, "rope_theta": theta} if theta else {k: v for k, v in layers.items() if k != "rope_theta"}
    config = changed if layers is config else {**config, "transformer_layer_config": changed}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    made = import_drafter(str(tmp_path / "theirs"), target, tmp_path / "ours")
    drafter = load_drafter(tmp_path / "ours", target)
    wanted = {"rope_type": "default", "rope_theta": theta or 10_000.0}
    assert drafter.config.rope == wanted
    hidden, positions = torch.zeros(1, 5, 32), torch.arange(5)[None]
    angles = 4 * (theta or 10_000.0) ** (-torch.arange(0, 8, 2) / 8)
    cos, _ = drafter.rotary_of(hidden, positions)
    torch.testing.assert_close(cos[0, 4, :4], angles.cos())
    sentence = "names no rope_theta: 10,000 was taken" if theta is None else r"another RoPE (500,000) than .* (30,000"
    assert re.search(sentence.replace("(", r"\(").replace(")", r"\)"), made.assumed[0])
    export_drafter(drafter, LAYOUTS[layout][3], tmp_path / "back", "TARGET", tmp_path / "ours")
    back = read_checkpoint(tmp_path / "back")
    assert back.config["rope_theta"] == wanted["rope_theta"]
    assert all(torch.equal(back.tensors[name], value) for name, value in tensors.items())


def test_rope_as_an_option() -> None:
    drafter = tiny_drafter_of("eagle3", TARGET, rope={"rope_theta": 500_000})
    assert drafter.layers_config.rope_parameters == {"rope_type": "default", "rope_theta": 500_000.0}
    for rope, sentence in (
        ({}, "must have a positive rope_theta"),
        ({"rope_theta": 1, "rope_type": "x"}, "rope_type x"),
    ):
        with pytest.raises(UserError, match=rf"drafter\.options\.rope.*{sentence}"):
            tiny_drafter_of("eagle3", TARGET, rope=rope)


@pytest.mark.parametrize("layout", ["vllm", "specforge", "peagle", "eagle", "dflash", "medusa"])
def test_names_with_a_model_prefix(layout: str, tmp_path: Path) -> None:
    """Some trainers save names with the prefix `model.`."""
    plain, tensors = import_layout(tmp_path, layout)
    prefix = "model.medusa_heads." if layout == "medusa" else "model."
    named = {name if name.startswith(("lm_head", "d2t", "t2d")) else prefix + name: v for name, v in tensors.items()}
    file = tmp_path / "theirs" / LAYOUTS[layout][2]
    save_file(named, file) if file.suffix == ".safetensors" else torch.save(named, file)
    made = import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "again")
    again = load_drafter(tmp_path / "again", TARGET).state_dict()
    assert made.kind == LAYOUTS[layout][1]
    assert all(torch.equal(again[name], value) for name, value in plain.state_dict().items())


def test_export_imports_again(tmp_path: Path) -> None:
    """Draft models and PARD drafters, whose embedding and head are the target's except for the mask's row."""
    for kind, options in (("draft_model", {}), ("parallel", {"inputs": "embedding", "shared_mask": True})):
        drafter = tiny_drafter_of(kind, TARGET, **options)
        export_drafter(drafter, "vllm", tmp_path / f"out-{kind}", "TARGET", tmp_path)
        import_drafter(str(tmp_path / f"out-{kind}"), TARGET, tmp_path / kind)
        back = load_drafter(tmp_path / kind, TARGET).state_dict()
        assert all(torch.equal(back[name], value) for name, value in drafter.state_dict().items())


def test_import_command(tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    _, tensors = write_checkpoint(tmp_path / "theirs", "medusa")
    recipe = recipe_in(tmp_path, drafter={"kind": "medusa", "options": {"num_heads": 3, "num_layers": 2}})
    file = recipe_file(recipe)
    result = CliRunner().invoke(app, ["import", file, "--from", str(tmp_path / "theirs")])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "run" / "drafter"
    assert json.loads((folder / IMPORT_FILE).read_text())["kind"] == "medusa"
    assert torch.equal(load_file(folder / "model.safetensors")["lm_heads.1.weight"], tensors["1.2.weight"])
    elsewhere = ["--from", str(tmp_path / "theirs"), "--to", str(tmp_path / "here"), "--json"]
    told = CliRunner().invoke(app, ["import", file, *elsewhere])
    assert json.loads(told.stdout) == {"kind": "medusa", "folder": str(tmp_path / "here"), "assumed": []}
    assert "a method of eval.methods with `drafter: " in told.stderr
    again = CliRunner().invoke(app, ["import", file, "--from", str(tmp_path / "theirs")])
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)
    nothing = CliRunner().invoke(app, ["import", file])
    assert (nothing.exit_code, "--from FOLDER" in nothing.stderr) == (2, True)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harmed",))

    write_checkpoint(tmp_path / "theirs", "medusa")
    torch.save({"0.0.linear.weight": Harm()}, tmp_path / "theirs" / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="cannot be read"):
        import_drafter(str(tmp_path / "theirs"), TARGET, tmp_path / "ours")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(("num_layers", "expected"), [(32, [2, 16, 29]), (12, [2, 6, 9])])
def test_default_feature_layers_of_imports(num_layers: int, expected: list[int]) -> None:
    """All engines and the authors' code read these layers if the target has enough."""
    config = {key: value for key, value in VLLM.items() if key != "eagle_aux_hidden_state_layer_ids"}
    checkpoint = Checkpoint(config, random_tensors("eagle3", "vllm", VLLM))
    target_config = {**TARGET.config.to_dict(), "num_hidden_layers": num_layers}
    assert eagle.parameters(checkpoint, target_config).options["feature_layers"] == expected
