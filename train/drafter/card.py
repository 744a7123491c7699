"""The model card of a trained drafter: `drafter/README.md`, which goes to the Hub with the folder.

Written when training ends, and again with figures by `eval` and `report` and with the proof by `prove`. A card that
somebody wrote by hand, or took over by deleting the marked line, is left alone.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import yaml

from draftsmith.data.sources.json_records import JSON_SUFFIXES
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import Recipe

CARD_FILE = "README.md"
MARK = "<!-- Written by draftsmith after train, eval, report and prove. Delete this line to keep your own text. -->"
RECIPE_SECTIONS = ("seed", "target", "data", "drafter", "train")


def write_card(recipe: Recipe, figures: dict[str, Any] | None = None, proof: str | None = None) -> Path | None:
    """Write the card of the run's own drafter. Returns its file, or None if the card is not ours to write.

    Args:
        figures: `rows` of the summary, one a method at one temperature, the `machine` and the `questions` that they
            were measured with; None without a measurement of these weights.
        proof: What `draftsmith prove` found of these weights.
    """
    folder = RunFolder(recipe).drafter
    file = folder / CARD_FILE
    if file.is_file() and MARK not in file.read_text(encoding="utf-8"):
        return None
    target = _public(recipe.target.model)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    text = environment.from_string(CARD).render(
        front_matter=yaml.safe_dump(front_matter(recipe), sort_keys=False).strip(),
        mark=MARK,
        recipe=recipe,
        target=target,
        source=", ".join(_public(source.source) for source in recipe.data.conversations.sources),
        what=_what_it_is(recipe.drafter.kind),
        recipe_yaml=_shown_recipe(recipe),
        training=_training(folder),
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
    sections["target"]["model"] = _public(recipe.target.model)
    conversations = sections["data"]["conversations"]
    for section in (conversations, *conversations["mixture"]):
        section["source"] = _public(section["source"])
    del sections["data"]["distill"]["options"]  # where servers stand is nobody else's business
    ordered = {name: sections[name] for name in RECIPE_SECTIONS if sections[name] != {}}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True).strip()


def _training(folder: Path) -> dict[str, Any] | None:
    """What `training.json` says, with the accuracy at each depth in its last entry."""
    file = folder / "training.json"
    if not file.is_file():
        return None
    metrics = json.loads(file.read_text(encoding="utf-8"))
    logged = [entry for entry in metrics["history"] if "accuracy_depth1" in entry]
    last = logged[-1] if logged else {}
    depths = sorted(int(key.removeprefix("accuracy_depth")) for key in last if key.startswith("accuracy_depth"))
    return {
        **metrics,
        "accuracies": [last[f"accuracy_depth{depth}"] for depth in depths],
        "rows": metrics.get("rows"),
        "target_change": metrics.get("target_change"),
    }


CARD = """---
{{ front_matter }}
---
{{ mark }}

# {{ recipe.name }}: a drafter for {{ target }}

A small model (`{{ recipe.drafter.kind }}`) that drafts tokens for {{ target }} in speculative decoding: the target
verifies them all in one forward, and keeps those that it would have said itself. It generates nothing of its own, and
works with no other target.

{% if training and training.target_change %}
**It changes its target.** {{ training.target_change }}

{% endif %}
{{ what }}

## Use

With draftsmith, from this repository's id or a local copy of it:

```python
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.end_ids import answer_end_ids
from draftsmith.eval.decoding.loop import generate
from draftsmith.eval.methods.drafter import DrafterMethod
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.builders import tree_builder
from draftsmith.models.base.drafter import load_drafter
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.schema import MethodRecipe, TargetRecipe

target, tokenizer = load_target(TargetRecipe(model="{{ target }}"))
drafter = load_drafter("owner/this-drafter", target)
decoder = drafter.decoder(max_length_tokens=1024)
tree = tree_builder(MethodRecipe(name="tree", tree="best_first", nodes=12, branch=4), decoder)
method = DrafterMethod("tree", decoder, tree, Sampling())
prompt = prompt_token_ids(tokenizer, [Turn("user", "What does os.path.join do?")])
with TargetSession(target, 1024, drafter.feature_layers) as session:
    answer = generate(session, method, prompt, Sampling(), 128, answer_end_ids(target, tokenizer))
print(tokenizer.decode(answer.ids))
```

In a recipe, as a row of `eval.methods`: `{name: tree, tree: best_first, drafter: FOLDER}`.

{% if figures %}
## Measured

On {{ figures.questions }}, {{ figures.machine }}. tau: mean tokens committed per round, the target's own included.
Speedup: over the same loop without a draft, same process, mean and standard deviation over runs.

| method | T | tau | without the target's own | speedup |
|---|---|---|---|---|
{% for row in figures.rows %}
| {{ row.method }} | {{ "%g"|format(row.temperature) }} | {{ "%.2f"|format(row.tau) }} | {{ "%.2f"|format(row.tau_without_bonus) }} | {{ "%.2f"|format(row.speedup_mean) }}{% if row.speedup_std is not none %} ± {{ "%.2f"|format(row.speedup_std) }}{% endif %} |
{% endfor %}

{% endif %}
{% if proof %}
## Is it lossless?

{{ proof }} (`draftsmith prove`, on these weights)

{% endif %}
## Training

{% if training %}
{{ "{:,}".format(training.steps) }} steps of {{ training.batch_size }} rows, {{ "{:,}".format(training.tokens) }} tokens
{%- if training.epochs %}, {{ "%.1f"|format(training.epochs) }} epochs{% endif %}
{%- if training.rows %} of {{ "{:,}".format(training.rows) }} conversations{% endif %}.
{% if training.accuracies %}
Accuracy on training rows at the end, depth by depth: {% for share in training.accuracies %}{{ "{:.0%}".format(share) }}{{ ", " if not loop.last }}{% endfor %}.
{% endif %}
{% endif %}
Conversations of `{{ source }}`{% if recipe.data.distill.engine == "none" %}, as they are{% else %}, their answers
generated by the target itself (temperature {{ "%g"|format(recipe.data.distill.temperature) }}){% endif %}.

```yaml
{{ recipe_yaml }}
```
"""  # noqa: E501
