"""The target in 8 or 4 bits by bitsandbytes: `target.quantization`. Embedding and LM head are not quantised.

The quantised model is then the target in all stages: features, answers and the proof of identity are its own.
LLM.int8() is arXiv 2208.07339; nf4 and the quantised scales are QLoRA's (2305.14314).
"""

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.recipes.schema import TargetRecipe

NF4_BLOCK, SCALES_BLOCK = 64, 256  # weights per scale, and scales per scale of scales
INT8_BYTES = 1.0
# Half a byte, an 8-bit scale per block, and an fp32 scale per block of scales.
NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * SCALES_BLOCK)


def quantization_options(recipe: TargetRecipe) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`; empty without `target.quantization`.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if recipe.quantization is None:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"key `target.quantization`: {recipe.quantization} needs bitsandbytes, which is not installed: "
            "`pip install bitsandbytes`, or leave the key out"
        )
    if recipe.quantization == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    computed_in = torch.bfloat16 if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed_in,
    )
    return {"quantization_config": config}


def saved_bytes(recipe: TargetRecipe, target: PreTrainedModel) -> int:
    """Return the bytes that quantisation saves; `target` is not quantised, and may be on the meta device."""
    if recipe.quantization is None:
        return 0
    weight_bytes = INT8_BYTES if recipe.quantization == "int8" else NF4_BYTES
    head = target.get_output_embeddings()
    weights = [module.weight for module in target.modules() if isinstance(module, nn.Linear) and module is not head]
    return round(sum(weight.numel() * (weight.element_size() - weight_bytes) for weight in weights))
