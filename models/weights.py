"""Loading of checkpoints, whose tensors must be exactly those of the architecture; hashes of weights."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from draftsmith.errors import UserError, reason
from draftsmith.files import file_sha256

USUAL_WAY_OUT = "give a folder with a transformers checkpoint, or a Hub id that this machine can reach"
# Advice by pattern of the error message; the first match counts.
WAYS_OUT = (
    (
        "trust_remote_code",
        "it brings its own code: read that, and set target.trust_remote_code=true if you trust it",
    ),
    ("scaled_dot_product_attention|does not support .*sdpa", "set target.attn_implementation=eager"),
    ("Permission denied|Read-only file system", "set the environment variable HF_HOME to a folder that can be written"),
    ("Unrecognized configuration class", "it is no language model that answers in text: use a causal language model"),
    (
        "does not recognize this architecture|Unrecognized model",
        "use a version of transformers that knows this model_type, or target.trust_remote_code=true if it brings its "
        "own code",
    ),
    (r"pip install|requires the following packages|No module named", "install the package that is named here"),
)
# Messages of torch's allocators that raise a plain RuntimeError.
OF_THE_CPU = ("can't allocate memory", "not enough memory")
MOST_NAMES = 4  # of tensors, in one sentence
# Bytes to sample from a weights file: a retrained model differs everywhere.
HASHED_PARTS, HASHED_BYTES = 64, 1 << 16


def read_pretrained(what: str, location: str, load: Any) -> Any:
    """Call `load`, a `from_pretrained` without arguments; raise its failures as UserErrors of one sentence.

    Args:
        what: Name of the loaded model in messages, such as a key of the recipe.
    """
    try:
        return load()
    except UserError:
        raise
    except Exception as error:  # of any type: it depends on how the damage shows in transformers and tokenizers
        if is_out_of_memory(error):
            raise UserError(
                f"{what} {location} does not fit into memory ({reason(error)}): for a target set "
                "target.dtype=bfloat16, or serve it by vLLM and train with "
                "data.features.source=server; or use a device with more memory"
            ) from None
        of_the_target = WAYS_OUT if what.startswith("target.") else ()  # the advice names keys of the target
        fitting = (way_out for pattern, way_out in of_the_target if re.search(pattern, str(error)))
        way_out = next(fitting, USUAL_WAY_OUT)
        raise UserError(f"{what} {location} cannot be loaded ({reason(error)}): {way_out}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OF_THE_CPU)


def load_weights(what: str, location: str, model_class: Any, **options: Any) -> Any:
    """Call `model_class.from_pretrained(location, **options)`; require every tensor of the model, and no other.

    Raises:
        UserError: A tensor is missing, not of this architecture or of another shape; the message names it.
    """
    model, info = read_pretrained(
        what,
        location,
        lambda: model_class.from_pretrained(
            location, output_loading_info=True, ignore_mismatched_sizes=True, **options
        ),
    )
    mismatched = [str(entry[0]) for entry in info["mismatched_keys"]]
    differences = describe_differences(
        info["missing_keys"], info["unexpected_keys"], mismatched, "not of this architecture"
    )
    if differences:
        raise UserError(
            f"{what} {location} does not have the weights that its config.json requires ({differences}): missing "
            "weights would be random; restore the folder's files, or create them again"
        )
    return model


def describe_differences(
    missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[str], not_in: str
) -> str:
    """Describe missing tensors, superfluous ones (as `not_in` says) and those of another shape, in words."""
    wrong = {"missing": sorted(missing), not_in: sorted(unexpected), "of another shape": sorted(mismatched)}
    return "; ".join(f"{some_of(names)} {kind}" for kind, names in wrong.items() if names)


def weights_sha256(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each weights file in a folder, by file name."""
    return {file.name: file_sha256(file) for file in sorted(folder.glob("*.safetensors"))}


def sampled_hash(files: Iterable[Path]) -> str:
    """Hash the sizes of files and samples of their bytes, which is fast; other weights change the hash."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as stream:
            for part in range(HASHED_PARTS):
                stream.seek(file.stat().st_size * part // HASHED_PARTS)
                digest.update(stream.read(HASHED_BYTES))
    return digest.hexdigest()[:16]


def some_of(names: list[str]) -> str:
    """Join the first few names, and say how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
