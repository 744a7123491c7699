"""The target in 8 or 4 bits by bitsandbytes: `target.quantization`. Embedding and LM head are not quantised.

The quantised model is then the target in all stages: features, answers and the proof of identity are its own.
LLM.int8() is arXiv 2208.07339; nf4 and the quantised scales are QLoRA's (2305.14314).
"""

import importlib.util
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from draftsmith.errors import UserError
from draftsmith.recipes.schema import TargetRecipe


def quantization_options(recipe: TargetRecipe) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantise the target as `target.quantization` says.

    Raises:
        UserError: bitsandbytes is not installed.
    """
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
