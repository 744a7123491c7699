"""Loading of the target model p, frozen, with its tokenizer and configs."""

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from draftsmith.errors import UserError, did_you_mean, reason
from draftsmith.models.kernels.attention import use_own_attention
from draftsmith.models.target.text_model import (
    auto_class,
    choose_attention,
    is_bidirectional,
    name_base_model,
    text_alone,
    text_config,
    use_configured_time_steps,
    use_exact_attention,
)
from draftsmith.models.target.view import target_value
from draftsmith.models.target.windows import get_max_positions, takes_masks, tokens_within_windows
from draftsmith.models.weights import load_weights, read_pretrained, sampled_hash
from draftsmith.recipes.schema import TargetRecipe

# Variables that transformers, SGLang and vLLM pass to a chat template themselves.
BUILTIN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
TODAY = re.compile(r"""\bstrftime_now\(\s*(['"])((?:(?!\1).)*)\1\s*\)""")  # transformers' function, with a format
USE_OF_TODAY = re.compile(r"\bstrftime_now\b(?!\s*is\b)")
DIRECTIVES = ("-d", "-m", "-I", "-H", *"aAbBcdDeFhHIjmMpSTuUVwWxXyY")  # of strftime
GENERATION_MARK = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own
# Tensors next to a quantised weight, as FP8's `weight_scale` and GPTQ's `qweight` and `scales`.
OF_QUANTISED = re.compile(r"\.(qweight|scales|(weight|input)\w*(scale|packed)\w*|weight\.absmax)$")
NVIDIA = Path("/proc/driver/nvidia/version")  # exists if the driver is loaded
LONGEST_CHAT_TOKENS = 4096  # of a chat with its next answer, unless the target holds fewer
ADAPTER_FILE = "adapter_config.json"  # peft's
NO_CONFIG = "Unrecognized model"  # of transformers, for a repository without config.json
EMBEDDED_TARGET = Path(__file__).resolve().parents[1] / "embedded_target"


def load_target(recipe: TargetRecipe | str, **values: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the target in eval mode with frozen weights, on its device, and its tokenizer.

    Args:
        recipe: The section `target` of a recipe, or a Hub id or folder.
        values: Further keys of that section for a Hub id or folder, as `dtype="bfloat16"` or `dtype=torch.bfloat16`.

    Raises:
        UserError: The model cannot be found or read, is not decoder-only, or its tokenizer has no chat template.
        pydantic.ValidationError: A key or value is wrong.
    """
    if isinstance(recipe, str):
        named = {key: str(value).removeprefix("torch.") if key == "dtype" else value for key, value in values.items()}
        recipe = TargetRecipe(model=recipe, **named)
    location, where = target_location(recipe), _where(recipe)
    config = load_target_config(recipe)
    load_generation_config(recipe)
    tokenizer = load_tokenizer(recipe)
    options = {
        "dtype": "auto" if recipe.dtype == "auto" else getattr(torch, recipe.dtype),
        "attn_implementation": choose_attention(config, recipe.attn_implementation),
    }
    if recipe.quantization is not None:
        from draftsmith.models.target.quantized import quantization_options

        options |= quantization_options(recipe)
    device = target_device(recipe)
    if device.type != "cpu" or recipe.quantization is not None:
        options["device_map"] = {"": device}  # load tensor by tensor: the host never holds the whole model
    target = load_weights("target.model", location, auto_class(config), **options, **where)
    target = _frozen(recipe, text_alone(target, recipe.model)).to(device)
    use_own_attention(target)
    return target, tokenizer


def load_ends(recipe: TargetRecipe) -> PreTrainedModel:
    """Load the target without decoder layers: only embedding, final norm and LM head are read from disk.

    Quantised checkpoints (FP8, AWQ, GPTQ and MXFP4) leave these parts unquantised. The config keeps the full number
    of layers.

    Raises:
        UserError: The model cannot be read or is not decoder-only, or one of these tensors is quantised or missing.
    """
    location, config = target_location(recipe), load_target_config(recipe)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    a_layer = [key for key, value in vars(text).items() if isinstance(value, list) and len(value) == num_layers]
    whole = {key: getattr(text, key) for key in ("num_hidden_layers", *a_layer)}
    for key in whole:
        setattr(text, key, 0 if key == "num_hidden_layers" else [])
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    options = {"dtype": "auto" if recipe.dtype == "auto" else getattr(torch, recipe.dtype), "config": config}

    def read() -> tuple[PreTrainedModel, dict[str, Any]]:
        shown = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # it would list the layers that are left out
        try:
            return auto_class(config).from_pretrained(location, output_loading_info=True, **options, **_where(recipe))
        finally:
            transformers_logging.set_verbosity(shown)

    target, loaded = _read(location, read)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    quantised = {
        f"{name}.weight"
        for name, module in target.named_modules()
        for key in loaded["unexpected_keys"]
        if module in (embedding, head) and key.startswith(f"{name}.") and OF_QUANTISED.search(key)
    }
    if missing := sorted({*loaded["missing_keys"], *map(str, loaded["mismatched_keys"]), *quantised}):
        raise UserError(
            f"target.model {recipe.model} has no unquantised {', '.join(missing)}, which training on features from a "
            "server reads: name the unquantised checkpoint of the same model"
        )
    target = text_alone(target, recipe.model)
    for key, value in whole.items():
        setattr(target.config.get_text_config(), key, value)
    return _frozen(recipe, target)


def load_tokenizer(recipe: TargetRecipe) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises:
        UserError: The tokenizer cannot be found or read, or its chat template is missing, or does
            not read `chat_template_kwargs`.
    """
    location = target_location(recipe)
    tokenizer = _read(location, lambda: AutoTokenizer.from_pretrained(location, **_where(recipe)))
    _read(location, lambda: tokenizer("Hello"))  # a damaged one may load and then fail
    if recipe.chat_template is not None:
        tokenizer.chat_template = recipe.chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of target.model {recipe.model} has no chat template: set target.chat_template to its Jinja "
            "text, or use the chat-tuned version of the model"
        )
    if recipe.chat_template_kwargs:
        tokenizer.chat_template = with_variables(tokenizer.chat_template, recipe.chat_template_kwargs)
    freeze_date(tokenizer, date.fromisoformat(recipe.template_date) if recipe.template_date else date.today())
    return tokenizer


def freeze_date(tokenizer: Any, day: date) -> None:
    """Put a fixed date into chat templates that write today's, so that a prompt is the same on every day.

    The tokenizer gets `template_date`, the date or None if its templates write none, and `undated_chat_template`.
    """
    undated = tokenizer.chat_template
    # Where the format is computed, it gets a function of the same name, which replaces each directive.
    values = "".join(f" | replace('%{each}', {day.strftime('%' + each)!r})" for each in DIRECTIVES)
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{values} }}}}{{% endmacro %}}{{{{ '' }}}}"

    def frozen(text: str) -> str:
        literal = TODAY.sub(lambda call: repr(day.strftime(call[2])), text)
        return macro + literal if USE_OF_TODAY.search(literal) else literal

    tokenizer.chat_template = _each_template(undated, frozen)
    tokenizer.undated_chat_template = undated
    tokenizer.template_date = day if tokenizer.chat_template != undated else None


def _each_template(templates: str | dict[str, str], change: Callable[[str], str]) -> Any:
    """Apply `change` to a chat template, or to each of several named ones."""
    if isinstance(templates, str):
        return change(templates)
    return {name: change(template) for name, template in templates.items()}


def template_variables(template: str) -> set[str]:
    """Return the variables that a chat template reads and does not set; empty if it is not valid Jinja."""
    try:
        without_marks = GENERATION_MARK.sub("", template)
        return find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_marks))
    except TemplateSyntaxError:
        return set()


def with_variables(template: str | dict[str, str], values: dict[str, Any]) -> Any:
    """Set variables at the start of a chat template, or of each of several named ones, for every renderer.

    Raises:
        UserError: No template reads such a variable.
    """
    texts = [template] if isinstance(template, str) else template.values()
    known = set[str]().union(*map(template_variables, texts))
    for name in values:
        if name not in known:
            switches = known - BUILTIN_VARIABLES
            raise UserError(
                f"key `target.chat_template_kwargs`: the target's chat template reads no variable {name}: "
                f"{did_you_mean(name, sorted(switches), 'leave it out')}"
            )
    # Jinja reads JSON values as Python writes them. A template's own first line break would be taken for the one
    # after a block.
    settings = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in values.items())
    return _each_template(template, lambda text: settings + text)


def load_generation_config(recipe: TargetRecipe) -> GenerationConfig:
    """Load the target's generation config, or build it from the target's config.

    Raises:
        UserError: The generation config is damaged; transformers would ignore it and its end tokens. Or an end token
            is none of the target's tokens.
    """
    location, config, file = target_location(recipe), load_target_config(recipe), "generation_config.json"
    try:
        if (Path(location) / file).is_file():
            found = _read(location, lambda: GenerationConfig.from_pretrained(location))
        else:
            found = GenerationConfig.from_pretrained(location, revision=recipe.revision)
    except OSError:
        found, file = GenerationConfig.from_model_config(config), "config.json"
    ends, vocabulary = found.eos_token_id, target_value(config, "vocab_size")
    for end in ends if isinstance(ends, list) else [ends]:
        if ends is not None and (type(end) is not int or not 0 <= end < vocabulary):
            raise UserError(
                f"target.model {recipe.model}: {file}: `eos_token_id` is {ends!r}, and the target's tokens are whole "
                f"numbers from 0 to {vocabulary - 1}: correct it"
            )
    return found


def weights_hash(recipe: TargetRecipe) -> str | None:
    """Return a hash of the weights files in the target's folder, or the commit on the Hub; load no weights."""
    folder = Path(target_location(recipe))
    if not folder.is_dir():
        load_target_config(recipe)
        return _hub_commit(str(folder), recipe.revision)
    return sampled_hash([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def load_target_config(recipe: TargetRecipe) -> PreTrainedConfig:
    """Load the target's config.

    Raises:
        UserError: The config cannot be found or read, or is not that of a decoder-only model.
    """
    location, where = target_location(recipe), _where(recipe)

    def read() -> PreTrainedConfig:
        if Path(location).is_dir():
            _check_adapter(recipe, location, None)
        try:
            config = AutoConfig.from_pretrained(location, **where)
        except ValueError as error:
            if NO_CONFIG in str(error):
                _check_adapter(recipe, location, recipe.revision)
            raise
        # An adapter may bring its base's config. The Hub is not asked again about a commit.
        if not Path(location).is_dir() and (commit := _hub_commit(location, recipe.revision)) is not None:
            _check_adapter(recipe, location, commit)
        return config

    config = _read(location, read)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"target.model {recipe.model} is an encoder-decoder ({config.model_type}); speculative decoding here needs "
            "a decoder-only causal language model such as Llama or Qwen"
        )
    if is_bidirectional(config):
        raise UserError(
            f"target.model {recipe.model} is an encoder ({config.model_type}, is_decoder: false), whose tokens also "
            "attend to later ones; speculative decoding here needs a causal language model such as Llama or Qwen"
        )
    return config


def _hub_commit(location: str, revision: str | None) -> str | None:
    """Return the commit of a Hub repository whose config was read before: its folder in the cache has that name."""
    file = try_to_load_from_cache(location, "config.json", revision=revision)
    return Path(file).parent.name if isinstance(file, str) else None


def _check_adapter(recipe: TargetRecipe, location: str, revision: str | None) -> None:
    """Check that a folder or a repository of the Hub is no LoRA adapter, which is a part of a model only.

    Raises:
        UserError: It is one.
    """
    causes = ("gated_repo", "missing_entries", "connection_errors")
    quietly = {f"_raise_exceptions_for_{cause}": False for cause in causes}
    if (file := cached_file(location, ADAPTER_FILE, revision=revision, **quietly)) is None:
        return
    base = None
    with suppress(OSError, ValueError, AttributeError):
        base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise UserError(
        f"target.model {recipe.model} is a LoRA adapter of {base or 'another model'} ({ADAPTER_FILE}), not a whole "
        "model: merge the two with peft's `merge_and_unload()`, save model and tokenizer into a folder, and name that "
        "folder (docs/guides/train.md has the code)"
    )


def target_without_weights(recipe: TargetRecipe) -> PreTrainedModel:
    """Build the target from its config on torch's default device, which may be `torch.device("meta")`."""
    whole = load_target_config(recipe)
    config = text_config(whole, recipe.model)
    dtype = (config.dtype or whole.dtype or torch.float32) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    target = _read(
        recipe.model,
        lambda: AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=choose_attention(config, recipe.attn_implementation),
            trust_remote_code=recipe.trust_remote_code,
        ),
    )
    return _frozen(recipe, target)


def _where(recipe: TargetRecipe) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the recipe's revision and remote code."""
    return {"revision": recipe.revision, "trust_remote_code": recipe.trust_remote_code}


def _frozen(recipe: TargetRecipe, target: PreTrainedModel) -> PreTrainedModel:
    """Check that the target has an LM head, and freeze it in eval mode."""
    name_base_model(target)
    if target.get_output_embeddings() is None or target.base_model is target:
        raise UserError(
            f"target.model {recipe.model} ({target.config.model_type}) has no LM head: use a causal language model"
        )
    use_exact_attention(target)
    use_configured_time_steps(target)
    return target.eval().requires_grad_(False)


def target_location(recipe: TargetRecipe) -> str:
    """Return the local folder or Hub id of `target.model`.

    Raises:
        UserError: `target.model` looks like a path and is no folder, or the embedded target is missing.
    """
    if recipe.model == "embedded":
        if not (EMBEDDED_TARGET / "config.json").is_file():
            raise UserError(
                f"target.model=embedded is the small target that ships with draftsmith, but {EMBEDDED_TARGET} holds no "
                "checkpoint: install draftsmith again, or train one by `make target` (hours)"
            )
        return str(EMBEDDED_TARGET)
    is_path = recipe.model.startswith((".", "/", "~")) or recipe.model.count("/") > 1
    if is_path and not Path(recipe.model).is_dir():
        raise UserError(f"target.model {recipe.model} is not a folder: give a model folder, a Hub id, or `embedded`")
    if recipe.gguf_file is not None:
        from draftsmith.models.target.gguf_file import converted_folder

        return str(converted_folder(recipe))
    folder = Path(recipe.model)
    return str(folder) if folder.is_dir() else recipe.model


def target_device(recipe: TargetRecipe) -> torch.device:
    """Return the recipe's device; default: CUDA if available, else CPU.

    Raises:
        UserError: The device cannot be used, or none is given and torch cannot use this machine's GPU.
    """
    if recipe.device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and NVIDIA.is_file():  # not hidden on purpose
            driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", NVIDIA.read_text(encoding="utf-8", errors="replace"))
            built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
            raise UserError(
                f"this machine has an NVIDIA GPU (driver {driver[0] if driver else 'unknown'}) that torch "
                f"{torch.__version__} cannot use, which {built}: install the build of torch for this driver, or set "
                "target.device=cpu"
            )
        return torch.device("cpu")
    try:
        device = torch.device(recipe.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"target.device {recipe.device} cannot be used here ({reason(error)}): try cpu") from None
    return device


def device_sentence(device: torch.device) -> str:
    """Describe a device, with the versions of torch and CUDA."""
    if device.type != "cuda":
        return f"{device}, torch {torch.__version__}"
    return f"{device}, {torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def longest_sequence_tokens(target: Any) -> int | None:
    """Return the longest sequence that the target can decode, in tokens; None if there is no limit.

    The limit is the number of positions, or the smallest window if the target does not accept our masks.
    """
    return get_max_positions(target) if takes_masks(target) else tokens_within_windows(target)


def session_tokens(target: Any, most: int = LONGEST_CHAT_TOKENS) -> int:
    """Return the most tokens of a prompt with its answer: `most`, or the target's limit if that is lower."""
    return min(most, longest_sequence_tokens(target) or most)


def _read(location: str, load: Any) -> Any:
    return read_pretrained("target.model", location, load)
