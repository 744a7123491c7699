"""Logging of the report's table to every tracker that the training logged to (`train.report_to`)."""

from typing import Any

from draftsmith.errors import masked
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.trackers import begin_wandb, end_trackio, tracked_run

FILES = ("report.md", "report.html", "eval/result.json")


def add_to_trackers(recipe: Recipe, summary: list[dict[str, Any]]) -> None:
    """Log the table: to wandb and trackio as a table and an artifact with the report's files, to TensorBoard as text.

    Raises:
        UserError: wandb rejects it.
    """
    folder = RunFolder(recipe)
    about = tracked_run(folder) | {"recipe": masked(recipe.model_dump())}
    columns = [column for column in summary[0] if column != "over_tasks"]
    rows = [[row[column] for column in columns] for row in summary]
    if any(row.get("over_tasks") for row in summary):
        columns += ["tau over tasks", "speedup over tasks"]
        for cells, figures in zip(rows, (row["over_tasks"] or {} for row in summary), strict=True):
            cells += [figures.get("tau"), figures.get("speedup_mean")]
    for tracker in about.get("trackers", []):
        ADD[tracker](folder, about, columns, rows)


def _to_wandb(folder: RunFolder, about: dict[str, Any], columns: list[str], rows: list[list[Any]]) -> None:
    """Log the table and the report's files to the training's wandb run."""
    import wandb  # an optional dependency

    run = begin_wandb(folder, about)
    table = {"columns": columns, "data": rows, "allow_mixed_types": True}
    artifact = _artifact(wandb, folder, about["name"])
    artifact.add(wandb.Table(**table), "table")
    run.log_artifact(artifact)
    run.log({"report": wandb.Table(**table)})
    run.finish()


def _to_tensorboard(folder: RunFolder, about: dict[str, Any], columns: list[str], rows: list[list[Any]]) -> None:
    """Log the table to TensorBoard, as text."""
    from torch.utils.tensorboard import SummaryWriter

    lines = [columns, ["---"] * len(columns), *rows]
    with SummaryWriter(about["tensorboard_folder"]) as writer:
        writer.add_text("report", "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


def _to_trackio(folder: RunFolder, about: dict[str, Any], columns: list[str], rows: list[list[Any]]) -> None:
    """Log the table and the report's files to the training's trackio run."""
    import trackio  # an optional dependency

    project, name = about["project"], about["name"]
    # trackio drops the config of a resumed run, so it is passed again.
    earlier = next((dict(run.config) for run in trackio.Api().runs(project) if run.name == name), {})
    config = {key: value for key, value in earlier.items() if not key.startswith("_")} | {"recipe": about["recipe"]}
    trackio.init(project=project, name=name, resume="allow", embed=False, config=config)
    trackio.log({"report": trackio.Table(columns=columns, data=rows, allow_mixed_types=True)})
    trackio.log_artifact(_artifact(trackio, folder, name))
    end_trackio()


def _artifact(library: Any, folder: RunFolder, name: str) -> Any:
    """Build an artifact with the report's files, for wandb or trackio."""
    artifact = library.Artifact(f"{name}-report", type="report")
    for file in FILES:
        artifact.add_file(str(folder.root / file))
    return artifact


ADD = {"wandb": _to_wandb, "tensorboard": _to_tensorboard, "trackio": _to_trackio}
