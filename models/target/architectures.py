"""What transformers' classes make of their configs: from an LM head's product to logits, and windows.

A config's keys do not say it: Granite divides its logits by `logits_scaling` and HyperCLOVA X multiplies by it; Mistral
applies `sliding_window` and Llama ignores it. So there are tables by `model_type`, which tests compare with the classes
themselves. A type that is not `KNOWN`, of later versions or with its own code, is read by its keys, and sequences end
where its window does; `draftsmith doctor` and the start of a training compare its logits (`checks.py`).
"""

import math
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.models.target_logits import PLAIN, LogitShape

# Types whose classes were compared with these tables, by `docs/generate/targets.py`.
_TRIED = """
    afmoe apertus arcee aria_text axk1 axk2 bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe
    falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    inkling_text jais2 jamba jetmoe kimi_linear laguna lfm2 lfm2_moe llama llama4_text longcat_flash mamba mellum
    mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder mpt
    nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma xglm xlm xlstm youtu
"""
KNOWN = frozenset(_TRIED.split())
# Types that apply `sliding_window` in all layers. If a config has `layer_types`, all classes obey these.
SLIDING = frozenset(["doge", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "recurrent_gemma", "starcoder2"])


@dataclass(frozen=True)
class LogitKeys:
    """Config keys of what turns the LM head's product into logits: a factor, a divisor and a soft cap."""

    factor: str | None = None
    divisor: str | None = None
    cap: str | None = None

    def read(self, config: Any) -> LogitShape:
        """Return scale and cap from the config's values; a key without a number changes nothing."""
        factor, divisor, cap = (_number(config, key) for key in (self.factor, self.divisor, self.cap))
        return LogitShape((factor or 1.0) / (divisor or 1.0), cap or None)


LOGITS = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), LogitKeys(factor="logit_scale")),
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
        LogitKeys(divisor="logits_scaling"),
    ),
    "hyperclovax": LogitKeys(factor="logits_scaling"),
    "falcon_h1": LogitKeys(factor="lm_head_multiplier"),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma4_unified_text", "nanochat", "vaultgemma"),
        LogitKeys(cap="final_logit_softcapping"),
    ),
    "recurrent_gemma": LogitKeys(cap="logits_soft_cap"),
    "xlstm": LogitKeys(cap="output_logit_soft_cap"),
}
# Known types whose logits are another function of the LM head's product.
OTHER_LOGITS = ("inkling_text", "modernbert-decoder")
# Of unknown types: all keys, of which a class may read some.
FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def is_known(config: PreTrainedConfig) -> bool:
    """Return True if this file's tables cover a text config: transformers' own class, of a tested `model_type`."""
    return config.model_type in KNOWN and type(config).__module__.startswith("transformers.")


def logit_shape(target: PreTrainedModel) -> LogitShape:
    """Return the function from the LM head's product to the target's logits, by its config.

    Raises:
        UserError: The logits of this `model_type` are another function of the product.
    """
    config = target.config.get_text_config()
    if not is_known(config):
        factor, divisor = (math.prod(_number(config, key) or 1.0 for key in keys) for keys in (FACTORS, DIVISORS))
        return LogitShape(factor / divisor, next((cap for key in CAPS if (cap := _number(config, key))), None))
    if config.model_type in OTHER_LOGITS:
        raise other_logits(target)
    return LOGITS[config.model_type].read(config) if config.model_type in LOGITS else PLAIN


def other_logits(target: PreTrainedModel, difference: str = "") -> UserError:
    """Return the error for a target whose logits are no scaled or capped product; `difference` goes into its text."""
    return UserError(
        f"the logits of {type(target).__name__} are not its LM head's, scaled or capped by the keys of its config that "
        f"are known{difference}, so that drafters would learn another distribution: use another target"
    )


def _number(config: Any, key: str | None) -> float | None:
    value = None if key is None else getattr(config, key, None)
    return float(value) if isinstance(value, int | float) else None
