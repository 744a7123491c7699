"""What distilled answers depend on: one folder never mixes two targets or two samplings."""

import hashlib
from typing import Any

from draftsmith.data.sources.mixture import question_sources
from draftsmith.data.sources.questions import questions_file
from draftsmith.recipes.run_folder import sha256_of
from draftsmith.recipes.schema import Recipe


def distill_settings(recipe: Recipe, weights: str | None, tokenizer: Any) -> dict[str, Any]:
    """By recipe key.

    Args:
        weights: A hash of the target's.
        tokenizer: The target's.
    """
    settings, conversations = recipe.data.distill, recipe.data.conversations
    # Limits are no part of it: more may be added, as may lines to a file.
    chosen = conversations.model_dump(exclude={"limit", "skip_invalid", "name", "mixture", "decontaminate"})
    chosen["mixture"] = [source.model_dump(exclude={"limit", "name"}) for source in conversations.mixture]
    # Wherever the files lie: other questions would leave conversations in the folder that repeat them.
    chosen["decontaminate (hashes of the question files)"] = sorted(
        sha256_of(questions_file(source))[:16] for source in question_sources(recipe)
    )
    values = {f"data.conversations.{key}": value for key, value in chosen.items()}
    values["data.distill.engine"] = settings.engine
    if settings.engine == "none":
        return values
    if settings.cut_answers != "drop":  # as it always was before there was a choice
        values["data.distill.cut_answers"] = settings.cut_answers
    return values | {
        "target.model": recipe.target.model,
        "target.revision": recipe.target.revision,
        "target.gguf_file": recipe.target.gguf_file,
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
