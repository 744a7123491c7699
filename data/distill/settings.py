"""Settings that the answers of a data folder depend on, in `distill_settings.json`; all its answers share them."""

import hashlib
from pathlib import Path
from typing import Any

from draftsmith.data.distill.ledger import SHARDS, UNFINISHED
from draftsmith.data.engines.engine import answer_options
from draftsmith.data.sources.distilled import undated_template
from draftsmith.data.sources.mixture import question_sources
from draftsmith.data.sources.question_sets import questions_file
from draftsmith.files import file_sha256, write_json
from draftsmith.recipes.run_folder import TEMPLATE_DATE, check_settings, recorded_date, target_settings
from draftsmith.recipes.schema import DataRecipe, Recipe


def has_answers(data: Path) -> bool:
    """Return whether a run's data folder holds any answer or finished conversation; failures alone do not count."""
    if any(file.stat().st_size for file in (data / SHARDS).glob("*.jsonl")):
        return True
    for file in (data / UNFINISHED).glob("*.jsonl"):
        with file.open("rb") as stream:
            if any(b'"answer": ' in line for line in stream):
                return True
    return False


class FolderSettings:
    """Settings that a data folder's answers depend on. The first stored answer fixes them (`are_fixed`).

    A call of `distill` that stores no answer leaves the folder's settings as they were.
    """

    def __init__(self, data: Path, values: dict[str, Any]) -> None:
        self._data, self._file, self._values = data, data / "distill_settings.json", values
        self.are_fixed = self._are_written = False

    def check(self) -> None:
        """Compare the settings with those of the answers that the folder already holds.

        `data.max_length_tokens` may be smaller now, which cuts more later; a larger one would need further answers.

        Raises:
            UserError: The settings differ.
        """
        if has_answers(self._data):
            if TEMPLATE_DATE in self._values and recorded_date(self._data) is None:  # answered before dates were kept
                del self._values[TEMPLATE_DATE]
            check_settings(self._file, self._values, "distil again", may_decrease=["data.max_length_tokens"])
            self.are_fixed = True

    def fix(self) -> None:
        """Write the settings to the folder, before this process stores its first answers.

        Raises:
            UserError: Another process has meanwhile stored answers with other settings.
        """
        if not self._are_written:
            self.check()
            write_json(self._file, self._values)
            self.are_fixed = self._are_written = True


def distill_settings(recipe: Recipe, weights: str | None, tokenizer: Any) -> dict[str, Any]:
    """Return the settings that the answers depend on, by recipe key; weights and files are given by their hashes.

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
