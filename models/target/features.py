"""Target features that drafters read: hidden states of some of its layers, captured in its forward.

Shapes: B batch, S sequence, D hidden, F = D times the number of feature layers.
"""

import contextlib
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.kernels.cpu_layers import CpuTarget
from draftsmith.models.target.view import target_value
from draftsmith.models.target.windows import get_windows

# The id of the hidden states after the final norm, among the ids of layers.
FINAL_FEATURES = -1

_cpu_targets: weakref.WeakKeyDictionary[nn.Module, tuple[int | None, CpuTarget]] = weakref.WeakKeyDictionary()


def target_features(
    target: PreTrainedModel,
    input_ids_bs: Tensor,
    attention_mask_bs: Tensor | None = None,
    position_ids_bs: Tensor | None = None,
    layers: tuple[int, ...] = (FINAL_FEATURES,),
    with_gradient: bool = False,
) -> Tensor:
    """Return the features [B, S, F], by one forward without logits, KV cache, or layers above the last one needed.

    Args:
        attention_mask_bs: [B, S], 0 at padding, which must be on the right, where causal attention does not see it.
            Our CPU kernels skip padding: its features are then zeros.
        position_ids_bs: [B, S], from 0 on in each packed document. Our kernels run one document after the other.
        with_gradient: Keep the graph, so that the features have gradients for the target's weights.
    """
    batch, length = input_ids_bs.shape
    cpu_target = None if with_gradient else _cpu_target(target, layers, length)
    if cpu_target is None:
        return _forward(target, input_ids_bs, position_ids_bs, layers, with_gradient)
    real_bs = torch.ones_like(input_ids_bs) if attention_mask_bs is None else attention_mask_bs
    tokens_t = real_bs.flatten().nonzero().squeeze(1)
    position_bs = torch.arange(length).expand(batch, length) if position_ids_bs is None else position_ids_bs
    ids_t, position_t = (part.flatten()[tokens_t] for part in (input_ids_bs, position_bs))
    begins_d = torch.cat([tokens_t.new_zeros(1), (position_t.diff() != 1).nonzero().squeeze(1) + 1])
    lengths = begins_d.diff(append=begins_d.new_tensor([len(tokens_t)])).tolist()
    if get_windows(target).reached(max(lengths)):
        return _forward(target, input_ids_bs, position_ids_bs, layers)
    documents = zip(ids_t.split(lengths), position_t.split(lengths), strict=True)
    features_tf = torch.cat([cpu_target.features(ids.tolist(), at.tolist(), layers) for ids, at in documents])
    grid = features_tf.new_zeros(input_ids_bs.numel(), features_tf.shape[1])
    return grid.index_copy_(0, tokens_t, features_tf).unflatten(0, input_ids_bs.shape)


def _cpu_target(target: PreTrainedModel, layers: tuple[int, ...], length: int) -> CpuTarget | None:
    """Return the layers that these features need, for documents of this length; None if no kernels run them.

    They are made again for a longer document, or for other layers.
    """
    if target.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    needed = None if FINAL_FEATURES in layers else max(layers)
    made = _cpu_targets.get(target)
    if made is None or made[0] != needed or made[1].positions < length:
        positions = 1 << (length - 1).bit_length()
        if (found := CpuTarget.of(target, positions, features_only=True, num_layers=needed)) is None:
            return None
        made = _cpu_targets[target] = needed, found
    cpu_target = made[1]
    if not all(FINAL_FEATURES <= layer <= cpu_target.num_layers for layer in layers):
        return None  # `FeatureTap` reports layers that do not exist
    cpu_target.refresh()
    return cpu_target


def _forward(
    target: PreTrainedModel,
    input_ids_bs: Tensor,
    position_ids_bs: Tensor | None,
    layers: tuple[int, ...] = (FINAL_FEATURES,),
    with_gradient: bool = False,
) -> Tensor:
    with torch.set_grad_enabled(with_gradient), contextlib.closing(FeatureTap(target, layers, stop_early=True)) as tap:
        with contextlib.suppress(_AllTapped):
            target.base_model(input_ids=input_ids_bs, position_ids=position_ids_bs, use_cache=False)
        return tap.take()


class FeatureReader(Protocol):
    """A drafter as a reader of features: which layers it reads, and whether its loss needs the target's p."""

    feature_layers: tuple[int, ...]

    @property
    def needs_teacher(self) -> bool: ...


def required_layers(drafter: FeatureReader) -> tuple[int, ...]:
    """Return the layers that a training step reads: those of the drafter, and the final one if the loss needs it."""
    layers = drafter.feature_layers
    return (*layers, FINAL_FEATURES) if drafter.needs_teacher and FINAL_FEATURES not in layers else layers


def split_features(drafter: FeatureReader, features_bsf: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split features of `required_layers` into the drafter's [B, S, F] and its teacher's [B, S, D], if it has one."""
    if not drafter.needs_teacher:
        return features_bsf, None
    layers = required_layers(drafter)
    parts = features_bsf.chunk(len(layers), dim=-1)
    return torch.cat(parts[: len(drafter.feature_layers)], dim=-1), parts[layers.index(FINAL_FEATURES)]


class _AllTapped(Exception):
    """Raised inside the target's forward once all feature layers have run."""


class FeatureTap:
    """Hooks that capture hidden states of a target in its forward.

    Args:
        target: A causal language model.
        layers: Feature layers, in the order of concatenation: k >= 0 is the residual stream after k layers (0 for the
            embeddings; vLLM's `eagle_aux_hidden_state_layer_ids`), `FINAL_FEATURES` the input of the LM head.
        stop_early: End the forward after the last feature layer, by `_AllTapped`.

    Raises:
        UserError: A layer id is too large, or the target's layers cannot be found.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...], stop_early: bool = False) -> None:
        self._layers, self._width = layers, target_value(target.config, "hidden_size")
        self._caught: dict[int, Tensor] = {}
        self._stop_after = None if not stop_early or FINAL_FEATURES in layers else max(layers)
        self._hooks = []
        residual = sorted({layer for layer in layers if layer != FINAL_FEATURES})
        blocks = decoder_layers(target) if residual else nn.ModuleList()
        if residual and (residual[0] < 0 or residual[-1] > len(blocks)):
            raise UserError(f"feature layers {list(layers)} do not exist: the target has layers 0 to {len(blocks)}")
        if FINAL_FEATURES in layers:
            self._hooks.append(get_text_decoder(target).register_forward_hook(self._catch_output(FINAL_FEATURES)))
        for layer in residual:
            if layer == 0:
                self._hooks.append(
                    blocks[0].register_forward_pre_hook(self._catch_input, prepend=True, with_kwargs=True)
                )
            else:
                self._hooks.append(blocks[layer - 1].register_forward_hook(self._catch_output(layer)))

    def close(self) -> None:
        """Remove the hooks from the target."""
        for hook in self._hooks:
            hook.remove()

    def take(self) -> Tensor:
        """Return the features [B, S, F] of the last forward, F = len(layers) * D; without layers an empty tensor.

        Raises:
            UserError: A layer's hidden states are not of the shape [B, S, D].
        """
        if not self._layers:
            return torch.empty(1, 0, 0)
        parts = [self._caught[layer] for layer in self._layers]
        self._caught.clear()
        for layer, part in zip(self._layers, parts, strict=True):
            if part.dim() != 3 or part.shape[-1] != self._width:
                raise UserError(
                    f"the target's hidden states after layer {layer} are of shape {list(part.shape)}, where its layers "
                    f"are {self._width} wide, so that no features can be read there: use a drafter that reads the "
                    "final features only (parallel, medusa, hydra, eagle)"
                )
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


def get_text_decoder(target: PreTrainedModel) -> nn.Module:
    """Return the module whose output the LM head reads: the base model, or the decoder in it, as in OPT."""
    base = target.base_model
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    return decoder if isinstance(decoder, nn.Module) else base


def final_norm(target: PreTrainedModel) -> nn.Module:
    """Return the norm between the last decoder layer and the LM head.

    Raises:
        UserError: No such norm can be found.
    """
    decoder = get_text_decoder(target)
    norms = [getattr(decoder, name, None) for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm")]
    found = next((norm for norm in norms if isinstance(norm, nn.Module)), None)
    if found is None:
        raise UserError(
            f"the final norm of {type(target).__name__} cannot be found, which features from a server need: set "
            "data.features.source=online"
        )
    return found


def drop_decoder_layers(target: PreTrainedModel) -> None:
    """Remove the decoder layers, which training on features from disk does not need.

    If the target's layers cannot be found, nothing is removed.
    """
    with contextlib.suppress(UserError):
        del decoder_layers(target)[:]


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """Return the target's decoder layers, first to last.

    Raises:
        UserError: The layers cannot be found.
    """
    decoder, num_layers = get_text_decoder(target), target_value(target.config, "num_hidden_layers")
    for name in ("layers", "h", "blocks"):
        blocks = getattr(decoder, name, None)
        if isinstance(blocks, nn.ModuleList) and len(blocks) == num_layers:
            return blocks
    raise UserError(
        f"the decoder layers of {type(target).__name__} cannot be found, and this drafter reads features of inner "
        "layers: use one that reads the final features only (parallel, medusa, hydra, eagle)"
    )
