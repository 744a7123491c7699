"""The `draftsmith` command: its group, the arguments that commands share, and the commands that measure.

A command imports its modules after its recipe is read, so that `--help` and a mistyped recipe respond immediately.
"""

import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftsmith.cli.console import JSON, PANELS, QUIET, WithTerminalOptions, console, heading, tell
from draftsmith.cli.stages import compare as measure_together
from draftsmith.cli.stages import measured_result, run_eval, with_seeds
from draftsmith.errors import UserError, masked
from draftsmith.provenance import versions
from draftsmith.recipes.loading import load_compared, load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe, check_name

RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="Recipe: a YAML file, or the name of a shipped recipe.")
]
RecipeOrShipped = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="Recipe of a trained drafter; default: SmolLM2 with the drafter that ships with draftsmith.",
    ),
]
OtherDrafter = Annotated[str | None, typer.Option(help="Drafter to use instead of the recipe's: folder or Hub id.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[section.key=value ...]", help="Values that replace the recipe's, as train.max_steps=100."),
]


def _show_version(is_set: bool) -> None:
    if is_set:
        print("draftsmith", versions().get("draftsmith", "(not installed)"))
        raise typer.Exit


START, DATA, TRAIN, MEASURE, SHIP = PANELS
app = typer.Typer(
    cls=WithTerminalOptions,
    help="Train a drafter for your LLM and measure how much faster it generates.\n\nBegin with `draftsmith demo`.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option(JSON, help="Write the results as JSON to stdout, which then holds nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option(*QUIET, help="Print errors and --json's output only.")] = False,
) -> None:
    pass


def print_next_steps(*measured: Recipe, source: Path | None = None, overrides: list[str] | None = None) -> None:
    """Print where the results of `eval` are, and the command that usually follows.

    Args:
        source: The recipe's file or name, for that command; None: print no command.
    """
    from draftsmith.eval.bench.measured_methods import drafter_folders

    for recipe in measured:
        root = RunFolder(recipe).root
        console.print(f"\nReport    {root / 'report.html'}  (figures by category, depth and round)", markup=False)
        for folder in drafter_folders(recipe):
            console.print(f"Drafter   {folder}", markup=False)
    if any(recipe.target.model == "embedded" for recipe in measured):
        console.print(
            f"\nNext: {_program()} demo (a chat model that gets faster); for your own model read docs/guides/train.md"
        )
    elif source is not None:
        from draftsmith.models.formats.exporting import EXPORTERS

        console.print(
            "\nIf no method is faster, read docs/guides/troubleshooting.md#tau-is-fine-the-speedup-is-below-1",
            markup=False,
        )
        print_next_command("export" if (measured[0].drafter.kind, "vllm") in EXPORTERS else "tune", source, overrides)


def _program() -> str:
    """Return the word that starts this program in the shell: `draftsmith` if it is on PATH, else its file."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "draftsmith" and shutil.which("draftsmith") is None else "draftsmith"


def print_next_command(command: str, recipe: Path, overrides: list[str] | None) -> None:
    words = [_program(), command, str(recipe), *(overrides or [])]
    console.print(f"Next: {masked(shlex.join(words))}", markup=False)


# ---- commands that measure ----


@app.command("eval", rich_help_panel=MEASURE, short_help="Measure the speedup")
def evaluate_command(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Measure how much faster the drafter makes the target, and write report.html."""
    loaded = load_recipe(recipe, overrides)
    run_eval(loaded)
    tell(measured_result(loaded))
    print_next_steps(loaded, source=recipe, overrides=overrides)


@app.command(rich_help_panel=MEASURE, short_help="Measure the drafter in an engine")
def bench(
    recipe: RecipePath,
    overrides: Overrides = None,
    *,
    engine: Annotated[
        Literal["vllm", "sglang", "llamacpp"], typer.Option(help="Engine to measure in, with and without the drafter.")
    ],
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Numbers of concurrent questions, each measured in turn; default: 1,4,16,64, in llama.cpp 1,4."
        ),
    ] = None,
    questions_per_request: Annotated[
        int | None,
        typer.Option(min=1, help="Questions per concurrent request, at least 8 in total; default: all questions."),
    ] = None,
    ngram: Annotated[
        bool, typer.Option(help="Also measure the engine's own n-gram lookups, which need no drafter.")
    ] = False,
    engine_options: Annotated[
        str | None,
        typer.Option(help="With vllm: server options as in data.distill.options: '{max_model_len: 2048, ...}'."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="URL of a running server with the drafter, needed with sglang; default: start one."),
    ] = None,
    plain_server: Annotated[
        str | None, typer.Option(help="URL of a running server of the target without the drafter.")
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="Name of the target on the given servers, if they serve several models.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Name of the environment variable that holds the given servers' API key.")
    ] = None,
    target_gguf: Annotated[
        Path | None, typer.Option(help="With llamacpp: the target's GGUF file; default: the recipe's target.gguf_file.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With llamacpp: dtype of the drafter: f32, f16, bf16 (default), q8_0 or q4_0.")
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With llamacpp: maximum number of draft tokens per round; default: as trained."),
    ] = None,
) -> None:
    """Measure speed and acceptance in an engine, and check that acceptance equals that of draftsmith's own loop."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.cli.engine_bench import ServingOptions
    from draftsmith.cli.engine_bench import bench as measure_in_engine

    options = ServingOptions(
        engine, concurrency, questions_per_request, ngram, engine_options, server, plain_server, server_model,
        api_key_env, target_gguf, dtype, draft_tokens,
    )  # fmt: skip
    heading("bench", f"{loaded.name} in {engine}")
    tell(asdict(measure_in_engine(loaded, options)))


@app.command(rich_help_panel=MEASURE, short_help="Rebuild the tables and report.html")
def report(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Write the tables and the report again from the records that `draftsmith eval` wrote."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.cli.evaluate import report_again

    report_again(loaded)
    tell(measured_result(loaded))
    print_next_steps(loaded, source=recipe, overrides=overrides)


@app.command(rich_help_panel=MEASURE, short_help="Find the fastest draft tree")
def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    questions: Annotated[int, typer.Option(min=1, help="Number of questions to tune on.")] = 14,
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 96,
    turns: Annotated[int, typer.Option(min=1, help="How often each of the best trees is measured.")] = 5,
) -> None:
    """Find the fastest draft tree for this drafter on this machine; methods with `tree: tuned` then use it."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.cli.tune import tune as find_tree

    heading("tune", f"{loaded.name}: {loaded.target.model}")
    tuned = find_tree(loaded, questions, new_tokens, turns)
    tell(tuned.as_json())
    tuned.show()


@app.command(rich_help_panel=MEASURE, short_help="Prove that outputs are unchanged")
def prove(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of questions, of which the first turn is used.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Number of sampled answers per question.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 48,
) -> None:
    """Prove that drafting changes no output: greedy identity, distribution, enumeration; exits with 1 on failure."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.cli.prove import prove as collect_evidence
    from draftsmith.cli.prove import show_proof

    heading("prove", f"{loaded.name}: {loaded.target.model}")
    proof = collect_evidence(loaded, prompts, samples, new_tokens)
    tell(proof.as_json())
    show_proof(proof)
    if not proof.holds:
        raise typer.Exit(1)


@app.command(rich_help_panel=TRAIN, short_help="Train and measure several drafters")
def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE ... [section.key=value ...]",
            help="Recipes, and values that replace theirs in all; to change one alone, quote it with its values: "
            '"quickstart drafter.kind=eagle".',
        ),
    ],
    name: Annotated[
        str, typer.Option(help="Name of the folder in runs_dir for the table of all recipes.")
    ] = "comparison",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per recipe, to show the spread over them.")] = 1,
) -> None:
    """Train several drafters on the same data and measure them side by side."""
    try:
        check_name(name)
    except ValueError as error:
        raise UserError(f"option --name: {error}, not {name!r}") from None
    loaded, named = load_compared(recipes)
    words = ["draftsmith", "compare", *recipes, "--name", name]
    words += [] if seeds == 1 else ["--seeds", str(seeds)]
    rows, measured = measure_together(with_seeds(loaded, seeds), name, masked(shlex.join(words)), named)
    tell(rows)
    print_next_steps(*measured)
