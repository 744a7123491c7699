"""The section `data.conversations` of a recipe: sources and their columns."""

import re
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.recipes.section import Section


class ColumnsRecipe(Section):
    """Names of a record's columns. By default the usual names are tried; if two of them differ, that is an error."""

    messages: str | None = Field(
        None,
        description="column with the list of turns, or its JSON text; by default messages, conversations or "
        "conversation",
    )
    prompt: str | Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="column with the user's text, or a list of user turns; several columns are joined in order, as "
        "`[instruction, input]`; by default prompt, question or turns",
    )
    answer: str | None = Field(
        None,
        description="column with the answer, which may be absent or empty; by default response, answer or completion",
    )
    system: str | None = Field(None, description="column with the system prompt; by default system_prompt or system")


class SourceRecipe(Section):
    """One source of conversations."""

    source: str = Field(
        "stdlib",
        description="conversations: a local .json/.jsonl/.csv(.gz/.xz/.zst)/.parquet file, a Hub dataset id, a run's "
        "`data` folder with distilled conversations, or `stdlib`, which ships with draftsmith",
    )
    name: str | None = Field(
        None, description="name of the source in counts and the data card; by default the file's or the dataset's"
    )
    hub_split: str = Field("train", description="split of a Hub dataset")
    hub_config: str | None = Field(None, description="configuration of a Hub dataset that has several")
    file: str | None = Field(None, description="read only this file of a Hub dataset's repository")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub dataset")
    columns: ColumnsRecipe = ColumnsRecipe()
    limit: int | None = Field(None, ge=1, description="use only the first n usable conversations; by default all")

    @property
    def label(self) -> str:
        """Return the source's name in counts: `name`, else the folder's or file's name without suffixes, or the id."""
        if self.name is not None:
            return self.name
        if Path(self.source).is_dir():
            return Path(self.source).name
        without_suffixes = re.sub(r"(\.(jsonl?|ndjson|parquet|csv|tsv|gz|xz|zst))+$", "", self.source)
        return self.source if without_suffixes == self.source else PurePath(without_suffixes).name


class MixedSourceRecipe(SourceRecipe):
    """One source of a mixture of conversations, an entry of `data.conversations.mixture`."""

    source: str = Field(description="one source of the mixture, in the form of `data.conversations.source`")
    weight: float = Field(
        1.0,
        gt=0,
        description="share of the conversations that come from this source, relative to the other sources' weights",
    )


class ConversationsRecipe(SourceRecipe):
    """Sources of the prompts: one source, or a mixture of several.

    The `weight` of a mixture's source is its share of the conversations until a source is exhausted; the others then
    continue in proportion to their weights. If `limit` is reached before that, all conversations have these shares.
    """

    mixture: list[MixedSourceRecipe] = Field([], description="several sources to mix, in place of the one `source`")
    skip_invalid: bool = Field(
        False, description="skip malformed conversations and count them; by default the first one is an error"
    )
    split: Literal["train", "heldout", "all"] = Field(
        "train",
        description="`train`: the conversations that are not held out; `heldout`: only the held-out ones; `all`: both",
    )
    heldout_frac: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the conversations to hold out, chosen by a hash of their ids; `stdlib` has a "
        "fixed split instead, by Python module",
    )
    decontaminate: list[str] | None = Field(
        None,
        description="question files; conversations that contain one of their questions are left out. By default "
        "the file of `eval.questions`; [] for none",
    )

    @field_validator("split", mode="before")
    @classmethod
    def _check_split(cls, value: Any) -> Any:
        if value not in ("train", "heldout", "all"):
            raise ValueError("must be train, heldout or all (a Hub dataset's own split is `hub_split`)")
        return value

    @model_validator(mode="after")
    def _check_sources(self) -> "ConversationsRecipe":
        if self.mixture:
            alone = SourceRecipe(limit=self.limit)
            for key in SourceRecipe.model_fields:
                if getattr(self, key) != getattr(alone, key):
                    raise ValueError(f"`{key}` belongs to the entries of `mixture`: move it there")
        labels = [source.label for source in self.sources]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"`mixture` has two sources with the name {twice}: set another `name` for one")
        if self.split == "heldout" and not self.heldout_frac and any(s.source != "stdlib" for s in self.sources):
            raise ValueError("`split: heldout` needs a `heldout_frac` above 0")
        return self

    @property
    def sources(self) -> list[MixedSourceRecipe]:
        """Return the sources of the mixture, or the single source without its `limit`, which applies to the total."""
        if self.mixture:
            return self.mixture
        values = {key: getattr(self, key) for key in SourceRecipe.model_fields if key != "limit"}
        return [MixedSourceRecipe(**values)]
