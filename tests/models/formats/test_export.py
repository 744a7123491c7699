"""Every kind that a format can express is exported, satisfies its reader's rules, and reads back unchanged."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loader_rules import find_violations
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target
from support.tiny_runs import recipe_file, recipe_in, save_target, save_trained
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.errors import UserError
from draftsmith.models.base.config import DrafterConfig
from draftsmith.models.base.drafter import Drafter
from draftsmith.models.formats.exporting import (
    EXPORT_FILE,
    EXPORTERS,
    FORMATS,
    check_written,
    export_drafter,
    loading_words,
    refusal,
    serving_command,
    speculative_config,
)
from draftsmith.models.formats.importing import read_checkpoint
from draftsmith.models.weights import load_weights
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

FEATURES = {"feature_layers": [1, 2, 3]}
PARALLEL = {
    "num_masks": 3, "num_layers": 2, "feature_layers": [1, -1], "mask_residual": True, "draft_vocab_size": 20,
    "markov_rank": 5, "first_token": False, "intermediate_size": 24,
}  # fmt: skip
EXPRESSIBLE: list[tuple[str, str, str, dict[str, Any]]] = [
    ("eagle3", "vllm", "llama", {}),
    ("eagle3", "vllm", "llama", {"feature_layers": [0, 2, 3], "draft_vocab_size": 20}),
    ("eagle3", "vllm", "qwen2", {}),
    ("eagle3", "vllm", "qwen3", {"draft_vocab_size": 20, "sliding_window": 9}),
    ("eagle3", "vllm", "llama", {"draft_vocab_size": VOCABULARY, "norm_before_residual": True}),
    ("eagle3", "vllm", "llama", {"fc_norm": True, "norm_output": True, "feature_layers": [0, 3]}),
    ("peagle", "vllm", "llama", {"num_layers": 2, "draft_vocab_size": 20, "sliding_window": 9}),
    ("peagle", "vllm", "llama", {"fc_norm": True}),
    ("eagle", "vllm", "llama", {}),
    ("medusa", "vllm", "llama", {"num_layers": 2, "num_heads": 3}),
    ("medusa", "vllm", "qwen3", {"lm_heads": "shared"}),
    ("draft_model", "vllm", "llama", {}),
    ("draft_model", "vllm", "gemma", {"num_layers": 1}),
    ("parallel", "vllm", "qwen2", {"inputs": "embedding", "num_masks": 1, "num_layers": 2}),
    ("parallel", "vllm", "llama", PARALLEL),
    ("parallel", "vllm", "qwen3", {"inputs": "hidden", "feature_layers": [1, 3], "sliding_window": 9}),
    ("parallel", "vllm", "qwen2", {"inputs": "embedding", "draft_vocab_size": VOCABULARY}),
    ("eagle3", "sglang", "llama", {**FEATURES, "draft_vocab_size": 20}),
    ("eagle3", "sglang", "llama", {**FEATURES, "fc_norm": True, "norm_output": True}),
    ("eagle3", "sglang", "llama", {**FEATURES, "norm_before_fc": True}),
    ("eagle", "sglang", "llama", {"fc_bias": True}),
    ("draft_model", "sglang", "qwen2", {}),
    ("eagle3", "speculators", "qwen3", {"draft_vocab_size": 20, "feature_layers": [1, 3]}),
    ("eagle3", "speculators", "llama", {"norm_before_fc": True, "norm_output": True, "sliding_window": 9}),
    ("peagle", "speculators", "llama", {"num_layers": 2}),
    ("dflash", "vllm", "llama", {"feature_layers": [1, 3], "mask_token_id": 5, "causal": True}),
    ("dflash", "vllm", "qwen2", {"num_layers": 2, "block_size": 4, "sliding_window": 9}),
    ("dflash", "vllm", "phi3", {}),
    ("dspark", "vllm", "qwen3", {"markov_rank": 5, "draft_vocab_size": 20}),
    ("dflash", "sglang", "llama", {}),
    ("dflash2", "vllm", "llama", {"selector_rank": 5, "selector_top_k": 4, "conv_group_size": 8}),
    ("dflash2", "sglang", "qwen3", {"selector_rank": 5, "conv_kernel_size": 3, "sliding_window": 9}),
    ("dflash", "speculators", "llama", {"draft_vocab_size": 20, "num_layers": 2, "feature_layers": [1, 3]}),
    ("dflash2", "speculators", "qwen3", {"selector_rank": 5, "selector_top_k": 4, "sliding_window": 9}),
    ("dspark", "vllm", "qwen3", {"markov_rank": 5, "confidence_weight": 0.0}),
    ("dspark", "sglang", "mistral", {"markov_rank": 5, "block_size": 3, "sliding_window": 7}),
    ("eagle3", "vllm", "qwen3_moe", {"layers": "qwen3", "draft_vocab_size": 20}),
    ("eagle3", "sglang", "qwen3", {**FEATURES, "layers": "llama"}),
    ("eagle", "vllm", "phi3", {"layers": "llama"}),
    ("draft_model", "vllm", "mixtral", {}),
    ("parallel", "vllm", "qwen3_moe", {"inputs": "embedding", "shared_mask": True, "layers": "qwen3"}),
    ("dflash", "vllm", "qwen3_moe", {}),
    ("eagle3", "vllm", "llama", {"layers": "llama"}),
    ("eagle3", "speculators", "qwen3", {"layers": "qwen3"}),
    ("draft_model", "vllm", "mistral", {"layers": "llama"}),
]
INEXPRESSIBLE: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    ("parallel", "vllm", "llama", {"inputs": "embedding", "num_masks": 0}, "is a draft model", "kind=draft_model"),
    ("parallel", "vllm", "gemma", {}, "scales embeddings", "drafter.kind=draft_model"),
    ("parallel", "vllm", "phi3", {}, "phi3's layers", "drafter.options.layers=llama"),
    ("eagle", "vllm", "llama", {"fc_bias": True}, "bias of fc", "fc_bias=false"),
    ("eagle", "vllm", "qwen3", {}, "no q/k norms", "drafter.options.layers=llama"),
    ("eagle3", "vllm", "gemma", {"layers": "llama"}, "scales embeddings", "drafter.kind=draft_model"),
    ("draft_model", "vllm", "gemma", {"layers": "llama"}, "scales embeddings", "drafter.options.layers=target"),
    ("eagle3", "sglang", "qwen3", FEATURES, "no q/k norms", "drafter.options.layers=llama"),
    ("eagle3", "sglang", "qwen2", FEATURES, "no biases in the attention", "drafter.options.layers=llama"),
    ("eagle3", "sglang", "llama", {"feature_layers": [0, 1, 3]}, "have no number", "without 0"),
    ("eagle3", "sglang", "llama", {"feature_layers": [2, 3]}, "fuses three layers", "three layers in"),
    ("eagle3", "sglang", "llama", {**FEATURES, "norm_before_residual": True}, "their norm", "before_residual=false"),
    ("medusa", "vllm", "llama", {"draft_vocab_size": 20}, "no draft vocabulary", "draft_vocab_size=null"),
    ("dflash", "sglang", "llama", {"draft_vocab_size": 20}, "the target's whole LM head", "draft_vocab_size=null"),
    ("dflash", "vllm", "llama", {"mask_residual": True}, "newest token", "mask_residual=false"),
    ("dflash", "vllm", "llama", {"markov_rank": 5}, "DFlash has no Markov head", "drafter.kind=dspark"),
    ("dflash", "sglang", "llama", {"causal": True}, "every row sees every row", "causal=false"),
    ("dspark", "vllm", "llama", {"sample_from_anchor": False}, "newest one's row", "sample_from_anchor=true"),
]


TARGET_CONFIG = tiny_target().config.to_dict()


def build_drafter(kind: str, model_type: str, options: dict[str, Any]) -> Drafter:
    return tiny_drafter_of(kind, tiny_target(model_type, num_hidden_layers=4), **options)


def export_to(drafter: Drafter, to: str, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    (folder / "ours").mkdir()
    export_drafter(drafter, to, folder / "theirs", "TARGET", folder / "ours")
    read = json.loads((folder / "theirs" / "config.json").read_text())
    return read, load_file(folder / "theirs" / "model.safetensors")


@pytest.mark.parametrize("to", FORMATS)
def test_kind_without_an_exporter_is_refused_by_name(to: str) -> None:
    """A new drafter file needs no edit of the formats."""
    config = DrafterConfig(target_config=TARGET_CONFIG)
    config.model_type = "draftsmith-brand_new"
    refused = refusal(config, to)
    assert refused is not None
    assert re.fullmatch(rf"{to} takes .* and has no place for brand_new: train with drafter\.kind=\w+", refused)


@pytest.mark.parametrize(("kind", "to", "model_type", "options"), EXPRESSIBLE)
def test_export_satisfies_the_readers_rules(
    kind: str, to: str, model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Names, shapes and config by the loader's rules; `export_drafter` itself reads the values back."""
    drafter = build_drafter(kind, model_type, options)
    export_to(drafter, to, tmp_path)
    folder = tmp_path / "theirs"
    assert (folder / EXPORT_FILE).is_file()
    assert (folder / "model.safetensors").is_file()
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    if EXPORTERS[kind, to].by_plugin:  # tests/models/formats/test_vllm_serves.py has its loader
        return
    if kind == "draft_model":  # transformers is the loader
        load_weights("export", str(folder), AutoModelForCausalLM, dtype="auto")
        return
    read = read_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    assert find_violations(kind, to, config, {name: tuple(value.shape) for name, value in read.tensors.items()}) == []


@pytest.mark.parametrize(("kind", "to", "model_type", "options", "why", "line"), INEXPRESSIBLE)
def test_inexpressible_option_is_refused_by_name(
    kind: str, to: str, model_type: str, options: dict[str, Any], why: str, line: str, tmp_path: Path
) -> None:
    drafter = build_drafter(kind, model_type, options)
    with pytest.raises(UserError, match=f"{re.escape(why)}.*train with .*{re.escape(line)}"):
        export_drafter(drafter, to, tmp_path / "theirs", "TARGET", tmp_path)
    assert not (tmp_path / "theirs").exists()


def test_parallel_drafter_is_written_for_the_plugin(tmp_path: Path) -> None:
    """Layer 1 and the final features, layer 4 of 4 and its norm; the fusion split; a mask a row; what vLLM compares."""
    drafter = build_drafter("parallel", "llama", PARALLEL)
    config, tensors = export_to(drafter, "vllm", tmp_path)
    assert config["architectures"] == ["Eagle3DraftsmithParallel"]
    assert (config["layer_width"], config["hidden_size"], config["pard_token"]) == (32, 36, VOCABULARY)
    assert (config["eagle_aux_hidden_state_layer_ids"], config["features"]) == ([1, 4], [[0, False], [1, True]])
    assert config["target"] == {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    fuse = drafter.state_dict()["fuse.weight"]
    assert torch.equal(tensors["fuse_embedding.weight"], fuse[:, :32])
    assert torch.equal(tensors["fuse_features.weight"], fuse[:, 32:])
    assert torch.equal(tensors["target_norm.weight"], drafter.attached.target.base_model.norm.weight)
    assert tensors["masks"].shape == (3, 32)
    assert speculative_config(drafter.config, "F") == {
        "method": "eagle3", "model": "F", "num_speculative_tokens": 4, "parallel_drafting": True,
    }  # fmt: skip


def test_eagle3_layer_ids_follow_each_engines_counting(tmp_path: Path) -> None:
    """vLLM's ids equal ours, SGLang's are one less, nested; a draft vocabulary is offsets; null: the target's head."""
    drafter = build_drafter("eagle3", "llama", {"feature_layers": [0, 2, 3], "draft_vocab_size": 20})
    config, tensors = export_to(drafter, "vllm", tmp_path)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]
    assert (config["num_aux_hidden_states"], config["draft_vocab_size"], config["vocab_size"]) == (3, 20, VOCABULARY)
    assert torch.equal(tensors["d2t"] + torch.arange(20), drafter.draft_ids)
    export_drafter(build_drafter("eagle3", "llama", FEATURES), "sglang", tmp_path / "two", "TARGET", tmp_path / "ours")
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert config["draft_vocab_size"] is None


@pytest.mark.parametrize(("to", "place"), [("vllm", None), ("speculators", "transformer_layer_config")])
def test_a_window_is_written_for_each_layer(to: str, place: str | None, tmp_path: Path) -> None:
    """As vLLM reads it, by the layer's type; without one there is no word of it."""
    config, _ = export_to(build_drafter("peagle", "llama", {"num_layers": 2, "sliding_window": 9}), to, tmp_path)
    layers = config if place is None else config[place]
    assert (layers["layer_types"], layers["sliding_window"]) == (["sliding_attention"] * 2, 9)
    export_drafter(build_drafter("peagle", "llama", {}), to, tmp_path / "theirs", "TARGET", tmp_path / "ours")
    assert "sliding" not in (tmp_path / "theirs" / "config.json").read_text()


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight differ"),
        (lambda tensors: tensors.update({"midlayer.extra": tensors["fc.weight"]}), "layers.0.extra differ"),
        (lambda tensors: tensors["fc.weight"].add_(1e-6), "tensors fc.weight differ when"),
    ],
)
def test_wrong_tensor_is_found(harm: Any, sentence: str, tmp_path: Path) -> None:
    drafter = build_drafter("eagle3", "llama", {})
    _, tensors = export_to(drafter, "vllm", tmp_path)
    harm(tensors)
    tensors = {name: value.clone().contiguous() for name, value in tensors.items()}
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(RuntimeError, match=sentence):
        check_written(read_checkpoint(tmp_path / "theirs"), drafter, EXPORTERS["eagle3", "vllm"])


def test_rope_of_the_target_is_exported(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    drafter = tiny_drafter_of("eagle", tiny_target(rope_parameters=scaled))
    config, _ = export_to(drafter, "vllm", tmp_path)
    assert config["rope_parameters"] == scaled
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_only_an_export_is_overwritten(tmp_path: Path) -> None:
    drafter = build_drafter("eagle", "llama", {})
    export_to(drafter, "vllm", tmp_path)
    export_drafter(drafter, "sglang", tmp_path / "theirs", "TARGET", tmp_path / "ours")
    assert not load_file(tmp_path / "theirs" / "model.safetensors")["fc.bias"].any()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years")
    with pytest.raises(UserError, match="is not an export"):
        export_drafter(drafter, "vllm", tmp_path / "thesis", "TARGET", tmp_path / "ours")
    assert (tmp_path / "thesis" / "chapter").read_text() == "years"


def test_export_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a finished run the folder is written, and vLLM's server accepts the printed command from any folder."""
    save_target(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    recipe = recipe_in(tmp_path, target={"model": "target"}, drafter={"kind": "medusa", "options": {"num_heads": 3}})
    drafter = tiny_drafter_of("medusa", tiny_target(num_hidden_layers=4), num_heads=3)
    hashes, file = save_trained(recipe, drafter), recipe_file(recipe)
    result = CliRunner().invoke(app, ["export", file, "--to", "vllm"])
    assert result.exit_code == 0, result.output
    assert "Serve it (for vLLM 0.32):" in result.stdout
    words = shlex.split(result.stdout.strip().splitlines()[-1])
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "target")]
    folder = RunFolder(recipe).root / "export" / "vllm"
    asked = {"method": "medusa", "model": str(folder.absolute()), "num_speculative_tokens": 3}
    assert words[5:7] == ["--dtype", "float32"]  # the recipe's; vLLM would use its default
    assert (words[7], json.loads(words[8])) == ("--speculative-config", asked)
    assert json.loads((folder / EXPORT_FILE).read_text())["drafter_sha256"] == hashes
    told = json.loads(CliRunner().invoke(app, ["export", file, "--to", "vllm", "--json"]).stdout)
    assert (told["kind"], told["folder"], told["num_speculative_tokens"]) == ("medusa", str(folder), 3)
    assert shlex.split(told["command"]) == words
    refused = CliRunner().invoke(app, ["export", file, "--to", "sglang"])
    assert refused.exit_code == 2
    assert "no place for medusa: train with drafter.kind=eagle3" in refused.stderr
    misspelt = CliRunner().invoke(app, ["export", file, "--to", "vlm"])
    assert "did you mean `vllm`?" in misspelt.stderr
    removed = CliRunner().invoke(app, ["export", file, "--to", "medusa"])
    assert (removed.exit_code, "the format `medusa` was removed: export to vllm" in removed.stderr) == (2, True)


def loaded_as(**target: Any) -> Recipe:
    return Recipe.model_validate({"name": "a", "target": target})


def test_printed_server_loads_the_target_as_the_recipe_does() -> None:
    """`auto`, and fp64, which engines do not support, leave the dtype to the engine."""
    values = {"model": "org/llm", "revision": "v2", "trust_remote_code": True, "dtype": "bfloat16"}
    loading = loading_words(loaded_as(**values), "vllm")
    assert loading == ["--dtype", "bfloat16", "--revision", "v2", "--trust-remote-code"]
    assert [loading_words(loaded_as(dtype=dtype), "vllm") for dtype in ("auto", "float64")] == [[], []]
    silent = loaded_as(chat_template_kwargs={"enable_thinking": False})
    assert loading_words(silent, "vllm") == ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    assert loading_words(silent, "sglang") == []
    command = serving_command(build_drafter("eagle3", "llama", FEATURES).config, "sglang", "org/llm", "F", loading)
    assert shlex.split(command)[2:10] == ["sglang.launch_server", "--model-path", "org/llm", *loading]
