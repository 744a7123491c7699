"""The target model p: loaded once, frozen, and asked for the features that drafters read.

Shapes: B batch, S sequence, D hidden, F = D times the number of layers asked for.
"""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetRecipe

EMBEDDED_TARGET = Path(__file__).resolve().parents[1] / "embedded_target"
# The id of the hidden states after the final norm, among the ids of layers.
FINAL_FEATURES = -1
# Of a weights file: a retrained model differs everywhere.
HASHED_PARTS, HASHED_BYTES = 64, 1 << 16


def load_target(recipe: TargetRecipe) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in eval mode with frozen weights, on its device, and its tokenizer.

    Raises:
        UserError: The model cannot be found or read, is not decoder-only, or its tokenizer has no chat template.
    """
    location, where = target_location(recipe), _where(recipe)
    load_target_config(recipe)
    tokenizer = load_tokenizer(recipe)
    dtype = "auto" if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    target = _read(
        location,
        lambda: AutoModelForCausalLM.from_pretrained(
            location, dtype=dtype, attn_implementation=recipe.attn_implementation, **where
        ),
    )
    return _frozen(recipe, target).to(target_device(recipe)), tokenizer


def load_tokenizer(recipe: TargetRecipe) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        UserError: It cannot be found or read, or has no chat template.
    """
    location = target_location(recipe)
    tokenizer = _read(location, lambda: AutoTokenizer.from_pretrained(location, **_where(recipe)))
    if recipe.chat_template is not None:
        tokenizer.chat_template = recipe.chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of target.model {recipe.model} has no chat template: set target.chat_template to its Jinja "
            "text, or use the chat-tuned version of the model"
        )
    return tokenizer


def load_generation_config(recipe: TargetRecipe) -> GenerationConfig:
    """The target's, made from its config where it ships none."""
    location = target_location(recipe)
    try:
        return GenerationConfig.from_pretrained(location, revision=recipe.revision)
    except OSError:
        return GenerationConfig.from_model_config(load_target_config(recipe))


def weights_hash(recipe: TargetRecipe) -> str | None:
    """What changes when another model is put in the target's folder, or the Hub's commit; no weight is loaded."""
    folder = Path(target_location(recipe))
    if not folder.is_dir():
        return getattr(load_target_config(recipe), "_commit_hash", None)
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as stream:
            for part in range(HASHED_PARTS):
                stream.seek(file.stat().st_size * part // HASHED_PARTS)
                digest.update(stream.read(HASHED_BYTES))
    return digest.hexdigest()[:16]


def load_target_config(recipe: TargetRecipe) -> PreTrainedConfig:
    """The target's config, without its weights.

    Raises:
        UserError: It cannot be found or read, or is not that of a decoder-only model.
    """
    location, where = target_location(recipe), _where(recipe)
    config = _read(location, lambda: AutoConfig.from_pretrained(location, **where))
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"target.model {recipe.model} is an encoder-decoder ({config.model_type}); speculative decoding here needs "
            "a decoder-only causal language model such as Llama or Qwen"
        )
    return config


def target_without_weights(recipe: TargetRecipe) -> PreTrainedModel:
    """The target as its config describes it, on torch's default device (`torch.device("meta")`: at no cost)."""
    config = load_target_config(recipe)
    dtype = (config.dtype or torch.float32) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    target = _read(
        recipe.model,
        lambda: AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=recipe.attn_implementation,
            trust_remote_code=recipe.trust_remote_code,
        ),
    )
    return _frozen(recipe, target)


def _where(recipe: TargetRecipe) -> dict[str, Any]:
    return {"revision": recipe.revision, "trust_remote_code": recipe.trust_remote_code}


def _frozen(recipe: TargetRecipe, target: PreTrainedModel) -> PreTrainedModel:
    if target.get_output_embeddings() is None or target.base_model is target:
        raise UserError(
            f"target.model {recipe.model} ({target.config.model_type}) has no LM head: use a causal language model"
        )
    return target.eval().requires_grad_(False)


def target_location(recipe: TargetRecipe) -> str:
    """The local folder or Hub id that `target.model` stands for."""
    if recipe.model == "embedded":
        if not (EMBEDDED_TARGET / "config.json").is_file():
            raise UserError(
                f"target.model embedded: {EMBEDDED_TARGET} holds no checkpoint; `make target` trains it again (hours)"
            )
        return str(EMBEDDED_TARGET)
    if _looks_like_a_path(recipe.model) and not Path(recipe.model).expanduser().is_dir():
        raise UserError(f"target.model {recipe.model} is not a folder: give a model folder, a Hub id, or `embedded`")
    folder = Path(recipe.model).expanduser()
    return str(folder) if folder.is_dir() else recipe.model


def target_device(recipe: TargetRecipe) -> torch.device:
    """The recipe's device, or CUDA if there is one, else CPU."""
    if recipe.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(recipe.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"target.device {recipe.device} cannot be used here ({reason}): try cpu") from None
    return device


def target_features(
    target: PreTrainedModel,
    input_ids_bs: Tensor,
    attention_mask_bs: Tensor | None = None,
    position_ids_bs: Tensor | None = None,
    layers: tuple[int, ...] = (FINAL_FEATURES,),
    with_gradient: bool = False,
) -> Tensor:
    """[B, S, F]: what the drafter reads of the target. One forward, no logits, no KV cache, no layer too many."""
    with torch.set_grad_enabled(with_gradient), FeatureTap(target, layers, stop_early=True) as tap:
        with contextlib.suppress(_AllTapped):
            target.base_model(
                input_ids=input_ids_bs, attention_mask=attention_mask_bs, position_ids=position_ids_bs, use_cache=False
            )
        return tap.take()


class _AllTapped(Exception):
    """Thrown out of the target's forward when every layer that is wanted has run."""


class FeatureTap:
    """Catches hidden states of a target while it runs.

    Args:
        target: A causal language model.
        layers: Which, in the order they are concatenated: k >= 0 is the residual stream after k layers (0 the
            embeddings; vLLM's `eagle_aux_hidden_state_layer_ids`), `FINAL_FEATURES` what the LM head reads.
        stop_early: End the forward as soon as the last of them is there, by `_AllTapped`.

    Raises:
        UserError: A layer id is too large, or the target's layers cannot be found.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...], stop_early: bool = False) -> None:
        self._layers = layers
        self._caught: dict[int, Tensor] = {}
        self._stop_after = None if not stop_early or FINAL_FEATURES in layers else max(layers)
        self._hooks = []
        residual = sorted({layer for layer in layers if layer != FINAL_FEATURES})
        blocks = decoder_layers(target) if residual else nn.ModuleList()
        if residual and (residual[0] < 0 or residual[-1] > len(blocks)):
            raise UserError(f"feature layers {list(layers)} do not exist: the target has layers 0 to {len(blocks)}")
        if FINAL_FEATURES in layers:
            self._hooks.append(target.base_model.register_forward_hook(self._catch_output(FINAL_FEATURES)))
        for layer in residual:
            if layer == 0:
                self._hooks.append(blocks[0].register_forward_pre_hook(self._catch_input, with_kwargs=True))
            else:
                self._hooks.append(blocks[layer - 1].register_forward_hook(self._catch_output(layer)))

    def __enter__(self) -> "FeatureTap":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the target again."""
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Tensor:
        """[B, S, F] of the last forward, F = len(layers) * D."""
        parts = [self._caught[layer] for layer in self._layers]
        self._caught.clear()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _catch_output(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._caught[layer] = output if isinstance(output, Tensor) else output[0]
            if layer == self._stop_after:
                raise _AllTapped

        return hook

    def _catch_input(self, _module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._caught[0] = inputs[0] if inputs else kwargs["hidden_states"]
        if self._stop_after == 0:
            raise _AllTapped


def drop_decoder_layers(target: PreTrainedModel) -> None:
    """Leave the embedding, the final norm and the LM head: all that training on features from disk asks for.

    A target whose layers are kept under a name that is not known here stays whole.
    """
    with contextlib.suppress(UserError):
        del decoder_layers(target)[:]


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, first to last.

    Raises:
        UserError: They are kept under a name that is not known here.
    """
    for name in ("layers", "h", "blocks"):
        blocks = getattr(target.base_model, name, None)
        if isinstance(blocks, nn.ModuleList) and len(blocks) == target.config.get_text_config().num_hidden_layers:
            return blocks
    raise UserError(
        f"the decoder layers of {type(target).__name__} cannot be found, which features of inner layers need: use a "
        "drafter that reads the final features only (parallel, medusa, hydra, eagle)"
    )


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def _read(location: str, load: Any) -> Any:
    return read_pretrained("target.model", location, load)


def read_pretrained(what: str, location: str, load: Any) -> Any:
    """Call a `from_pretrained`, with its failures told in one sentence.

    Args:
        what: What is loaded, as the user knows it: a key of the recipe, say.
    """
    try:
        return load()
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if len(reason) > 300:
            reason = reason[:300] + " ..."
        raise UserError(
            f"{what} {location} cannot be loaded ({reason}): give a folder with a transformers checkpoint, or a Hub id "
            "that this machine can reach"
        ) from None
