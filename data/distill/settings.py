"""What distilled answers depend on, written beside them: one folder never mixes two targets or two samplings."""

import hashlib
import json
from pathlib import Path
from typing import Any

from draftsmith.data.sources.mixture import question_sources
from draftsmith.data.sources.questions import questions_file
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import sha256_of, write_atomically
from draftsmith.recipes.schema import Recipe


def check_settings(recipe: Recipe, weights: str | None, tokenizer: Any, folder: Path) -> None:
    """Write the settings, or compare them with those that the folder was begun with.

    Raises:
        UserError: A setting differs; the sentence names the first such key.
    """
    settings = _settings(recipe, weights, tokenizer)
    file = folder / "distill_settings.json"
    if file.exists():
        try:
            recorded = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            raise UserError(f"{file} is damaged: delete the folder {folder} to distil again") from None
        for key, value in settings.items():
            before = recorded.get(key)
            # A smaller length means that more is cut later; a larger one would need answers that were not generated.
            compatible = value <= before if key == "data.max_length_tokens" and before is not None else value == before
            if not compatible:
                raise UserError(
                    f"{folder} was distilled with {key} = {before!r}, the recipe now has {value!r}: "
                    "give the recipe another name, restore the key, or delete that folder to distil again"
                )
    write_atomically(file, json.dumps(settings, indent=2) + "\n")


def _settings(recipe: Recipe, weights: str | None, tokenizer: Any) -> dict[str, Any]:
    settings = recipe.data.distill
    values: dict[str, Any] = {
        **_selection(recipe),
        "data.distill.engine": settings.engine,
    }
    if settings.engine == "none":
        return values
    return values | {
        "target.model": recipe.target.model,
        "target.revision": recipe.target.revision,
        "target.dtype": recipe.target.dtype,
        "the target's weights (hash)": weights,
        "the target's chat template (hash)": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "data.distill.temperature": settings.temperature,
        "data.distill.top_k": settings.top_k,
        "data.distill.top_p": settings.top_p,
        "data.distill.max_new_tokens": settings.max_new_tokens,
        "data.max_length_tokens": recipe.data.max_length_tokens,
        "seed": recipe.seed,
    }


def _selection(recipe: Recipe) -> dict[str, Any]:
    """Which conversations are taken. Limits are no part of it: more may be added, as may lines to a file."""
    conversations = recipe.data.conversations
    values = conversations.model_dump(exclude={"limit", "skip_invalid", "name", "mixture", "decontaminate"})
    values["mixture"] = [source.model_dump(exclude={"limit", "name"}) for source in conversations.mixture]
    # Wherever the files lie: other questions would leave conversations in the folder that repeat them.
    values["decontaminate (hashes of the question files)"] = sorted(
        sha256_of(questions_file(source))[:16] for source in question_sources(recipe)
    )
    return {f"data.conversations.{key}": value for key, value in values.items()}
