"""The three stages of a recipe in order: distil, train, measure. Each can be run again; what is done is not done twice.

Each stage imports what it needs when it runs, so that `--help` and a mistyped recipe answer at once.
"""

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.prompt import Confirm

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder, write_atomically
from draftsmith.recipes.schema import Recipe

if TYPE_CHECKING:
    from draftsmith.data.engines.engine import Engine

console = Console(highlight=False, soft_wrap=True)


def run_distill(recipe: Recipe, retry_failed: bool = False) -> None:
    """Let the target answer the conversations, then tokenise them: `data/shards`, `data/tokens`."""
    from draftsmith.data.card.card import CARD, write_card_of_run
    from draftsmith.data.distill.distill import distill
    from draftsmith.data.distill.token_dataset import build_token_dataset
    from draftsmith.data.engines.engine import EngineSetting, open_engine
    from draftsmith.data.tokens.end_ids import end_ids_of
    from draftsmith.models.target.loading import (
        load_generation_config,
        load_target,
        load_tokenizer,
        target_location,
        weights_hash,
    )

    sources = ", ".join(source.label for source in recipe.data.conversations.sources)
    console.rule(f"[bold]1 distil[/bold]  {recipe.target.model} answers {sources}")
    tokenizer = load_tokenizer(recipe.target)
    folder = RunFolder(recipe)

    def opened() -> "AbstractContextManager[Engine]":
        end_ids = tuple(end_ids_of(load_generation_config(recipe.target), tokenizer))
        location = target_location(recipe.target)
        return open_engine(
            EngineSetting(recipe, tokenizer, location, end_ids, load_target=lambda: load_target(recipe.target)[0])
        )

    open_or_none = None if recipe.data.distill.engine == "none" else opened
    weights = weights_hash(recipe.target)
    report = distill(recipe, tokenizer, folder, open_or_none, weights, retry_failed)
    console.print(report.sentence())
    tokens = build_token_dataset(recipe, tokenizer, folder)
    console.print(tokens.sentence())
    if not tokens.reused or not (folder.data / CARD).exists():
        write_card_of_run(folder.data, recipe, report.sources, tokenizer, weights)
    folder.record("distill")


def run_features(recipe: Recipe, confirmed: bool = False) -> None:
    """Write the target's hidden states to `features/`, after their size was said and accepted.

    Args:
        confirmed: Accepted already; otherwise the terminal is asked.
    """
    from draftsmith.train.features.write import project_features, write_features

    console.rule(f"[bold]features[/bold]  of {recipe.target.model} for a {recipe.drafter.kind} drafter")
    projection = project_features(recipe)
    console.print(projection.sentence())
    if not projection.missing:
        return
    projection.refuse_what_does_not_fit()
    if not confirmed and not sys.stdin.isatty():
        raise UserError(
            f"nothing was written to {projection.folder}: accept its size with `draftsmith features ... --yes`"
        )
    if not confirmed and not _accepted("Write them?"):
        raise UserError(f"nothing was written to {projection.folder}: its size was not accepted")
    console.print(write_features(recipe, projection).sentence())
    RunFolder(recipe).record("features")


def _accepted(question: str) -> bool:
    try:
        return Confirm.ask(question, console=console)
    except EOFError:
        return False


def run_train(recipe: Recipe) -> None:
    """Train the drafter on the token dataset: `drafter/`."""
    from draftsmith.train.drafter.stage import train_drafter

    console.rule(f"[bold]2 train[/bold]  {recipe.drafter.kind} drafter")
    console.print(train_drafter(recipe).sentence())


def run_eval(recipe: Recipe) -> None:
    """Measure the drafter against the autoregressive loop: `eval/`, `report.{md,html}`."""
    from draftsmith.eval.commands.evaluate import evaluate

    console.rule(f"[bold]3 measure[/bold]  {recipe.eval.runs} runs, each question beside the autoregressive baseline")
    evaluate(recipe)


def run_report(recipe: Recipe) -> None:
    """Write tables, pictures and report again from what `run_eval` recorded."""
    from draftsmith.eval.commands.evaluate import report_again

    report_again(recipe)


def run_doctor(recipe: Recipe, preview_rows: int, json_file: Path | None) -> bool:
    """Examine data, target and drafter before any training; True if there is no defect."""
    from draftsmith.eval.commands.doctor import examine

    console.rule(f"[bold]doctor[/bold]  {recipe.name}")
    diagnosis = examine(recipe)
    diagnosis.show(console, preview_rows)
    if json_file is not None:
        diagnosis.write_json(json_file)
    return diagnosis.healthy


def run_tune(recipe: Recipe, json_file: Path | None, **options: int) -> None:
    """Find the tree that pays best here, and write it into the drafter's config. `options`: `tune`'s."""
    from draftsmith.eval.commands.tune import tune

    console.rule(f"[bold]tune[/bold]  {recipe.name}: {recipe.target.model}")
    tuned = tune(recipe, **options)
    tuned.show(console)
    if json_file is not None:
        write_atomically(json_file, json.dumps(tuned.as_json(), indent=2) + "\n")


def run_prove(recipe: Recipe, json_file: Path | None, **options: int) -> bool:
    """Collect evidence that the methods change nothing but the speed; True if it holds. `options`: `prove`'s."""
    from draftsmith.eval.commands.prove import prove

    console.rule(f"[bold]prove[/bold]  {recipe.name}: {recipe.target.model}")
    proof = prove(recipe, **options)
    proof.show(console)
    if json_file is not None:
        write_atomically(json_file, json.dumps(proof.as_json(), indent=2) + "\n")
    return proof.holds


def run_plan(recipe: Recipe, json_file: Path | None, **options: Any) -> None:
    """Say what training will need, from configs alone. `options` are those of `PlanOptions`."""
    from draftsmith.train.plan.plan import PlanOptions, make_plan
    from draftsmith.train.plan.table import show_plan

    console.rule(f"[bold]plan[/bold]  {recipe.name}: {recipe.drafter.kind} drafter for {recipe.target.model}")
    plan = make_plan(recipe, PlanOptions(**options))
    show_plan(plan, console)
    if json_file is not None:
        plan.write_json(json_file)


def run_all(recipe: Recipe) -> None:
    """Everything, in one process."""
    run_distill(recipe)
    if recipe.data.features.source == "offline":
        run_features(recipe)
    run_train(recipe)
    run_eval(recipe)


def run_compare(
    recipe_files: list[str], overrides: list[str], vary: str | None, name: str, json_file: Path | None
) -> Recipe:
    """Train every recipe, or every variant of one, and measure all in one process. Returns the common recipe."""
    from draftsmith.eval.commands.compare import compare, expand_variants, joint_recipe

    if vary is not None and len(recipe_files) != 1:
        raise UserError(f"--vary needs exactly one recipe, not {len(recipe_files)}")
    if vary is not None:
        recipes = expand_variants(recipe_files[0], overrides, vary)
    else:
        recipes = [load_recipe(file, overrides) for file in recipe_files]
    if not recipes:
        raise UserError("compare needs recipes: for example `draftsmith compare embedded-medusa embedded-eagle`")
    rows = compare(recipes, name)
    if json_file is not None:
        write_atomically(json_file, json.dumps(rows, indent=2) + "\n")
    return joint_recipe(recipes, name)
