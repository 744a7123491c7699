"""A LoRA inside the target (peft's layers) whose weights belong to a drafter.

The drafter owns one `LoraPair` for each linear layer that it changes, in a tree of modules with the target's own names,
so that they are trained, saved and resumed with it; `inject` lends these very modules to peft's layers in the target.
In its file they are named `<prefix>.model.layers.0.self_attn.q_proj.lora_A.weight`, as in peft's own checkpoints.

A target holds one such adapter at a time: `remove` takes an earlier one out.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.recipes.errors import UserError

ADAPTER_NAME = "draftsmith"
ALL_LINEAR = "all-linear"


class LoraPair(nn.Module):
    """The two factors of one linear layer's change, under peft's names."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)

    def reset(self) -> None:
        """LoRA's start: no change at all, since B is zero."""
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5**0.5)
        nn.init.zeros_(self.lora_B.weight)


def lora_tree(shapes: dict[str, list[int]], rank: int) -> nn.Module:
    """A `LoraPair` for each name, below modules that are named like the target's; shapes: [inputs, outputs]."""
    root = nn.Module()
    for name, (in_features, out_features) in shapes.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, LoraPair(in_features, out_features, rank))
    return root


def linear_shapes(target: PreTrainedModel, wanted: str | list[str]) -> dict[str, list[int]]:
    """[inputs, outputs] of the wanted linear layers of a target without adapter, by name; never its LM head.

    Args:
        target: The model.
        wanted: `all-linear`, or last parts of names such as `q_proj`.

    Raises:
        UserError: One of them does not exist.
    """
    prefix = f"{target.base_model_prefix}."
    found = {
        name: _shape(module)
        for name, module in target.named_modules()
        if name.startswith(prefix) and isinstance(module, nn.Linear | Conv1D)
    }
    if wanted == ALL_LINEAR:
        return found
    for part in wanted:
        if not any(name.endswith(f".{part}") for name in found):
            there = sorted({name.rsplit(".", 1)[-1] for name in found})
            raise UserError(
                f"key `drafter.options.lora_targets`: the target has no linear layer `{part}`; use some of "
                f"{', '.join(there)}, or `{ALL_LINEAR}`"
            )
    endings = tuple(f".{part}" for part in wanted)
    return {name: shape for name, shape in found.items() if name.endswith(endings)}


def inject(target: PreTrainedModel, lora: nn.Module, names: Iterable[str], rank: int, alpha: float) -> None:
    """Let the target, which has no adapter, compute with the pairs of this tree."""
    names = list(names)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=names,
        fan_in_fan_out=all(isinstance(target.get_submodule(name), Conv1D) for name in names),
    )
    # On the meta device: peft's own weights are replaced at once.
    inject_adapter_in_model(config, target, ADAPTER_NAME, low_cpu_mem_usage=True)
    for name, layer in adapted_layers(target).items():
        pair = lora.get_submodule(name)
        layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME] = pair.lora_A, pair.lora_B


def remove(target: PreTrainedModel) -> None:
    """Give the target its own layers back. After a `merge`, up to rounding."""
    for name, layer in adapted_layers(target).items():
        with torch.no_grad():
            if layer.merged:
                layer.unmerge()
        parent, _, last = name.rpartition(".")
        setattr(target.get_submodule(parent), last, layer.get_base_layer())
    if hasattr(target, "peft_config"):
        del target.peft_config


@torch.no_grad()
def merge(target: PreTrainedModel) -> None:
    """Add the changes to the target's weights, so that it runs at the speed that it has without an adapter."""
    for layer in adapted_layers(target).values():
        if not layer.merged:
            layer.merge()


@contextmanager
def switched_off(target: PreTrainedModel) -> Iterator[None]:
    """In here the target computes as if it had no adapter."""
    layers = list(adapted_layers(target).values())
    # peft freezes whatever it switches off, and marks whatever it switches on as trainable.
    pairs = [pair[ADAPTER_NAME] for layer in layers for pair in (layer.lora_A, layer.lora_B)]
    flags = [(pair.weight, pair.weight.requires_grad) for pair in pairs]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for weight, flag in flags:
            weight.requires_grad_(flag)


def adapted_layers(target: PreTrainedModel) -> dict[str, Any]:
    """peft's layers that hold our adapter, by name.

    Raises:
        UserError: The target has an adapter that is not ours.
    """
    layers: dict[str, Any] = {}
    for name, module in target.named_modules():
        if isinstance(module, BaseTunerLayer):
            if not isinstance(module, LoraLayer) or set(module.lora_A) != {ADAPTER_NAME}:
                raise UserError(
                    f"target.model {target.config.name_or_path} comes with an adapter of its own, which this drafter's "
                    "LoRA cannot be added to: merge it into the weights first (peft: merge_and_unload, save_pretrained)"
                )
            layers[name] = module
    return layers


def _shape(module: Any) -> list[int]:
    if isinstance(module, Conv1D):  # GPT-2's linear layer, transposed
        return list(module.weight.shape)
    return [module.in_features, module.out_features]
