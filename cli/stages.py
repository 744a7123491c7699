"""The stages that several commands run, in their order. Each can be run again; finished work is not repeated.

Each stage prints a summary and returns it as figures for `--json`.

Each imports its modules when it runs, so that `--help` and a mistyped recipe respond immediately.

`compare` runs them for several recipes: every drafter that is not trained yet is trained, then all are measured in one
process. Each recipe keeps its own run folder; recipes with the same data share one distillation. The table's folder has
the comparison's name: same target, questions, machine and time for every row, and one baseline. A drafter that changes
its target (Medusa-2) is measured against the changed target, in its own run.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from pydantic import ValidationError

from draftsmith.cli.console import console, heading
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, check_writable, read_json
from draftsmith.recipes.loading import explain, first_stage, shipped_folder
from draftsmith.recipes.run_folder import RunFolder, is_first_process, process_of_launch
from draftsmith.recipes.schema import DRAFTER_KIND, SEED_SUFFIX, MethodConfig, Recipe, check_name

# Keys of the data section that do not change the distilled conversations.
NOT_OF_THE_DATA = {"packing", "tokenize_processes", "eval_rows_frac", "features"}
MAY_DIFFER = {"methods", "compile"}  # keys of the eval section, in recipes of a comparison


def run_distill(recipe: Recipe, retry_failed: bool = False) -> dict[str, Any]:
    """Generate the target's answers to the conversations, then tokenise them: writes `data/shards`, `data/tokens`."""
    from draftsmith.data.card.card import write_data_card
    from draftsmith.data.distill.distill import distill
    from draftsmith.data.distill.limits import target_limits
    from draftsmith.data.distill.token_dataset import build_token_dataset
    from draftsmith.data.engines.engine import check_engine
    from draftsmith.models.base.registry import check_drafter
    from draftsmith.models.target.loading import load_target_config, load_tokenizer, weights_hash

    if recipe.data.distill.engine != "none":
        check_engine(recipe)
    sources = ", ".join(source.label for source in recipe.data.conversations.sources)
    answering = recipe.answering_target
    heading("1 distil", f"{answering.model} answers {sources}")
    folder = RunFolder(recipe)
    check_writable(folder.data)
    folder.stages()
    # Checked before anything expensive: targets that training does not support.
    check_drafter(recipe.drafter.kind, load_target_config(recipe.target), recipe.drafter.options)
    tokenizer = load_tokenizer(recipe.target)
    if answering is not recipe.target:
        as_is = answering.model_copy(update={"chat_template": tokenizer.chat_template, "chat_template_kwargs": {}})
        if load_tokenizer(as_is).get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"data.distill.model {answering.model} has another tokenizer than target.model {recipe.target.model}: "
                "name a copy of the target, such as a quantised one"
            )

    weights, limits, features = weights_hash(answering), target_limits(load_target_config(answering)), None
    if recipe.data.distill.features:
        from draftsmith.train.features.serving import check_answering_servers

        features = check_answering_servers(recipe, tokenizer)
    report = distill(recipe, tokenizer, folder, weights, retry_failed, limits=limits, features=features)
    console.print(report.sentence(), markup=False)
    if report.left:  # to the launch's other processes
        return {"conversations": report.as_json()}
    tokens = build_token_dataset(recipe, tokenizer, folder, report.ids)
    console.print(tokens.sentence(), markup=False)
    write_data_card(recipe, report.sources, tokenizer, weights)
    folder.record("distill")
    return {"conversations": report.as_json(), "tokens": asdict(tokens)}


def run_features(recipe: Recipe) -> dict[str, Any]:
    """Write the target's hidden states to `features/`, after printing their size.

    Raises:
        UserError: They do not fit on the disk.
    """
    from draftsmith.train.features.write import project_features, write_features

    heading("features", f"of {recipe.target.model} for a {recipe.drafter.kind} drafter")
    check_writable(RunFolder(recipe).features)
    RunFolder(recipe).stages()
    projection = project_features(recipe)
    folder = projection.stored.folder
    console.print(projection.sentence(), markup=False)
    figures = {"folder": str(folder), "tokens": projection.num_tokens, "bytes": projection.total_bytes}
    if not projection.missing:
        return {**figures, "written_bytes": 0}
    projection.stored.check_disk_space(projection.missing)
    wall_time_s = write_features(recipe, projection)
    speed = projection.stored.count_tokens(projection.missing) / max(wall_time_s, 1e-9)
    written = f"wrote {bytes_text(projection.missing_bytes)} to {folder}"
    console.print(f"{written} in {wall_time_s:.0f} s, {speed:,.0f} tokens/s", markup=False)
    if is_first_process():
        RunFolder(recipe).record("features")
    return {**figures, "written_bytes": projection.missing_bytes, "wall_time_s": wall_time_s}


def run_train(recipe: Recipe) -> dict[str, Any]:
    """Train the drafter on the token dataset: writes `drafter/`."""
    from draftsmith.train.drafter.stage import train_drafter

    heading("2 train", f"{recipe.drafter.kind} drafter")
    report = train_drafter(recipe)
    console.print(report.sentence(), markup=False)
    return report.as_json()


def launch_training(recipe: Recipe, file: str, overrides: Sequence[str], processes: int) -> dict[str, Any]:
    """Train in several processes of this machine, by `accelerate launch` with DDP; return the training's figures.

    Args:
        file: File or name of the recipe.

    Raises:
        UserError: This process is itself one of several of a launch.
        typer.Exit: Training failed, which it has reported.
    """
    from torch import cuda

    from draftsmith.train.drafter.report import TrainReport

    if (launched := process_of_launch()[1]) > 1:
        raise UserError(f"option --processes starts the processes itself: unset WORLD_SIZE={launched}, or leave it out")
    if not cuda.is_available():
        console.print(f"no GPU: {processes} processes share {os.cpu_count()} CPUs")
    config = shipped_folder() / "accelerate" / ("multi_gpu.yaml" if cuda.is_available() else "cpu_x2.yaml")
    launcher = [sys.executable, "-m", "draftsmith.train.processes.launcher", "--config_file", str(config)]
    command = [*launcher, "--num_processes", str(processes), "-m", "draftsmith.train.train_parallel", file, *overrides]
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C and SIGTERM: the step is finished and saved
            process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if code != 0:
        raise typer.Exit(code)
    return TrainReport.read(RunFolder(recipe).drafter, was_finished=False).as_json()


def make_drafter(recipe: Recipe) -> dict[str, Any]:
    """Distil and train, with the features stage in between if `data.features.source` is offline.

    If `drafter.init` names a recipe, its drafter is trained first, on the same conversations.
    """
    first = first_stage(recipe)
    if first is not None and RunFolder(first).data.exists():  # data of other settings is an error before any work
        make_drafter(first)
        reuse_data(recipe, [first])
        first = None
    made = {"distill": run_distill(recipe)}
    if first is not None:
        reuse_data(first, [recipe])
        make_drafter(first)
    if recipe.data.features.source == "offline":
        made["features"] = run_features(recipe)
    return {**made, "train": run_train(recipe)}


def reuse_data(recipe: Recipe, recipes: Sequence[Recipe]) -> None:
    """Copy distilled conversations from a run in `recipes` with equal data settings, if this run has none yet."""
    folder = RunFolder(recipe).data
    if folder.exists():
        return
    for other in recipes:
        source = RunFolder(other).data
        data, others_data = (each.data.model_dump(exclude=NOT_OF_THE_DATA) for each in (recipe, other))
        same = (others_data, other.seed, other.target) == (data, recipe.seed, recipe.target)
        if same and other is not recipe and (source / "tokens").is_dir():
            partial = folder.with_name("data.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial)
            partial.replace(folder)
            return


def run_eval(recipe: Recipe, command: str | None = None) -> list[dict[str, Any]]:
    """Measure the drafter against the autoregressive loop: writes `eval/`, `report.{md,html}`. Returns the summary."""
    from draftsmith.cli.evaluate import evaluate

    heading("3 measure", f"{recipe.eval.runs} runs, every question also with the autoregressive baseline")
    return evaluate(recipe, command)


def measured_result(recipe: Recipe) -> dict[str, Any]:
    """Read the result that `run_eval` wrote to `eval/result.json`: figures, with machine, versions and command."""
    return read_json(RunFolder(recipe).eval / "result.json", dict[str, Any], "run `draftsmith report` again")


# ---- several recipes ----


def with_seeds(recipes: list[Recipe], seeds: int) -> list[Recipe]:
    """Repeat each recipe for every seed, which changes the initial weights and the order of the same examples.

    The first repetition is the recipe itself; methods that need no training are measured with that one only.
    """
    repeated = []
    for recipe in recipes:
        trained = [method for method in recipe.eval.methods if method.kind == DRAFTER_KIND]
        evaluation = recipe.eval.model_copy(update={"methods": trained})
        repeated.append(recipe)
        for number in range(1, seeds):
            train = {**recipe.train, "seed": recipe.train.get("seed", recipe.seed) + number}
            values = {"name": f"{recipe.name}{SEED_SUFFIX}{number}", "train": train, "eval": evaluation}
            repeated.append(recipe.model_copy(update=values))
    return repeated


def compare(
    recipes: list[Recipe], name: str, command: str | None = None, distilled: Sequence[Recipe] = ()
) -> tuple[list[dict[str, Any]], list[Recipe]]:
    """Distil, train and measure all recipes.

    Args:
        name: Name of the common table's run.
        command: Command that repeats the comparison, for its report.
        distilled: Further recipes whose distilled conversations may be reused, such as those that overrides vary.

    Returns:
        The rows of all tables, and the recipe of each table: the common one first, if it was measured.

    Raises:
        UserError: The recipes differ in target or questions, or two of them have the same name.
    """
    from draftsmith.models.base.registry import load_drafter_class

    _check_comparable(recipes, name)
    kinds = {recipe.name: load_drafter_class(recipe.drafter.kind) for recipe in recipes}
    together = [each for each in recipes if not hasattr(kinds[each.name], "target_change")]
    measured = [joint_recipe(together, name)] if together else []
    for recipe in recipes:
        reuse_data(recipe, [*recipes, *distilled])
        make_drafter(recipe)
    rows = [row for joint in measured for row in run_eval(joint, command)]
    for recipe in recipes:
        if recipe not in together:
            console.print(f"{recipe.name} changes its target, so it is measured in a separate run")
            rows += run_eval(recipe)
            measured.append(recipe)
    return rows, measured


def joint_recipe(recipes: list[Recipe], name: str) -> Recipe:
    """Build a recipe that measures every method of every recipe on the first recipe's questions."""
    own_names = [method.name for recipe in recipes for method in recipe.eval.methods]
    unique = len(set(own_names)) == len(own_names)
    methods: list[MethodConfig] = []
    for recipe in recipes:
        for method in recipe.eval.methods:
            method_name = method.name if unique else f"{recipe.name}/{method.name}"
            drafter = method.drafter or str(RunFolder(recipe).drafter)
            try:
                values = method.model_dump() | {"name": method_name, "drafter": drafter}
                methods.append(MethodConfig.model_validate(values))
            except ValidationError as error:
                raise UserError(f"recipe {recipe.name}: {explain(MethodConfig, error, 'eval.methods')}") from None
    first = recipes[0]
    return first.model_copy(update={"name": name, "eval": first.eval.model_copy(update={"methods": methods})})


def _check_comparable(recipes: list[Recipe], table_name: str) -> None:
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise UserError(f"key `name`: the recipes to compare are named {', '.join(names)}: give each a different name")
    if table_name in names:
        raise UserError(f"option --name: {table_name} is the name of a recipe: give the table another name")
    for name in names:  # a seed's number may have made it too long
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"key `name`: {error}, not {name!r}") from None
    first = recipes[0]
    shared = first.eval.model_dump(exclude=MAY_DIFFER)
    for other in recipes[1:]:
        values = other.eval.model_dump(exclude=MAY_DIFFER)
        different = [f"eval.{key}" for key, value in values.items() if value != shared[key]]
        if other.target != first.target:
            different.insert(0, "target")
        if different:
            raise UserError(
                f"recipes {first.name} and {other.name} cannot be compared, as {', '.join(different)} differ: "
                f"make them equal, for example with an override for all: {different[0]}=..."
            )
