"""The model card of a trained drafter: `drafter/README.md`, which goes to the Hub with the folder.

Written when training ends, and again with figures by `eval` and `report` and with the proof by `prove`. A card that
somebody wrote by hand, or took over by deleting the marked line, is left alone.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml

from draftsmith.data.sources.json_records import JSON_SUFFIXES
from draftsmith.models.base.registry import TRAINING_FILE
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.report import TrainReport
from draftsmith.train.drafter.start import start_sentence

CARD_FILE = "README.md"
MARK = "<!-- Written by draftsmith after train, eval, report and prove. Delete this line to keep your own text. -->"
RECIPE_SECTIONS = ("seed", "target", "data", "drafter", "train")


def write_drafter_card(recipe: Recipe, figures: dict[str, Any] | None = None, proof: str | None = None) -> Path | None:
    """Write the card of the run's own drafter. Returns its file, or None if the card is not ours to write.

    Args:
        figures: `rows` of the summary, one a method at one temperature, the `machine` and the `questions` that they
            were measured with; None without a measurement of these weights.
        proof: What `draftsmith prove` found of these weights.
    """
    folder = RunFolder(recipe).drafter
    file = folder / CARD_FILE
    if file.is_file() and MARK not in file.read_text(encoding="utf-8", errors="replace"):
        return None
    target = _public(recipe.target.model)
    training = TrainReport.read(folder) if (folder / TRAINING_FILE).is_file() else None
    template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(template).render(
        front_matter=yaml.safe_dump(front_matter(recipe), sort_keys=False).strip(),
        mark=MARK,
        recipe=recipe,
        target=target,
        source=", ".join(_public(source.source) for source in recipe.data.conversations.sources),
        what=_what_it_is(recipe.drafter.kind),
        recipe_yaml=_shown_recipe(recipe),
        training=training,
        start=None if training is None or training.start is None else start_sentence(training.start),
        figures=figures,
        proof=proof,
    )
    write_atomically(file, text.rstrip() + "\n")
    return file


def front_matter(recipe: Recipe) -> dict[str, Any]:
    """The Hub's metadata: ids of the target and the conversations only where they are the Hub's."""
    values: dict[str, Any] = {"library_name": "draftsmith", "pipeline_tag": "text-generation"}
    if _is_hub_id(recipe.target.model):
        values["base_model"] = recipe.target.model
    datasets = [source.source for source in recipe.data.conversations.sources if _is_hub_id(source.source)]
    if datasets:
        values["datasets"] = datasets
    values["tags"] = ["speculative-decoding", "drafter", "draftsmith", recipe.drafter.kind.replace("_", "-")]
    return values


def _is_hub_id(name: str) -> bool:
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not any(suffix in name for suffix in JSON_SUFFIXES)
        and not Path(name).exists()
    )


def _public(name: str) -> str:
    """A model or data source without the folders of this machine."""
    return Path(name).name if Path(name).expanduser().exists() or name.startswith((".", "/", "~")) else name


def _what_it_is(kind: str) -> str:
    """The first paragraph of the drafter's own file, without the names of its neighbours."""
    doc = importlib.import_module(f"draftsmith.models.drafters.{kind}").__doc__ or ""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    return re.sub(r" \(`[\w./]+\.py`\)", "", paragraph)


def _shown_recipe(recipe: Recipe) -> str:
    sections = recipe.model_dump(include=set(RECIPE_SECTIONS), exclude_none=True)
    if recipe.drafter.init is not None:
        sections["drafter"]["init"] = _public(recipe.drafter.init)
    sections["target"]["model"] = _public(recipe.target.model)
    conversations = sections["data"]["conversations"]
    for section in (conversations, *conversations["mixture"]):
        section["source"] = _public(section["source"])
    del sections["data"]["distill"]["options"]  # where servers stand is nobody else's business
    ordered = {name: sections[name] for name in RECIPE_SECTIONS if sections[name] != {}}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True).strip()
