"""Targets from GGUF files: converted once into a folder of safetensors, which all processes and vLLM load.

transformers dequantizes the architectures and quantizations that it supports (`gguf_file=`). The folder is in
draftsmith's cache, is named after a hash of the file and the dtype, and gets this name once it is complete. If it was
truncated or changed since, or other users can write to it, the file is converted again.
"""

import logging
import stat
import struct
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_gguf_available

from draftsmith.errors import UserError
from draftsmith.files import cache_root, is_own, written_whole
from draftsmith.models.weights import read_pretrained, sampled_hash
from draftsmith.recipes.schema import TargetRecipe

SUM_FILE = "converted.sha256"  # of samples of the folder's other files, and of their sizes

logger = logging.getLogger(__name__)


def converted_folder(recipe: TargetRecipe) -> Path:
    """Return the folder of the converted `target.gguf_file`; convert it the first time.

    `dtype: auto` stands for fp32, which represents every dequantized weight exactly.

    Raises:
        UserError: The file or the package gguf is missing, or transformers does not support the architecture.
    """
    file = get_gguf_file(recipe)
    dtype = "float32" if recipe.dtype == "auto" else recipe.dtype
    folder = cache_root() / "gguf" / f"{file.stem}-{sampled_hash([file])}-{dtype}"
    if _is_usable(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not _is_usable(folder):
            _convert(recipe, file, folder, getattr(torch, dtype))
    return folder


def _is_usable(folder: Path) -> bool:
    """Return True if a converted folder is whole, and nobody else can have written it."""
    sum_file = folder / SUM_FILE
    if not sum_file.is_file() or not all(is_own(path) for path in (folder, *folder.iterdir())):
        return False
    return sum_file.read_text(encoding="utf-8") == sampled_hash(set(folder.iterdir()) - {sum_file})


def get_gguf_file(recipe: TargetRecipe) -> Path:
    """Return the GGUF file in the folder `target.model`, or download it if that is a Hub repository."""
    assert recipe.gguf_file is not None
    folder = Path(recipe.model)
    if folder.is_dir():
        file = folder / recipe.gguf_file
        if not file.is_file():
            files = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
            raise UserError(f"target.gguf_file {recipe.gguf_file} is not in {folder}: GGUF files there are {files}")
        return file
    return Path(
        read_pretrained(
            "target.gguf_file",
            f"{recipe.model}/{recipe.gguf_file}",
            lambda: hf_hub_download(recipe.model, recipe.gguf_file, revision=recipe.revision),
        )
    )


def _convert(recipe: TargetRecipe, file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Dequantize a GGUF file's model and store it, with its tokenizer, as a Hugging Face folder."""
    if not is_gguf_available():
        raise UserError(f"target.gguf_file {file.name} needs the package gguf: pip install -e '.[gguf]' in a checkout")

    def read(model_class: Any, **options: Any) -> Any:
        try:
            return model_class.from_pretrained(file.parent, gguf_file=file.name, **options)
        except (struct.error, IndexError, KeyError, TypeError) as error:  # raised by its parser for a damaged file
            raise ValueError(f"{type(error).__name__}: {error}") from None

    logger.warning("converting %s, once; half a GB takes a minute", file.name)
    what, location = "target.gguf_file", str(file)
    tokenizer = read_pretrained(what, location, lambda: read(AutoTokenizer))
    # From 5.19 on transformers keeps the weights packed where it has kernels for them, and warns where it has none.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpacked = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    model = read_pretrained(what, location, lambda: read(AutoModelForCausalLM, dtype=dtype, **unpacked))
    # A new model of the same architecture, as one that is marked as quantized cannot be saved.
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    config.dtype = dtype
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    with written_whole(folder) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / SUM_FILE).write_text(sampled_hash(partial.iterdir()), encoding="utf-8")
        for path in (partial, *partial.iterdir()):
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
