"""Settings that a folder's answers depend on, in `distill_settings.json`; a folder never mixes two of them."""

import hashlib
from pathlib import Path
from typing import Any

from draftsmith.data.distill.ledger import SHARDS, UNFINISHED
from draftsmith.data.engines.engine import answer_options
from draftsmith.data.sources.distilled import undated_template
from draftsmith.data.sources.mixture import question_sources
from draftsmith.data.sources.question_sets import questions_file
from draftsmith.files import file_sha256
from draftsmith.recipes.run_folder import TEMPLATE_DATE, check_settings, recorded_date, target_settings, write_settings
from draftsmith.recipes.schema import DataRecipe, Recipe


def has_answers(data: Path) -> bool:
    """Return whether a run's data folder holds an answer or a whole conversation; failures alone are neither."""
    if any(file.stat().st_size for file in (data / SHARDS).glob("*.jsonl")):
        return True
    for file in (data / UNFINISHED).glob("*.jsonl"):
        with file.open("rb") as stream:
            if any(b'"answer": ' in line for line in stream):
                return True
    return False


class FolderSettings:
    """Settings that a folder's answers depend on, fixed by the first answer that is stored (`are_fixed`).

    A call that stores no answer changes nothing, so that one that is refused later leaves the folder as it was.
    """

    def __init__(self, data: Path, values: dict[str, Any]) -> None:
        self._data, self._file, self._values = data, data / "distill_settings.json", values
        self.are_fixed = self._are_written = False

    def check(self) -> None:
        """Compare with the settings of the stored answers.

        A smaller length shortens more conversations later; a larger one would need answers that were not generated.

        Raises:
            UserError: The settings differ.
        """
        if has_answers(self._data):
            if TEMPLATE_DATE in self._values and recorded_date(self._data) is None:  # answered before dates were kept
                del self._values[TEMPLATE_DATE]
            check_settings(self._file, self._values, "distil again", may_decrease=["data.max_length_tokens"])
            self.are_fixed = True

    def fix(self) -> None:
        """Write the settings, before this process stores its first answers.

        Raises:
            UserError: Another process has meanwhile stored answers with other settings.
        """
        if not self._are_written:
            self.check()
            write_settings(self._file, self._values)
            self.are_fixed = self._are_written = True


def distill_settings(recipe: Recipe, weights: str | None, tokenizer: Any) -> dict[str, Any]:
    """Return the settings that the answers depend on, by recipe key; a folder never mixes two of them.

    Args:
        weights: Hash of the weights of the model that answers.
        tokenizer: The target's tokenizer.
    """
    settings, conversations = recipe.data.distill, recipe.data.conversations
    # Limits are left out: conversations may be added later, as may lines of a file.
    chosen = conversations.model_dump(exclude={"limit", "skip_invalid", "name", "mixture", "decontaminate"})
    chosen["mixture"] = [source.model_dump(exclude={"limit", "name"}) for source in conversations.mixture]
    # Hashes of the files' content: with other questions, other conversations would be left out.
    chosen["decontaminate (hashes of the question files)"] = sorted(
        file_sha256(questions_file(source))[:16] for source in question_sources(recipe)
    )
    values = {f"data.conversations.{key}": value for key, value in chosen.items()}
    if settings.engine == "none":
        return values | {"data.distill.engine": settings.engine}
    if recipe.data.reasoning_tokens != DataRecipe().reasoning_tokens:  # folders of earlier versions lack the key
        values["data.reasoning_tokens"] = recipe.data.reasoning_tokens
    return {
        **values,
        **{f"data.distill.{key}": value for key, value in settings.model_dump(exclude={"options", "features"}).items()},
        **answer_options(recipe),
        **target_settings(recipe),
        "the target's weights (hash)": weights,
        "the target's chat template (hash)": hashlib.sha256(undated_template(tokenizer).encode()).hexdigest()[:16],
        **({TEMPLATE_DATE: str(day)} if (day := getattr(tokenizer, "template_date", None)) else {}),
        "data.max_length_tokens": recipe.data.max_length_tokens,
        "seed": recipe.seed,
    }
