"""The model card of a trained drafter: `drafter/README.md`, which goes to the Hub with the folder.

It is written when training ends, and again with figures by `eval` and `report` and with the proof by `prove`; `push`
writes it into the uploaded folder, with links to the other files there. A card that a user wrote by hand, or from which
the user deleted the marked line, is not changed.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml

from draftsmith.data.sources.files import JSON_SUFFIXES, TABLE_SUFFIXES
from draftsmith.errors import masked
from draftsmith.files import write_atomically
from draftsmith.hub import hub_id
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder, as_distilled
from draftsmith.recipes.schema import Recipe
from draftsmith.results import portable
from draftsmith.train.drafter.report import TrainReport
from draftsmith.train.drafter.start import start_sentence

CARD_FILE = "README.md"
MARK = "<!-- Written by draftsmith after train, eval, report and prove. Delete this line to keep your own text. -->"
RECIPE_SECTIONS = ("seed", "target", "data", "drafter", "train")
ARXIV_ID = re.compile(r"\b\d{4}\.\d{5}\b")


@dataclass
class Publication:
    """A folder that is uploaded to the Hub as `repo`: the drafter and its model card.

    base_model: the target's Hub id, if the recipe names a local folder. license: the license's keys and values in the
    Hub's metadata.
    """

    folder: Path
    repo: str
    base_model: str | None = None
    license: dict[str, str] = field(default_factory=dict)


def write_drafter_card(
    recipe: Recipe,
    figures: dict[str, Any] | None = None,
    proof: str | None = None,
    publication: Publication | None = None,
) -> Path | None:
    """Write the model card of the run's drafter; return its file, or None if a user's own card is kept.

    Args:
        figures: `rows` of the summary, one per method and temperature, and the `machine`, the `questions` and the
            `command` of the measurement; None if these weights were not measured.
        proof: Result of `draftsmith prove` for these weights.
        publication: Upload to write the card into; a card that a user wrote by hand is copied into it unchanged.
    """
    recipe, _ = as_distilled(recipe)
    folder = RunFolder(recipe).drafter
    file = folder / CARD_FILE
    by_hand = file.is_file() and MARK not in file.read_text(encoding="utf-8", errors="replace")
    if by_hand and publication is not None:
        shutil.copyfile(file, publication.folder / CARD_FILE)
    if by_hand:
        return None
    named = None if publication is None else publication.base_model
    of_target = {} if named else recipe.target.model_dump(include={"revision", "gguf_file"}, exclude_none=True)
    of_target = {key: json.dumps(value) for key, value in of_target.items()}  # as Python writes it, in double quotes
    if recipe.target.chat_template_kwargs:
        of_target["chat_template_kwargs"] = repr(recipe.target.chat_template_kwargs)
    target = named or _public(recipe.target.model)
    sections = public_recipe(recipe)
    shown = {name: sections[name] for name in RECIPE_SECTIONS if sections[name] != {}}
    training = TrainReport.read(folder) if (folder / TRAINING_FILE).is_file() else None
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(template).render(
        front_matter=yaml.safe_dump(front_matter(recipe, publication), sort_keys=False, allow_unicode=True).strip(),
        mark=MARK,
        recipe=recipe,
        target=target,
        of_target=of_target,
        source=", ".join(_public(source.source) for source in recipe.data.conversations.sources),
        # Without names of other modules.
        what=re.sub(r" \(`[\w./]+\.py`\)", "", _first_paragraph(recipe.drafter.kind)),
        recipe_yaml=yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).strip(),
        training=training,
        start=None if training is None or training.start is None else start_sentence(training.start),
        figures=figures,
        proof=proof,
        publication=publication,
        papers=_papers(recipe.drafter.kind),
    )
    file = file if publication is None else publication.folder / CARD_FILE
    write_atomically(file, text.rstrip() + "\n")
    return file


def front_matter(recipe: Recipe, publication: Publication | None = None) -> dict[str, Any]:
    """Return the card's YAML metadata for the Hub; it names target and conversations only if they are on the Hub."""
    values: dict[str, Any] = {"library_name": "draftsmith", "pipeline_tag": "text-generation"}
    values |= {} if publication is None else publication.license
    if publication is not None and publication.base_model is not None:
        values["base_model"] = publication.base_model
    elif _is_hub_id(recipe.target.model):
        values["base_model"] = recipe.target.model
    datasets = [source.source for source in recipe.data.conversations.sources if _is_hub_id(source.source)]
    if datasets:
        values["datasets"] = datasets
    papers = [f"arxiv:{paper}" for paper in _papers(recipe.drafter.kind)]
    tags = ["speculative-decoding", "draft-model", "drafter", "draftsmith", recipe.drafter.kind.replace("_", "-")]
    values["tags"] = list(dict.fromkeys([*tags, *papers]))
    return values


def _is_hub_id(name: str) -> bool:
    is_file = any(suffix in name for suffix in (*JSON_SUFFIXES, *TABLE_SUFFIXES)) or Path(name).exists()
    return hub_id(name) is not None and not is_file


def _public(name: str) -> str:
    """Return the name of a model or data source without the folders of this machine."""
    return Path(name).name if Path(name).exists() or name.startswith((".", "/", "~")) else name


def _papers(kind: str) -> list[str]:
    """Return the arXiv ids in the first paragraph of the drafter's own file."""
    return list(dict.fromkeys(ARXIV_ID.findall(_first_paragraph(kind))))


def _first_paragraph(kind: str) -> str:
    """Return the first paragraph of the docstring of the drafter's own file."""
    doc = importlib.import_module(f"draftsmith.models.drafters.{kind}").__doc__ or ""
    return " ".join(doc.strip().split("\n\n")[0].split())


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe, with defaults filled in, as a dict without folders, servers and secrets of this machine."""
    sections = recipe.model_dump(exclude_none=True, exclude={"runs_dir"})
    if recipe.drafter.init is not None:
        sections["drafter"]["init"] = _public(recipe.drafter.init)
    sections["target"]["model"] = _public(recipe.target.model)
    conversations = sections["data"]["conversations"]
    for section in (conversations, *conversations["mixture"]):
        section["source"] = _public(section["source"])
    del sections["data"]["distill"]["options"]  # where servers stand is nobody else's business
    sets = list(map(_public, recipe.eval.question_sets))
    sections["eval"]["questions"] = sets[0] if isinstance(recipe.eval.questions, str) else sets
    for method in sections["eval"]["methods"]:
        if "drafter" in method:
            method["drafter"] = _public(method["drafter"])
    return masked(portable(sections))
