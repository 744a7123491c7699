"""The three stages of a recipe in order: distil, train, measure. Each can be run again; what is done is not done twice.

Each stage imports what it needs when it runs, so that `--help` and a mistyped recipe answer at once.
"""

from pathlib import Path

from rich.console import Console

from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

console = Console(highlight=False, soft_wrap=True)


def run_distill(recipe: Recipe) -> None:
    """Let the target answer the conversations, then tokenise them: `data/distilled.jsonl`, `data/tokens`."""
    from draftsmith.data.distill import distill
    from draftsmith.data.token_dataset import build_token_dataset
    from draftsmith.models.target import load_target

    console.rule(f"[bold]1 distil[/bold]  {recipe.target.model} answers {recipe.data.conversations.source}")
    target, tokenizer = load_target(recipe.target)
    folder = RunFolder(recipe)
    console.print(distill(recipe, target, tokenizer, folder).sentence())
    console.print(build_token_dataset(recipe, tokenizer, folder).sentence())
    folder.record("distill")


def run_train(recipe: Recipe) -> None:
    """Train the drafter on the token dataset: `drafter/`."""
    from draftsmith.train.stage import train_drafter

    console.rule(f"[bold]2 train[/bold]  {recipe.drafter.kind} drafter")
    console.print(train_drafter(recipe).sentence())


def run_eval(recipe: Recipe) -> None:
    """Measure the drafter against the autoregressive loop: `eval/`, `report.{md,html}`."""
    from draftsmith.eval.stage import evaluate

    console.rule(f"[bold]3 measure[/bold]  {recipe.eval.runs} runs, each question beside the autoregressive baseline")
    evaluate(recipe)


def run_report(recipe: Recipe) -> None:
    """Write tables, pictures and report again from what `run_eval` recorded."""
    from draftsmith.eval.stage import report_again

    report_again(recipe)


def run_doctor(recipe: Recipe, preview_rows: int, json_file: Path | None) -> bool:
    """Examine data, target and drafter before any training; True if there is no defect."""
    from draftsmith.eval.doctor import examine

    console.rule(f"[bold]doctor[/bold]  {recipe.name}")
    diagnosis = examine(recipe)
    diagnosis.show(console, preview_rows)
    if json_file is not None:
        diagnosis.write_json(json_file)
    return diagnosis.healthy


def run_all(recipe: Recipe) -> None:
    """Everything, in one process."""
    run_distill(recipe)
    run_train(recipe)
    run_eval(recipe)
