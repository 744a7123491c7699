"""`draftsmith plan`: what training a recipe will need, from configs alone, before any weights are downloaded.

`estimate.py` computes the memory between steps and a step's FLOPs; disk follows from the number of tokens, time from
FLOPs and the device's speed, given or measured. `measure.py` measures a step's activations.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils.benchmark import Timer

from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens, row_lengths
from draftsmith.data.engines.engine import engine_options
from draftsmith.data.sources.mixture import load_conversations
from draftsmith.data.sources.questions import load_questions
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at, scaled
from draftsmith.models.kernels.cpu_kernels import packable_bytes
from draftsmith.models.target.features import required_layers
from draftsmith.models.target.loading import target_device
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.rows import pack_by_length, split_rows
from draftsmith.train.drafter.shown import span
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments, recipe_arguments
from draftsmith.train.plan.estimate import StepCost, half_dtype, step_cost, tensor_bytes, trained_parameters
from draftsmith.train.plan.measure import MeasuredStep, measure_step

UTILISATION = 0.4  # assumed share of the peak TFLOP/s that training reaches
USABLE_FRAC = 0.9  # left free: the device's own context, the kernels' workspaces, fragmentation
GROUPS = ("parameters", "memory", "disk", "time")
WAYS_OUT = "docs/guides/troubleshooting.md#out-of-memory"
ROWS_AT_ONCE = {"transformers": "batch_size", "vllm": "concurrency", "openai": "concurrency_per_server"}  # options


@dataclass(frozen=True)
class Line:
    """One line of a plan: what is counted, its amount and unit, and how the amount was computed."""

    what: str
    amount: float
    unit: str
    how: str


@dataclass(frozen=True)
class Plan:
    """Result of `draftsmith plan`.

    memory: parts, their sum `kept_bytes`, and with `--measure` the measured step. fits: None without `--memory-gib`.
    """

    name: str
    parameters: list[Line]
    memory: list[Line]
    kept_bytes: int
    disk: list[Line]
    time: list[Line]
    verdict: str | None
    fits: bool | None
    notes: list[str]


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command `draftsmith plan`, with their defaults: `--memory-gib`, `--peak-tflops`, ..."""

    memory_gib: float | None = None
    peak_tflops: float | None = None
    memory_gb_per_s: float | None = None
    processes: int = 1
    measure: bool = False


def make_plan(recipe: Recipe, options: PlanOptions) -> Plan:
    """Plan the recipe's training; read the target's config, local conversations and, if they exist, distilled tokens.

    Raises:
        UserError: The target's config cannot be read, or a key is wrong.
    """
    args, tokens, run = recipe_arguments(recipe, options.processes), None, RunFolder(recipe)
    if (run.data / "tokens").is_dir():
        tokens, _ = split_rows(load_tokens(run), recipe.data.eval_rows_frac)
    length, labelled, how = training_rows(recipe, tokens)
    answers, conversations = count_answers(recipe), recipe.data.conversations.limit
    if answers is not None:
        conversations = len(answers)
    num_tokens = None if conversations is None else conversations * recipe.data.max_length_tokens
    if tokens is not None:
        num_tokens = sum(row_lengths(tokens))
    cost = step_cost(recipe, args, length, labelled)
    models = trained_parameters(cost.drafter), cost.target.parameters()
    trained, held = (sum(parameter.numel() for parameter in each) for each in models)
    parameters = [
        Line("trainable", trained, "parameters", f"drafter.kind {recipe.drafter.kind}"),
        Line("target", held, "parameters", f"{recipe.target.model}, from its config"),
    ]
    memory = [Line(part, amount, "bytes", "from the models' shapes") for part, amount in cost.bytes.items()]
    memory.append(Line("in all", cost.kept_bytes, "bytes", "activations come on top: see `--measure`"))
    step = measure_step(recipe, length, labelled) if options.measure else None
    if step is not None:
        rows = f"{args.per_device_train_batch_size} x {length} tokens, {how}"
        peak = f"at its peak on {step.device}; batch of {rows}"
        memory.append(Line("a step, measured", step.peak_bytes, "bytes", peak))
    device = target_device(recipe.target)
    notes = []
    if device.type == "cpu" and (packable := packable_bytes(cost.target)):
        notes.append(
            f"distilling, training and decoding on this CPU may keep packed copies of layers: {bytes_text(packable)}"
        )
    if device.type == "cpu" and options.peak_tflops is None:
        notes.append(
            "the times are this CPU's: for a GPU give its rates, as --peak-tflops 990 --memory-gb-per-s 3350 of an H100"
        )
    if num_tokens is None:
        notes.append("data.conversations.limit is not set, so that some times are not known before distilling")
    fits, verdict = (None, None) if options.memory_gib is None else _verdict(options, cost, step)
    return Plan(
        name=recipe.name,
        parameters=parameters,
        memory=memory,
        kept_bytes=cost.kept_bytes,
        disk=_feature_cache(recipe, cost, num_tokens, tokens is not None),
        time=_times(recipe, args, cost, options, num_tokens, answers, step),
        verdict=verdict,
        fits=fits,
        notes=notes,
    )


def _verdict(options: PlanOptions, cost: StepCost, step: MeasuredStep | None) -> tuple[bool, str]:
    """Return whether training fits into `--memory-gib`, and a sentence; without a measured step, of what it keeps.

    In each of several processes DDP also keeps a copy of the gradients.
    """
    memory_gib = options.memory_gib or 0.0
    activations = 0 if step is None else max(0, step.peak_bytes - cost.kept_bytes)
    need_bytes = cost.kept_bytes + activations + cost.bytes["gradients"] * (options.processes > 1)
    need = f"{need_bytes / 2**30:.3g} of {memory_gib:g} GiB"
    need += f" in each of {options.processes} processes, by DDP" if options.processes > 1 else ""
    need += "" if step is not None else ", without activations, which `--measure` adds on that device"
    if need_bytes <= USABLE_FRAC * memory_gib * 2**30:
        return True, f"fits: {need}"
    return False, f"does not fit with a tenth left free: {need}; what needs less: {WAYS_OUT}"


def training_rows(recipe: Recipe, tokens: Dataset | None) -> tuple[int, int, str]:
    """Return the tokens and the labels of the largest possible row of a batch, and in words their source.

    All rows of a batch count as long as the longest of the distilled tokens, with the most labels, packed where the
    recipe packs them. Without distilled tokens, rows have `data.max_length_tokens`, all with loss.
    """
    length = recipe.data.max_length_tokens
    if tokens is None:
        return length, length, "assumed: data.max_length_tokens, all with loss"
    lengths, labels = row_lengths(tokens), answer_lengths(tokens)
    rows = pack_by_length(lengths, length if recipe.data.packing else 0)
    longest, most = (max(sum(each[i] for i in row) for row in rows) for each in (lengths, labels))
    return longest, most, f"the longest with the most labels of {RunFolder(recipe).data / 'tokens'}"


def count_answers(recipe: Recipe) -> list[int] | None:
    """Count the answers of each conversation to distil; None if a source is no local file, or cannot be read."""
    if not all(Path(source.source).is_file() for source in recipe.data.conversations.sources):
        return None
    try:
        return [sum(turn.role == "user" for turn in each.turns) for each in load_conversations(recipe)]
    except UserError:  # reported by doctor and distill
        return None


def _feature_cache(recipe: Recipe, cost: StepCost, num_tokens: int | None, is_distilled: bool) -> list[Line]:
    """Return the size of the features on disk, if the kind of drafter can be trained on them."""
    if cost.drafter.offline_obstacle is not None:
        return []
    dtype, layers = recipe.data.features.dtype, len(required_layers(cost.drafter))
    token_bytes = layers * cost.drafter.config.hidden_size * getattr(torch, dtype).itemsize
    how = f"{layers} feature layers x {cost.drafter.config.hidden_size} in {dtype}"
    if num_tokens is None:
        return [Line("features on disk", token_bytes, "bytes a token", how)]
    how += f" x {num_tokens:,} tokens{'' if is_distilled else ' at most, as nothing is distilled yet'}"
    how += f"; {bytes_text(free_bytes_at(RunFolder(recipe).features))} are free; training online needs none of it"
    return [Line("features on disk", token_bytes * num_tokens, "bytes", how)]


# ---- time ----


def _times(
    recipe: Recipe,
    args: DrafterTrainingArguments,
    cost: StepCost,
    options: PlanOptions,
    num_tokens: int | None,
    answers: list[int] | None,
    step: MeasuredStep | None,
) -> list[Line]:
    """Return tokens/s of training in one process, and the time of each stage whose length is known.

    In distilling and measuring every answer is as long as it may be. A step of decoding reads the target's weights once
    for all its rows, or computes the rows' products, whichever takes longer; prompts and caches are not counted. Of N
    processes each does 1/N of the work: what they tell each other is not counted.
    """
    num, device, target, given = options.processes, target_device(recipe.target), cost.target, options.peak_tflops

    def flops_per_s(dtype: torch.dtype) -> float:
        return UTILISATION * (matmul_flops_per_s(device, dtype) if given is None else given * 1e12)

    target_rate, drafter_rate = flops_per_s(target.dtype), flops_per_s(half_dtype(args) or cost.drafter.dtype)
    rate = cost.tokens / (cost.target_flops / target_rate + cost.drafter_flops / drafter_rate)
    source = f"measured on this {device.type}" if given is None else f"--peak-tflops {given:g}"
    how = f"of one process: {source}, of which training reaches {UTILISATION:.0%}"
    if step is not None:
        rate, how = step.tokens_per_s, f"of one process: measured on this {step.device}"
    lines = [Line("training", rate, "tokens/s", how)]
    trained_tokens, what = args.num_train_epochs * (num_tokens or 0), f"{args.num_train_epochs:g} epochs"
    if args.max_steps > 0:
        trained_tokens = args.max_steps * args.gradient_accumulation_steps * cost.tokens * num
        what = f"{args.max_steps} steps"
    if trained_tokens:
        how = f"{what}, {trained_tokens:,.0f} tokens, {num} process{'es' * (num > 1)}"
        lines.append(Line("training", trained_tokens / rate / num, "seconds", how))
    if not cost.target_flops:
        return lines  # offline: the target's layers are not there
    head = target.get_output_embeddings().weight
    read_rate = options.memory_gb_per_s * 1e9 if options.memory_gb_per_s else read_bytes_per_s(device)
    row_flops, held_bytes = cost.target_flops / cost.tokens + 2 * head.numel(), tensor_bytes(target.parameters())
    if not target.config.tie_word_embeddings:
        held_bytes -= tensor_bytes([target.get_input_embeddings().weight])

    def step_s(rows: int) -> float:
        read_bytes = min(held_bytes, rows * row_flops / 2 * head.element_size())
        return max(read_bytes / read_rate, rows * row_flops / target_rate)

    chosen, eval_ = recipe.data.distill, recipe.eval
    number = recipe.data.conversations.limit if answers is None else sum(answers)
    if chosen.engine in ROWS_AT_ONCE and number is not None:
        engine = engine_options(recipe)
        at_once, copies = getattr(engine, ROWS_AT_ONCE[chosen.engine]), 1
        if chosen.engine == "vllm":  # a copy of the target on each GPU, unless the recipe says how many
            copies = engine.data_parallel_size or max(1, num // engine.tensor_parallel_size)
        how = f"{number:,} answers of {chosen.max_new_tokens} tokens, {at_once} at a time by {copies} {chosen.engine}"
        seconds = number * chosen.max_new_tokens / at_once * step_s(at_once) / copies
        lines.append(Line("distilling", seconds, "seconds", how))
    questions = load_questions(eval_.question_sets, eval_.limit_per_category, eval_.limit_per_task)
    turns = sum(len(question.turns) for question in questions)
    times = eval_.runs * len(eval_.temperatures) * (1 + len(eval_.methods))
    how = f"{turns} turns of {eval_.max_new_tokens} tokens x {times} (runs, temperatures, methods) at most"
    return [*lines, Line("measuring", turns * eval_.max_new_tokens * times * step_s(1), "seconds", how)]


def read_bytes_per_s(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Measure the bytes per second that this device reads from its memory; takes about a second."""
    return num_bytes / _median_s("values.sum()", values=torch.ones(num_bytes // 4, device=device))


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of products of large square matrices on this device; takes about a second."""
    size = 8192 if device.type == "cuda" else 512
    return 2 * size**3 / _median_s("left @ left", left=torch.randn(size, size, device=device).to(dtype))


def _median_s(statement: str, **values: Tensor) -> float:
    timer = Timer(statement, globals=values, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.5).median)


# ---- for people ----


def show_plan(plan: Plan, console: Console) -> None:
    """Print the plan as a table, with its notes and its verdict."""
    table = Table("", "amount", "how it was computed", box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.columns[1].justify, table.columns[2].overflow = "right", "fold"
    for group in GROUPS:
        lines = getattr(plan, group)
        if lines:
            table.add_row(f"[bold]{group.capitalize()}[/bold]")
        for line in lines:
            table.add_row(f"  {line.what}", format_amount(line), escape(line.how))
    console.print(table, soft_wrap=False)  # folded at the terminal's width
    for note in plan.notes:
        console.print(f"Note: {escape(note)}.")
    if plan.verdict is not None:
        console.print(f"[bold {'green' if plan.fits else 'red'}]{plan.verdict}[/]")


def format_amount(line: Line) -> str:
    """Format a line's amount in its unit, as `15.0 GiB`, `252 M`, `1,234 tokens/s` or `3 h 20 min`."""
    if line.unit.startswith("bytes"):
        return bytes_text(line.amount) + line.unit.removeprefix("bytes")
    if line.unit == "seconds":
        return span(line.amount)
    if line.unit == "parameters":
        amount, prefix = scaled(line.amount, 1000, ("", "k", "M", "B", "T"))
        return f"{amount:.3g} {prefix}"
    return f"{line.amount:,.0f} {line.unit}"
