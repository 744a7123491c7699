"""`draftsmith plan`: what training a recipe will need, from configs alone, before any weights are downloaded.

Memory and FLOPs come from one training step on tensors without values (`step_cost.py`); disk from the number of tokens;
throughput from the FLOPs and a rate, given or measured. Every line says how it was computed.

Shapes: B batch, S sequence, F features.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens
from draftsmith.models.target.loading import target_device
from draftsmith.models.target.packed_linear import packable_bytes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder, bytes_text, free_bytes_at
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.training_arguments import training_arguments
from draftsmith.train.plan.batches import Batch, TrainingData, training_data
from draftsmith.train.plan.data_scaling import stored_fits, what_more_data_is_worth
from draftsmith.train.plan.set_ups import SetUp, set_ups
from draftsmith.train.plan.step_cost import FakeTraining, StepCost

MEASURING_S = 0.5
# Left free: the device's own context, the kernels' workspaces, fragmentation.
USABLE_FRAC = 0.9


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
    verdict: Verdict | None
    notes: list[str]
    set_ups: list[SetUp]


@dataclass(frozen=True)
class PlanOptions:
    """What the command line adds to the recipe.

    Args:
        memory_gib: Of the device, for a verdict.
        peak_tflops: Of the device; measured here by default.
        utilisation: Share of that rate which a training step reaches.
        labelled_share: Plan for rows of `data.max_length_tokens` of which this share carries labels, whatever data
            there is.
        processes: Of a launch, for what each of them holds under every set-up.
    """

    memory_gib: float | None = None
    peak_tflops: float | None = None
    utilisation: float = 0.4
    labelled_share: float | None = None
    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UserError(f"option --processes must be at least 1, not {self.processes}")
        for key, value, most in (
            ("memory-gib", self.memory_gib, None),
            ("peak-tflops", self.peak_tflops, None),
            ("utilisation", self.utilisation, 1),
            ("labelled-share", self.labelled_share, 1),
        ):
            if value is not None and not (value > 0 and (most is None or value <= most)):
                limit = "" if most is None else f" and at most {most}"
                raise UserError(f"option --{key} must be above 0{limit}, not {value:g}")


def make_plan(recipe: Recipe, options: PlanOptions | None = None) -> Plan:
    """Plan the recipe's training; loads the target's config and, if they exist, the distilled tokens.

    Raises:
        UserError: The target's config cannot be read, or a key or option is wrong.
    """
    options = options or PlanOptions()
    run = RunFolder(recipe)
    device = target_device(recipe.target)
    args = training_arguments(recipe.train, run.drafter / "checkpoints", recipe.seed, use_cpu=device.type == "cpu")
    planned, notes = plannable(recipe)
    data = training_data(recipe, args.per_device_train_batch_size, options.labelled_share)
    notes += _more_data(recipe)
    training = FakeTraining(planned, args)
    largest = training.step(data.largest.inputs)
    typical = largest if data.typical is data.largest else training.step(data.typical.inputs)
    if args.gradient_accumulation_steps > 1:
        notes.append("gradients stay while the next batch of an accumulated step is computed: counted")
    if device.type == "cpu" and (packable := packable_bytes(training.target)):
        copies = bytes_text(packable)
        notes.append(
            f"distilling and decoding on this CPU may keep packed copies of the target's layers: up to {copies}"
        )
    notes.append(
        "one process with the target whole; `--processes N` shows what each of several holds under every set-up. A "
        "CUDA context, the kernels' workspaces and fragmentation come on top"
    )
    return Plan(
        name=recipe.name,
        parameters=_parameters(recipe, training),
        batches=[_batch("largest batch", data.largest), _batch("typical batch", data.typical)],
        memory=_memory(training, args, largest),
        peak_bytes=largest.peak[1].peak_bytes,
        phase_peak_bytes={name: phase.peak_bytes for name, phase in largest.phases.items()},
        disk=[_cache(recipe, training, data)],
        flops_per_token=_flops(typical),
        throughput=_throughput(training, args, typical, data, options, device),
        verdict=_verdict(training, args, largest, data.largest, options.memory_gib),
        notes=notes,
        set_ups=set_ups(planned, args, data.largest.inputs, options.processes) if options.processes > 1 else [],
    )


def _more_data(recipe: Recipe) -> list[str]:
    """What was measured elsewhere, beside what there is here."""
    fits, run = stored_fits(), RunFolder(recipe)
    if fits is None:
        return []
    distilled = (run.data / "tokens").is_dir()
    answer_tokens = sum(answer_lengths(load_tokens(run, recipe.name))) if distilled else None
    sentence = what_more_data_is_worth(fits, recipe.drafter.kind, answer_tokens)
    return [] if sentence is None else [sentence]


def plannable(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Compiled attention cannot run without values; the kernels of `folded` save the same for the backward pass."""
    if recipe.drafter.options.get("attention") != "flex":
        return recipe, []
    changed = recipe.model_copy(deep=True)
    changed.drafter.options["attention"] = "folded"
    return changed, ["drafter.options.attention: flex is planned as folded, which saves the same for the backward pass"]


# ---- the lines ----


def _parameters(recipe: Recipe, training: FakeTraining) -> list[Line]:
    trained = sum(parameter.numel() for parameter in training.trained)
    lent = {id(parameter) for parameter in training.drafter.parameters()}  # a LoRA lies in both
    target = sum(parameter.numel() for parameter in training.target.parameters() if id(parameter) not in lent)
    offline = recipe.data.features.source == "offline"
    kept = "; its layers are not held, as data.features.source=offline needs none" if offline else ""
    how = f"drafter.kind {recipe.drafter.kind}: {trained / target:.1%} of the target's"
    return [
        Line("trainable parameters", trained, "parameters", how),
        Line("target parameters", target, "parameters", f"{recipe.target.model}, from its config{kept}"),
    ]


def _batch(what: str, batch: Batch) -> Line:
    return Line(what, float(batch.inputs["attention_mask"].sum()), "tokens", batch.describe())


def _memory(training: FakeTraining, args: TrainingArguments, cost: StepCost) -> list[Line]:
    """Of the instant at which most memory is in use."""
    name, phase = cost.peak
    at_peak = phase.at_peak_bytes
    layers = len(training.drafter.feature_layers)
    logits_bytes = max(other.at_peak_bytes["logits"] for other in cost.phases.values())
    explained = {
        "target": ("target weights", f"{_dtypes(training.target.parameters())}, frozen"),
        "drafter": ("drafter weights", f"{_dtypes(training.drafter.parameters())}"),
        "gradients": ("gradients", "that exist at the peak"),
        "optimiser": ("optimiser state", f"what {args.optim.value} makes in its first step"),
        "features": ("target features", f"{layers} layer{'s' if layers > 1 else ''}, for the whole batch"),
        "activations": ("activations", "saved for the backward pass, and what the peak works on"),
        "logits": ("loss", f"logits in chunks; {logits_bytes / 2**20:,.0f} MiB while the drafter runs forward"),
    }
    lines = [Line(what, at_peak[kind], "bytes", how) for kind, (what, how) in explained.items()]
    how = f"sum, in the {name} with the largest batch"
    return [*lines, Line("memory of a step", phase.peak_bytes, "bytes", how)]


def _cache(recipe: Recipe, training: FakeTraining, data: TrainingData) -> Line:
    chosen, folder = recipe.data.features, RunFolder(recipe).features
    obstacle = training.drafter.offline_obstacle
    if obstacle is not None:
        return Line("offline feature cache", 0, "bytes", f"not for drafter.kind {recipe.drafter.kind}: {obstacle}")
    layers, size = training.drafter.layers_read, training.target.config.get_text_config().hidden_size
    number_bytes = getattr(torch, chosen.dtype).itemsize
    bytes_per_token = len(layers) * size * number_bytes
    how = (
        f"{len(layers)} feature layer{'s' if len(layers) > 1 else ''} x {size} x {number_bytes} bytes ({chosen.dtype})"
    )
    if data.tokens is None:
        return Line("offline feature cache", bytes_per_token, "bytes a token", f"{how}; how many: {data.tokens_how}")
    how += f" x {data.tokens:,} tokens ({data.tokens_how}); {bytes_text(free_bytes_at(folder))} are free on that disk"
    how += "; training online needs none of it" if chosen.source == "online" else ""
    return Line("offline feature cache", bytes_per_token * data.tokens, "bytes", how)


def _flops(cost: StepCost) -> list[Line]:
    """Per token that is no padding, so that it goes with the tokens/s of the training log."""
    how = {
        "target forward": "products and causal attention of its layers, with the typical batch",
        "drafter forward": "of the rows that are computed: real tokens and masks",
        "LM head": "labelled rows only, forward and backward",
        "backward": "of the drafter",
    }
    lines = [Line(name, flops / cost.tokens, "FLOPs a token", how[name]) for name, flops in cost.flops().items()]
    return [*lines, Line("all", sum(line.amount for line in lines), "FLOPs a token", "sum")]


def _throughput(
    training: FakeTraining,
    args: TrainingArguments,
    cost: StepCost,
    data: TrainingData,
    options: PlanOptions,
    device: torch.device,
) -> list[Line]:
    """Tokens/s, and the time of the recipe's training if its length is known."""
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
    seconds = sum(flops / rates[dtypes[name]] for name, flops in cost.flops().items()) / options.utilisation
    tokens_per_s = cost.tokens / seconds
    how = f"{source}, x utilisation {options.utilisation:g} (assumed: --utilisation)"
    lines = [Line("throughput", tokens_per_s, "tokens/s", how)]
    if data.tokens is None and args.max_steps <= 0:
        return lines
    if args.max_steps > 0:
        tokens, what = args.max_steps * args.gradient_accumulation_steps * cost.tokens, f"{args.max_steps} steps"
    else:
        tokens = round(args.num_train_epochs * (data.tokens or 0))
        what = f"{args.num_train_epochs:g} epochs of {data.tokens_how}"
    lines.append(Line("training time", tokens / tokens_per_s, "seconds", f"{what}, one process"))
    return lines


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """What products of large square matrices reach here, in about a second."""
    size = 8192 if device.type == "cuda" else 512
    left = torch.randn(size, size, device=device).to(dtype)
    right = left.t().contiguous()
    (left @ right)[0, 0].item()  # the first product prepares the device
    # The best of them: other work on this machine is not the device's fault.
    best_s, end_s = float("inf"), time.perf_counter() + MEASURING_S
    while (begin_s := time.perf_counter()) < end_s or best_s == float("inf"):
        (left @ right)[0, 0].item()  # `item` waits until it is done
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * size**3 / best_s


# ---- the verdict ----


def _verdict(
    training: FakeTraining, args: TrainingArguments, cost: StepCost, batch: Batch, memory_gib: float | None
) -> Verdict | None:
    if memory_gib is None:
        return None
    memory_bytes = round(memory_gib * 2**30)
    need_bytes = cost.peak[1].peak_bytes
    need = f"{need_bytes / 2**30:.3g} of {memory_gib:g} GiB"
    if need_bytes <= USABLE_FRAC * memory_bytes:
        return Verdict(memory_bytes, True, f"fits: {need}")
    fits = need_bytes <= memory_bytes
    begin = "tight" if fits else "does not fit"
    return Verdict(memory_bytes, fits, f"{begin}: {need}; {_way_out(training, args, need_bytes, batch, memory_bytes)}")


def _way_out(training: FakeTraining, args: TrainingArguments, need_bytes: int, batch: Batch, memory_bytes: int) -> str:
    """The largest batch with the usual margin: memory grows linearly with the rows."""
    rows = batch.rows
    one_bytes = training.step({name: value[:1] for name, value in batch.inputs.items()}).peak[1].peak_bytes
    room_bytes = USABLE_FRAC * memory_bytes - one_bytes
    if room_bytes < 0:
        smaller = "" if training.target.dtype.itemsize <= 2 else "set target.dtype=bfloat16, "
        config = training.drafter.config
        could_be = getattr(config, "in_parts", None) is False and config.num_depths > 1
        parts = "set drafter.options.in_parts=true, " if could_be else ""
        return (
            f"one row alone needs {one_bytes / 2**30:.3g} GiB: {smaller}lower data.max_length_tokens, {parts}"
            "split the target over several processes (data.features.sharded=true; `--processes N` says what each "
            "holds), or take a smaller target"
        )
    fitting = 1 + int(room_bytes / max((need_bytes - one_bytes) / (rows - 1), 1)) if rows > 1 else 1
    # Keep the product: the same training.
    fitting = max(size for size in range(1, min(fitting, rows) + 1) if rows % size == 0)
    accumulation = args.gradient_accumulation_steps * rows // fitting
    return (
        f"train.per_device_train_batch_size={fitting} train.gradient_accumulation_steps={accumulation} is the same "
        "training in less"
    )


def _dtypes(parameters: Any) -> str:
    """`8.03 B in bfloat16`."""
    counts: dict[torch.dtype, int] = {}
    for parameter in parameters:
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return ", ".join(f"{count:,} in {_name(dtype)}" for dtype, count in counts.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
