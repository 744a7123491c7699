"""`draftsmith plan`: what training a recipe will need, from configs alone, before any weights are downloaded.

Memory and FLOPs come from one training step on tensors without values (`fake_step.py`); disk from the number of tokens;
throughput from the FLOPs and a rate, given or measured. Every line says how it was computed. Where a step does not fit,
lines of the recipe are proposed that make it smaller, each planned as well.

Shapes: B batch, S sequence.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens
from draftsmith.data.engines.engine import engine_class
from draftsmith.data.sources.questions import load_questions
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.cpu_kernels import packable_bytes
from draftsmith.models.fake_run import Phase
from draftsmith.models.target.features import decoder_layers
from draftsmith.models.target.loading import target_device
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.models.target.text_model import running_sentence
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, bytes_text, free_bytes_at, read_json, scaled
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import DrafterTrainingArguments
from draftsmith.train.plan.fake_step import FakeTraining, StepCost, TrainingData, arguments_of, training_data, ways_out
from draftsmith.train.processes.launch import Launch

MEASURING_S = 0.5
# Left free: the device's own context, the kernels' workspaces, fragmentation.
USABLE_FRAC = 0.9
SCALING_FILE = Path(__file__).with_name("data_scaling.json")  # written by `benchmarks/data_scaling.py`
# Parts of a plan, as they are shown.
GROUPS = (
    ("parameters", "Parameters"), ("batches", "Batches"), ("memory", "Memory, when most is in use"), ("disk", "Disk"),
    ("flops_per_token", "Computation"), ("throughput", "Speed"),
    ("stages", "Distilling and measuring, at the limit of the device"),
)  # fmt: skip
READ_BYTES = 1 << 30  # once, to measure how fast memory is read
ROWS_AT_ONCE = {"transformers": "batch_size", "vllm": "concurrency", "openai": "concurrency_per_server"}  # options
# speculators' pull request 1132 (September 2026): EAGLE-3 for Qwen3-8B, 5,000 conversations, five epochs, features from
# disk, 942 s on four H100.
PUBLISHED_CONVERSATIONS_PER_S = 5 * 5000 / 942 / 4
PUBLISHED_PARAMETERS = (6e9, 10e9)  # of targets that it says something about
PLACEMENTS = ("replicated", "sharded", "int8", "nf4", "offline")


@dataclass(frozen=True)
class Line:
    """A figure and where it comes from."""

    what: str
    amount: float
    unit: str
    how: str


@dataclass(frozen=True)
class Verdict:
    """Whether the step fits into the memory that was given."""

    memory_bytes: int
    fits: bool
    sentence: str


@dataclass(frozen=True)
class SetUp:
    """One way to train; `bytes` of one process at its peak, None if it cannot be done, with the reason."""

    launch: str
    target: str
    processes: int
    bytes: int | None
    why_not: str | None = None


@dataclass(frozen=True)
class Plan:
    """What `make_plan` found. `memory` adds up to `peak_bytes`."""

    name: str
    parameters: list[Line]
    batches: list[Line]
    memory: list[Line]
    peak_bytes: int
    phase_peak_bytes: dict[str, int]
    disk: list[Line]
    flops_per_token: list[Line]
    throughput: list[Line]
    stages: list[Line]
    verdict: Verdict | None
    notes: list[str]
    set_ups: list[SetUp]


@dataclass(frozen=True)
class PlanOptions:
    """What the command line adds to the recipe.

    Args:
        memory_gib: Of the device, for a verdict.
        peak_tflops: Of the device; measured here by default.
        memory_gb_per_s: What the device reads of its memory, in 10^9 bytes a second; measured here by default.
        utilisation: Share of that rate which a training step reaches.
        labelled_share: Plan for rows of `data.max_length_tokens` of which this share carries labels, whatever data
            there is.
        processes: Of a launch, for what each of them holds under every set-up.
    """

    memory_gib: float | None = None
    peak_tflops: float | None = None
    memory_gb_per_s: float | None = None
    utilisation: float = 0.4
    labelled_share: float | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UserError(f"option --processes must be at least 1, not {self.processes}")
        for key in ("memory_gib", "peak_tflops", "memory_gb_per_s", "utilisation", "labelled_share"):
            value, is_share = getattr(self, key), key in ("utilisation", "labelled_share")
            if value is not None and not (value > 0 and (value <= 1 or not is_share)):
                limit = " and at most 1" if is_share else ""
                raise UserError(f"option --{key.replace('_', '-')} must be above 0{limit}, not {value:g}")


def make_plan(recipe: Recipe, options: PlanOptions | None = None) -> Plan:
    """Plan the recipe's training; loads the target's config and, if they exist, the distilled tokens.

    Raises:
        UserError: The target's config cannot be read, or a key or option is wrong.
    """
    options, device, args = options or PlanOptions(), target_device(recipe.target), arguments_of(recipe)
    data = training_data(recipe, args.per_device_train_batch_size, options.labelled_share)
    training = FakeTraining(recipe, args)
    largest = training.step(data.largest)
    typical = largest if data.typical is data.largest else training.step(data.typical)
    notes = [f"the target is run with {running_sentence(training.target)}"]
    if recipe.drafter.options.get("attention") == "flex":
        notes.append("drafter.options.attention: flex is planned as folded, which saves the same for the backward pass")
    more_data = what_more_data_is_worth(recipe)
    notes += [] if more_data is None else [more_data]
    rates, source = _rates(training, args, typical, options, device)
    throughput = _throughput(args, typical, data, options, rates, source)
    if (
        recipe.drafter.kind == "eagle3"
        and PUBLISHED_PARAMETERS[0] <= _size_of(training.target) <= PUBLISHED_PARAMETERS[1]
    ):
        notes.append(
            f"published: speculators trained EAGLE-3 for Qwen3-8B at {PUBLISHED_CONVERSATIONS_PER_S:.1f} conversations "
            "a second for each of four H100, features from disk (pull request 1132); the time above is of products at "
            "an assumed utilisation, and may be two to four times too good"
        )
    if args.gradient_accumulation_steps > 1:
        notes.append("gradients stay while the next batch of an accumulated step is computed: counted")
    if device.type == "cpu" and (packable := packable_bytes(training.target)):
        copies = f"packed copies of the target's layers: up to {bytes_text(packable)}"
        notes.append(f"distilling and decoding on this CPU may keep {copies}")
    notes.append(
        "one process with the target whole; `--processes N` shows what each of several holds under every set-up. A "
        "CUDA context, the kernels' workspaces and fragmentation come on top"
    )
    return Plan(
        name=recipe.name,
        parameters=_parameters(recipe, training),
        batches=[
            _batch("largest batch", data.largest, data.how[0]),
            _batch("typical batch", data.typical, data.how[1]),
        ],
        memory=_memory(training, args, largest),
        peak_bytes=largest.peak[1].peak_bytes,
        phase_peak_bytes={name: phase.peak_bytes for name, phase in largest.phases.items()},
        disk=[_cache(recipe, training, data)],
        flops_per_token=_flops(typical),
        throughput=throughput,
        stages=_stages(recipe, training, typical, options, device, rates["target forward"]),
        verdict=_verdict(recipe, largest, options),
        notes=notes,
        set_ups=set_ups(recipe, args, data.largest, options.processes) if options.processes > 1 else [],
    )


def what_more_data_is_worth(recipe: Recipe, file: Path = SCALING_FILE) -> str | None:
    """Say, without a full stop, how tau grew with the data where it was measured; None for a kind that was not.

    The line is tau(n) = a + b log2(n / 100,000): each doubling of the answer tokens adds b. Two parameters, since a
    power law's third is not determined by few sizes; beyond the largest size nothing is promised.

    Raises:
        UserError: The file is damaged.
    """
    figures = read_json(file, dict[str, Any], "install draftsmith again", "figures")
    fit, run = figures["trees"].get(recipe.drafter.kind), RunFolder(recipe)
    if fit is None:
        return None
    there = beyond = ""
    if (run.data / "tokens").is_dir():
        answer_tokens = sum(answer_lengths(load_tokens(run, recipe.name)))
        there = f"there are {answer_tokens:,} answer tokens; "
        if answer_tokens > fit["most_tokens"]:
            beyond = "; that is more than was measured, so what more are worth is not known"
    return (
        f"more data: {there}each doubling of the answer tokens changed the tree's tau by {fit['tau_per_doubling']:+.2f}"
        f" ± {fit['tau_per_doubling_error']:.2f} between {fit['least_tokens']:,} and {fit['most_tokens']:,} (measured "
        f"on {figures['target']} with {recipe.drafter.kind}, points {fit['residual']:.2f} off the line; your target "
        f"may differ){beyond}"
    )


# ---- the lines ----


def _parameters(recipe: Recipe, training: FakeTraining) -> list[Line]:
    trained = sum(parameter.numel() for parameter in training.trained)
    lent = {id(parameter) for parameter in training.drafter.parameters()}  # a LoRA is part of both
    target = sum(parameter.numel() for parameter in training.target.parameters() if id(parameter) not in lent)
    offline = recipe.data.features.source == "offline"
    kept = "; its layers are not held, as data.features.source=offline needs none" if offline else ""
    how = f"drafter.kind {recipe.drafter.kind}: {trained / target:.1%} of the target's"
    return [
        Line("trainable parameters", trained, "parameters", how),
        Line("target parameters", target, "parameters", f"{recipe.target.model}, from its config{kept}"),
    ]


def _batch(what: str, inputs: dict[str, Tensor], how: str) -> Line:
    (rows, length), tokens = inputs["input_ids"].shape, float(inputs["attention_mask"].sum())
    labelled = float(inputs["loss_mask"].sum()) / tokens
    return Line(what, tokens, "tokens", f"{rows} x {length}, {labelled:.0%} labelled; {how}")


def _memory(training: FakeTraining, args: DrafterTrainingArguments, cost: StepCost) -> list[Line]:
    """Break down the instant at which most memory is in use."""
    name, phase = cost.peak
    logits_bytes = max(other.at_peak_bytes["logits"] for other in cost.phases.values())
    explained = {
        "target": ("target weights", f"{_dtypes(training.target)}, frozen"),
        "drafter": ("drafter weights", _dtypes(training.drafter)),
        "gradients": ("gradients", "that exist at the peak"),
        "optimiser": ("optimiser state", f"of {_optimizer_name(args)}"),
        "features": ("target features", f"{_layers(training.drafter.feature_layers)}, for the whole batch"),
        "activations": ("activations", "saved for the backward pass, and what the peak works on"),
        "logits": ("loss", f"logits in chunks; {logits_bytes / 2**20:,.0f} MiB while the drafter runs forward"),
    }
    lines = [Line(what, phase.at_peak_bytes[kind], "bytes", how) for kind, (what, how) in explained.items()]
    how = f"sum, in the {name} with the largest batch"
    return [*lines, Line("memory of a step", phase.peak_bytes, "bytes", how)]


def _optimizer_name(args: DrafterTrainingArguments) -> str:
    return f"muon and {args.optim.value}" if args.optimizer == "muon" else args.optim.value


def _dtypes(model: PreTrainedModel) -> str:
    """Count parameters by dtype: `8,030,261,248 in bfloat16`."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return ", ".join(f"{count:,} in {_name(dtype)}" for dtype, count in counts.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(layers: tuple[int, ...], what: str = "layer") -> str:
    return f"{len(layers)} {what}{'s' if len(layers) > 1 else ''}"


def _cache(recipe: Recipe, training: FakeTraining, data: TrainingData) -> Line:
    what, chosen, obstacle = "offline feature cache", recipe.data.features, training.drafter.offline_obstacle
    if obstacle is not None:
        return Line(what, 0, "bytes", f"not for drafter.kind {recipe.drafter.kind}: {obstacle}")
    layers, size = training.drafter.layers_read, training.target.config.get_text_config().hidden_size
    number_bytes = getattr(torch, chosen.dtype).itemsize
    how = f"{_layers(layers, 'feature layer')} x {size} x {number_bytes} bytes ({chosen.dtype})"
    bytes_per_token = len(layers) * size * number_bytes
    if data.tokens is None:
        return Line(what, bytes_per_token, "bytes a token", f"{how}; how many: {data.tokens_how}")
    free = bytes_text(free_bytes_at(RunFolder(recipe).features))
    how += f" x {data.tokens:,} tokens ({data.tokens_how}); {free} are free on that disk"
    how += "; training online needs none of it" if chosen.source == "online" else ""
    return Line(what, bytes_per_token * data.tokens, "bytes", how)


def _flops(cost: StepCost) -> list[Line]:
    """Count per token that is no padding, so that it goes with the tokens/s of the training log."""
    how = {
        "target forward": "products and causal attention of its layers, with the typical batch",
        "drafter forward": "of the rows that are computed: real tokens and masks",
        "LM head": "labelled rows only, forward and backward",
        "backward": "of the drafter",
        "optimiser step": "Muon's products",
    }
    lines = [Line(name, flops / cost.tokens, "FLOPs a token", how[name]) for name, flops in cost.flops().items()]
    return [*lines, Line("all", sum(line.amount for line in lines), "FLOPs a token", "sum")]


def _size_of(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _rates(
    training: FakeTraining, args: DrafterTrainingArguments, cost: StepCost, options: PlanOptions, device: torch.device
) -> tuple[dict[str, float], str]:
    """FLOPs a second of each part of a step at full use, and where they come from."""
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    dtypes = dict.fromkeys(cost.flops(), half or training.drafter.dtype)
    dtypes |= {"target forward": training.target.dtype, "LM head": half or training.target.dtype}
    if options.peak_tflops is not None:
        rates = dict.fromkeys(dtypes.values(), options.peak_tflops * 1e12)
        source = f"--peak-tflops {options.peak_tflops:g}"
    else:
        rates = {dtype: matmul_flops_per_s(device, dtype) for dtype in set(dtypes.values())}
        found = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {_name(dtype)}" for dtype, rate in rates.items())
        source = f"{found}, measured on this {device.type} by matrix products"
    return {name: rates[dtype] for name, dtype in dtypes.items()}, source


def _throughput(
    args: DrafterTrainingArguments,
    cost: StepCost,
    data: TrainingData,
    options: PlanOptions,
    rates: dict[str, float],
    source: str,
) -> list[Line]:
    """Estimate tokens/s, and the time of the recipe's training if its length is known."""
    seconds = sum(flops / rates[name] for name, flops in cost.flops().items()) / options.utilisation
    tokens_per_s = cost.tokens / seconds
    how = f"{source}, x utilisation {options.utilisation:g} (assumed: --utilisation)"
    lines = [Line("throughput", tokens_per_s, "tokens/s", how)]
    tokens, what = args.max_steps * args.gradient_accumulation_steps * cost.tokens, f"{args.max_steps} steps"
    if args.max_steps <= 0:
        tokens = round(args.num_train_epochs * (data.tokens or 0))
        what = f"{args.num_train_epochs:g} epochs of {data.tokens_how}"
    if args.max_steps > 0 or data.tokens is not None:
        lines.append(Line("training time", tokens / tokens_per_s, "seconds", f"{what}, one process"))
    return lines


def _stages(
    recipe: Recipe,
    training: FakeTraining,
    cost: StepCost,
    options: PlanOptions,
    device: torch.device,
    flops_per_s: float,
) -> list[Line]:
    """How long distilling and measuring take if every answer is as long as it may be.

    A step reads the target's weights once for all its rows, of experts those that they take, or computes the rows'
    products, whichever is longer; prompts and caches are not counted.
    """
    target, flops = training.target, cost.flops()
    if "target forward" not in flops or not (heads := target.get_output_embeddings()):
        return []  # offline: the target's layers are not there
    head = heads.weight.numel()
    row_flops = flops["target forward"] / cost.tokens + 2 * head
    number_bytes = heads.weight.element_size()
    held = _size_of(target) - (0 if target.config.tie_word_embeddings else target.get_input_embeddings().weight.numel())
    bytes_per_s = options.memory_gb_per_s * 1e9 if options.memory_gb_per_s else read_bytes_per_s(device)
    source = "--memory-gb-per-s" if options.memory_gb_per_s else f"measured on this {device.type}"

    def step_s(rows: int) -> float:
        read_bytes = number_bytes * min(held, rows * row_flops / 2)
        return max(read_bytes / bytes_per_s, rows * row_flops / (flops_per_s * options.utilisation))

    lines, chosen, memory = [], recipe.data.distill, f"memory at {bytes_per_s / 1e9:.3g} GB/s ({source})"
    if chosen.engine in ROWS_AT_ONCE:
        option, limit = ROWS_AT_ONCE[chosen.engine], recipe.data.conversations.limit
        rows = int(chosen.options.get(option, engine_class(chosen.engine).Options.model_fields[option].default))
        seconds = (limit or 1000) * chosen.max_new_tokens / rows * step_s(rows)
        how = (
            f"{limit or 1000:,} answers of {chosen.max_new_tokens} tokens, {rows} at once by {chosen.engine} ({option})"
        )
        how += ", one copy of the target; " + memory
        there = (RunFolder(recipe).data / "tokens").is_dir()
        lines.append(Line("distilling", seconds, "seconds", f"{how}{'; there already' if there else ''}"))
    try:
        questions = load_questions(recipe.eval.questions, recipe.eval.limit_per_category, recipe.eval.limit_per_task)
    except UserError:  # told by doctor and eval
        return lines
    turns, eval_ = sum(len(question.turns) for question in questions), recipe.eval
    times = eval_.runs * len(eval_.temperatures) * (1 + len(eval_.methods))
    how = (
        f"{turns} turns of {eval_.max_new_tokens} tokens x {times} (runs, temperatures, methods and the loop without a "
    )
    how += f"draft), each token a step: with drafts it is less; {memory}"
    return [*lines, Line("measuring", turns * eval_.max_new_tokens * times * step_s(1), "seconds", how)]


def read_bytes_per_s(device: torch.device) -> float:
    """Measure how fast this device reads memory, in about a second."""
    values = torch.ones(READ_BYTES // 4, device=device)
    return READ_BYTES / _best_s(lambda: values.sum().item())


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measure what products of large square matrices reach on this device, in about a second."""
    size = 8192 if device.type == "cuda" else 512
    left = torch.randn(size, size, device=device).to(dtype)
    right = left.t().contiguous()
    (left @ right)[0, 0].item()  # the first product prepares the device
    return 2 * size**3 / _best_s(lambda: (left @ right)[0, 0].item())  # `item` waits until it is done


def _best_s(work: Callable[[], object]) -> float:
    """The shortest time of several: other work on this machine is not the device's fault."""
    best_s, end_s = float("inf"), time.perf_counter() + MEASURING_S
    while (begin_s := time.perf_counter()) < end_s or best_s == float("inf"):
        work()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return best_s


# ---- what fits ----


def _verdict(recipe: Recipe, cost: StepCost, options: PlanOptions) -> Verdict | None:
    """Say whether the step fits, and otherwise the first change by which it does with the usual margin."""
    if options.memory_gib is None:
        return None
    memory_bytes, need_bytes = round(options.memory_gib * 2**30), cost.peak[1].peak_bytes
    need = f"{need_bytes / 2**30:.3g} of {options.memory_gib:g} GiB"
    if need_bytes <= USABLE_FRAC * memory_bytes:
        return Verdict(memory_bytes, True, f"fits: {need}")
    fits = need_bytes <= memory_bytes
    ways = ways_out(recipe, need_bytes, options.labelled_share)
    way = next((way for way in ways if way.peak_bytes <= USABLE_FRAC * memory_bytes), None)
    advice = (
        "no single change of the recipe is enough: make several, split the target over several processes "
        "(data.features.sharded=true; `--processes N` says what each holds), or take a smaller target"
    )
    if way is not None:
        advice = f"{way} is {'the same training in ' if way.trains_the_same else ''}less"
    return Verdict(memory_bytes, fits, f"{'tight' if fits else 'does not fit'}: {need}; {advice}")


# ---- several processes ----


def set_ups(recipe: Recipe, args: DrafterTrainingArguments, batch: dict[str, Tensor], processes: int) -> list[SetUp]:
    """Compute what each process holds under every launch and place of the target, for a batch [B, S] of each.

    A step in one process gives the bytes of each kind at every phase's peak. Of N processes:

        drafter      DDP: whole, and a copy of the gradients in buckets. FSDP2: 1/N, whole while it runs, and gradients
                     whole in the backward. ZeRO-1: the optimiser's 1/N and fp32 copies of 1/N of the weights; -2:
                     gradients too; -3: weights too, whole while they are used.
        target       replicated; sharded (FSDP2): embedding, norm and LM head, 1/N of the layers, and one layer whole
                     while it runs; int8 and nf4 by bitsandbytes; offline: no layers, features from disk.

    Raises:
        UserError: As `FakeTraining`.
    """
    kind = load_drafter_class(recipe.drafter.kind)
    plain = recipe.model_copy(deep=True)
    plain.target.quantization, plain.data.features.source = None, "online"
    training = FakeTraining(plain, args)
    steps = dict.fromkeys(PLACEMENTS, training.step(batch).phases)
    layers = [
        sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in decoder_layers(training.target)
    ]
    saved = {
        name: saved_bytes(plain.target.model_copy(update={"quantization": name}), training.target)
        for name in ("int8", "nf4")
    }
    saved["sharded"] = sum(layers) - sum(layers) // processes
    del training
    if kind.offline_obstacle is None:
        plain.data.features.source = "offline"
        steps["offline"] = FakeTraining(plain, args).step(batch).phases
    found = []
    zero = [Launch("zero", processes, stage) for stage in (1, 2, 3)]
    for launch in (Launch("ddp", processes), Launch("fsdp", processes, 2), *zero):
        for place in PLACEMENTS:
            why_not = kind.split_obstacle if launch.splits_weights else None
            why_not = why_not or (kind.offline_obstacle if place == "offline" else None)
            why_not = why_not or (kind.whole_target_needed if place in ("sharded", "int8", "nf4") else None)
            of_phases = [
                _with_drafter_of(steps[place], name, launch, args.gradient_accumulation_steps)
                + (max(layers) if place == "sharded" and name == "target forward" else 0)
                for name in steps[place]
            ]
            size = None if why_not else max(of_phases) - saved.get(place, 0)
            found.append(SetUp(launch.name, place, processes, size, why_not))
    return found


def _with_drafter_of(phases: dict[str, Phase], name: str, launch: Launch, accumulation: int) -> int:
    """Return the peak bytes of a phase in one of several processes, with the target whole."""
    now, parts = phases[name].at_peak_bytes, launch.processes
    weights, gradients, optimiser = now["drafter"], now["gradients"], now["optimiser"]
    others = phases[name].peak_bytes - weights - gradients - optimiser
    trained = max(phase.at_peak_bytes["gradients"] for phase in phases.values())
    in_use = weights if name in ("drafter forward", "backward") else 0  # split weights are whole then
    if launch.strategy == "ddp":
        return others + weights + gradients + trained + optimiser
    if launch.strategy == "fsdp":
        # Between the batches of an accumulated step they stay whole.
        whole = trained if name == "backward" or (accumulation > 1 and name != "optimiser step") else 0
        return others + weights // parts + in_use + whole + trained // parts + optimiser // parts
    split_weights = weights // parts + in_use if launch.version == 3 else weights
    split_gradients = gradients if launch.version < 2 else trained // parts
    return others + split_weights + split_gradients + trained // parts + optimiser // parts


# ---- for people ----


def show_plan(plan: Plan, console: Console, memory_gib: float | None = None) -> None:
    """Print it; memory_gib: of the device, which set-ups that do not fit are marked by."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "amount", "how it was computed"):
        table.add_column(heading, justify="right" if heading == "amount" else "left", overflow="fold")
    for group, heading in GROUPS:
        table.add_row(f"[bold]{heading}[/bold]")
        for line in getattr(plan, group):
            table.add_row(f"  {line.what}", amount_of(line), escape(line.how))
        if group == "memory":
            phases = ", ".join(f"{name} {bytes_text(size)}" for name, size in plan.phase_peak_bytes.items())
            table.add_row("  peaks", "", phases)
    console.print(table, soft_wrap=False)  # folded at the terminal's width
    if plan.set_ups:
        console.print(_of_set_ups(plan.set_ups, memory_gib))
    for note in plan.notes:
        console.print(f"Note: {escape(note)}.")
    if plan.verdict is not None:
        colour = "green" if plan.verdict.sentence.startswith("fits") else "yellow" if plan.verdict.fits else "red"
        console.print(f"[bold {colour}]{plan.verdict.sentence}[/bold {colour}]")


def _of_set_ups(set_ups: list[SetUp], memory_gib: float | None) -> Table:
    """A row for each launch, a column for each place of the target: bytes, a cross where these do not fit, a dash."""
    title = f"Memory of each of {set_ups[0].processes} processes, by where the target is"
    table = Table("", box=None, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
    room_bytes = float("inf") if memory_gib is None else USABLE_FRAC * memory_gib * 2**30
    rows: dict[str, list[str]] = {}
    for each in set_ups:
        mark = "" if each.bytes is None or each.bytes <= room_bytes else " ✗"
        rows.setdefault(each.launch, []).append("-" if each.bytes is None else bytes_text(each.bytes) + mark)
    for placement in PLACEMENTS:
        table.add_column(placement, justify="right")
    for launch, cells in rows.items():
        table.add_row(f"  {launch}", *cells)
    return table


def amount_of(line: Line) -> str:
    """`15.0 GiB`, `7.9 MFLOP/token`, `3 h 20 min`."""
    if line.unit.startswith("bytes"):
        return bytes_text(line.amount) + line.unit.removeprefix("bytes")
    if line.unit == "seconds":
        minutes = round(line.amount / 60)
        return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "< 1 min"
    if line.unit.startswith("tokens"):
        return f"{line.amount:,.0f} {line.unit}"
    amount, prefix = scaled(line.amount, 1000, ("", "k", "M", "G", "T", "P"))
    if line.unit == "parameters":
        return f"{amount:.3g} {prefix.replace('G', 'B')}"
    return f"{amount:.3g} {prefix}FLOP/token"
