"""`draftsmith plan`: what training a recipe will need, from configs alone, before any weights are downloaded.

Memory and FLOPs are those of `estimate.py`; disk follows from the number of tokens, time from FLOPs and a rate, given
or measured. Where a step does not fit, lines of the recipe are proposed that make it smaller.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from draftsmith.data.distill.token_dataset import answer_lengths, load_tokens, row_lengths
from draftsmith.data.engines.engine import engine_class
from draftsmith.data.sources.mixture import load_conversations
from draftsmith.data.sources.questions import load_questions
from draftsmith.errors import UserError
from draftsmith.files import bytes_text, free_bytes_at, scaled
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.cpu_kernels import packable_bytes
from draftsmith.models.target.features import decoder_layers, required_layers
from draftsmith.models.target.loading import target_device
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.models.target.text_model import running_sentence
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.rows import PackedRows, split_rows
from draftsmith.train.drafter.trainer import collate_right_padded
from draftsmith.train.drafter.training_arguments import GLOBAL_BATCH, DrafterTrainingArguments, training_arguments
from draftsmith.train.plan.estimate import StepCost, step_cost, tensor_bytes, trained_parameters

# Left free: the device's own context, the kernels' workspaces, fragmentation.
USABLE_FRAC, WORTH_FRAC = 0.9, 0.98  # a change of the recipe that saves less than 2 % is not proposed
GROUPS = ("parameters", "memory", "disk", "time")
PARTS = {
    "target": "target weights, frozen",
    "drafter": "drafter weights",
    "gradients": "gradients",
    "optimiser": "optimiser state",
    "features": "target features of the batch",
    "activations": "activations saved for the backward",
    "loss": "loss: a chunk of logits, own heads' gradients",
}
ROWS_AT_ONCE = {"transformers": "batch_size", "vllm": "concurrency", "openai": "concurrency_per_server"}  # options
PLACEMENTS = ("replicated", "sharded", "int8", "nf4", "offline")
LAUNCHES = ("DDP", "FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")
ASSUMED_ANSWERS = 1000  # where neither the recipe nor a local file says how many are distilled


@dataclass(frozen=True)
class Line:
    """A figure and where it comes from."""

    what: str
    amount: float
    unit: str
    how: str


@dataclass(frozen=True)
class Plan:
    """Result of `draftsmith plan`. `memory` adds up to `peak_bytes`; `set_ups`: bytes of a process by launch."""

    name: str
    parameters: list[Line]
    memory: list[Line]
    peak_bytes: int
    disk: list[Line]
    time: list[Line]
    set_ups: dict[str, dict[str, int]]
    verdict: str | None
    fits: bool | None
    notes: list[str]


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command line.

    Args:
        memory_gib: Memory of the device, for a verdict.
        peak_tflops: Peak rate of the device; default: measured here.
        memory_gb_per_s: Read bandwidth of the device's memory, in 10^9 bytes per second; default: measured here.
        utilisation: Share of the peak rate that a training step reaches.
        labelled_share: Plan for rows of `data.max_length_tokens` with this share of labelled tokens.
        processes: Number of processes, to compute the bytes of each under every set-up, and the times of all together.
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
    """Plan the recipe's training; read the target's config, local conversations and, if they exist, distilled tokens.

    Raises:
        UserError: The target's config cannot be read, or a key or option is wrong.
    """
    options, device, args = options or PlanOptions(), target_device(recipe.target), get_arguments(recipe)
    batch, num_tokens, how = training_batch(recipe, args.per_device_train_batch_size, options.labelled_share)
    counted, is_distilled = count_conversations(recipe), (RunFolder(recipe).data / "tokens").is_dir()
    if counted is not None and not is_distilled:
        num_tokens = counted.conversations * recipe.data.max_length_tokens
    cost = step_cost(recipe, args, batch)
    trained, target = trained_parameters(cost.drafter), cost.target
    num_trained, num_target = (sum(p.numel() for p in each) for each in (trained, target.parameters()))
    parameters = [
        Line("trainable", num_trained, "parameters", f"drafter.kind {recipe.drafter.kind}"),
        Line("target", num_target, "parameters", f"{recipe.target.model}, from its config"),
    ]
    memory = [Line(part, amount, "bytes", PARTS[part]) for part, amount in cost.bytes.items()]
    rows = f"{batch['input_ids'].shape[0]} x {batch['input_ids'].shape[1]} tokens, {how}"
    memory.append(Line("memory of a step", cost.peak_bytes, "bytes", f"sum, in the {cost.peak}; batch of {rows}"))
    notes = [f"the target is run with {running_sentence(target)}"]
    if device.type == "cpu" and (packable := packable_bytes(target)):
        notes.append(f"distilling and decoding on this CPU may keep packed copies of layers: {bytes_text(packable)}")
    more = "" if options.processes > 1 else "; `--processes N` plans several"
    notes.append(f"a CUDA context, the kernels' workspaces and fragmentation come on top{more}")
    if num_tokens is None:
        notes.append("data.conversations.limit is not set, so that the time of training is not known before distilling")
    verdict, fits = _verdict(recipe, cost.peak_bytes, options)
    set_ups = _set_ups(recipe, args, batch, cost, options.processes) if options.processes > 1 else {}
    disk = [_feature_cache(recipe, cost, num_tokens)]
    times = _times(recipe, args, cost, options, device, num_tokens, counted)
    return Plan(recipe.name, parameters, memory, cost.peak_bytes, disk, times, set_ups, verdict, fits, notes)


@dataclass(frozen=True)
class Counted:
    """Numbers of conversations in local files, and of their turns that the target will answer."""

    conversations: int
    answers: int


def count_conversations(recipe: Recipe) -> Counted | None:
    """Count the conversations that training would read; None if a source is no local file, or cannot be read."""
    chosen = recipe.data.conversations
    if not all(Path(source.source).expanduser().is_file() for source in chosen.sources):
        return None
    lenient = chosen.model_copy(update={"skip_invalid": True, "decontaminate": []})
    data = recipe.data.model_copy(update={"conversations": lenient})
    conversations = answers = 0
    try:
        for each in load_conversations(recipe.model_copy(update={"data": data})):
            conversations += 1
            answers += sum(turn.role == "user" for turn in each.turns)
    except UserError:  # reported by doctor and distill
        return None
    return Counted(conversations, answers)


def get_arguments(recipe: Recipe) -> DrafterTrainingArguments:
    """Return the arguments of the recipe's training on the target's device."""
    use_cpu = target_device(recipe.target).type == "cpu"
    return training_arguments(recipe.train, RunFolder(recipe).drafter / "checkpoints", recipe.seed, use_cpu=use_cpu)


def training_batch(
    recipe: Recipe, batch_size: int, labelled_share: float | None = None
) -> tuple[dict[str, Tensor], int | None, str]:
    """Return the largest batch that can come, the number of all tokens if it is known, and how the batch was chosen.

    It has the longest and the most labelled rows of the distilled tokens, packed where the recipe packs them. Without
    any, or with a `labelled_share`, it has rows of `data.max_length_tokens`.
    """
    folder, length, limit = RunFolder(recipe), recipe.data.max_length_tokens, recipe.data.conversations.limit
    tokens = load_tokens(folder, recipe.name) if (folder.data / "tokens").is_dir() else None
    num_tokens = None if limit is None else limit * length
    if tokens is not None:
        tokens, _ = split_rows(tokens, recipe.data.eval_rows_frac, recipe.data.train_answer_tokens)
        num_tokens = sum(row_lengths(tokens))
    if tokens is None or labelled_share is not None:
        num_prompt = length - round((1.0 if labelled_share is None else labelled_share) * length)
        row = {"input_ids": [0] * length, "loss_mask": [0] * num_prompt + [1] * (length - num_prompt)}
        how = f"assumed: {1 - num_prompt / length:.0%} of data.max_length_tokens labelled (--labelled-share)"
        return collate_right_padded([row] * batch_size), num_tokens, how
    rows: Any = tokens
    lengths, labels = np.array(row_lengths(tokens)), np.array(answer_lengths(tokens))
    if recipe.data.packing:
        rows = PackedRows(tokens, length)
        lengths, labels = (np.array([each[row].sum() for row in rows.rows]) for each in (lengths, labels))
    longest = int(lengths.argmax())
    others = [int(row) for row in np.argsort(-labels, kind="stable") if row != longest][: batch_size - 1]
    batch = collate_right_padded([rows[row] for row in (longest, *others)])
    return batch, num_tokens, f"the longest and the most labelled of {folder.data / 'tokens'}"


def _feature_cache(recipe: Recipe, cost: StepCost, num_tokens: int | None) -> Line:
    """Return the size of the offline feature cache."""
    what, chosen, obstacle = "offline feature cache", recipe.data.features, cost.drafter.unsupported.get("offline")
    if obstacle is not None:
        return Line(what, 0, "bytes", f"not for drafter.kind {recipe.drafter.kind}: {obstacle}")
    layers, size = len(required_layers(cost.drafter)), cost.drafter.config.hidden_size
    token_bytes = layers * size * getattr(torch, chosen.dtype).itemsize
    how = f"{layers} feature layers x {size} in {chosen.dtype}"
    if num_tokens is None:
        how += "; data.conversations.limit is not set and nothing is distilled yet"
        return Line(what, token_bytes, "bytes a token", how)
    assumed = "" if (RunFolder(recipe).data / "tokens").is_dir() else " at most, as nothing is distilled yet"
    free = bytes_text(free_bytes_at(RunFolder(recipe).features))
    how += f" x {num_tokens:,} tokens{assumed}; {free} are free on that disk"
    how += "; training online needs none of it" if chosen.source == "online" else ""
    return Line(what, token_bytes * num_tokens, "bytes", how)


# ---- time ----


def _times(
    recipe: Recipe,
    args: DrafterTrainingArguments,
    cost: StepCost,
    options: PlanOptions,
    device: torch.device,
    num_tokens: int | None,
    counted: Counted | None,
) -> list[Line]:
    """Return tokens/s of training in one process, and the time of each stage whose length is known.

    In distilling and measuring every answer is as long as it may be. A step of decoding reads the target's weights once
    for all its rows, or computes the rows' products, whichever takes longer; prompts and caches are not counted. Of N
    processes each does 1/N of the work: what they tell each other is not counted.
    """
    num, together = options.processes, f"{options.processes} processes" if options.processes > 1 else "one process"
    target, seconds, rates = cost.target, 0.0, dict[torch.dtype, float]()
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    for part, flops in cost.flops.items():
        is_target = part == "target forward" or (part == "LM head" and half is None)
        dtype = target.dtype if is_target else half or cost.drafter.dtype
        if dtype not in rates:
            peak = matmul_flops_per_s(device, dtype) if options.peak_tflops is None else options.peak_tflops * 1e12
            rates[dtype] = peak * options.utilisation
        seconds += flops / rates[dtype]
    source = (
        f"measured on this {device.type}" if options.peak_tflops is None else f"--peak-tflops {options.peak_tflops:g}"
    )
    rate = cost.tokens / seconds
    how = f"of one process: {source}, x utilisation {options.utilisation:g} (--utilisation)"
    lines = [Line("training", rate, "tokens/s", how)]
    trained_tokens, what = args.num_train_epochs * (num_tokens or 0), f"{args.num_train_epochs:g} epochs"
    if args.max_steps > 0:
        trained_tokens = args.max_steps * args.gradient_accumulation_steps * cost.tokens
        what = f"{args.max_steps} steps"
    if trained_tokens:
        how = f"{what}, {trained_tokens:,.0f} tokens, {together}"
        lines.append(Line("training", trained_tokens / rate / num, "seconds", how))
    head, target_flops = target.get_output_embeddings(), cost.flops.get("target forward")
    if target_flops is None or head is None:
        return lines  # offline: the target's layers are not there
    read_rate = options.memory_gb_per_s * 1e9 if options.memory_gb_per_s else read_bytes_per_s(device)
    row_flops = target_flops / cost.tokens + 2 * head.weight.numel()
    held_bytes = tensor_bytes(target.parameters())
    if not target.config.tie_word_embeddings:
        held_bytes -= tensor_bytes([target.get_input_embeddings().weight])

    def step_s(rows: int) -> float:
        read_bytes = min(held_bytes, rows * row_flops / 2 * head.weight.element_size())
        return max(read_bytes / read_rate, rows * row_flops / rates[target.dtype])

    chosen, limit, eval_ = recipe.data.distill, recipe.data.conversations.limit, recipe.eval
    if chosen.engine in ROWS_AT_ONCE:
        option = ROWS_AT_ONCE[chosen.engine]
        at_once = int(chosen.options.get(option, engine_class(chosen.engine).Options.model_fields[option].default))
        answers = limit or ASSUMED_ANSWERS if counted is None else counted.answers
        copies = 1
        if chosen.engine == "vllm":  # which starts as many copies as fit on the GPUs, unless the recipe says
            fitting = num // int(chosen.options.get("tensor_parallel_size", 1))
            copies = int(chosen.options.get("data_parallel_size") or max(1, fitting))
        how = (
            f"{answers:,} answers of {chosen.max_new_tokens} tokens, {at_once} at a time by {chosen.engine} ({option})"
        )
        how += f", {copies} copies of the target" if copies > 1 else ""
        how += "; assumed, as data.conversations.limit is not set" if limit is None and counted is None else ""
        seconds = answers * chosen.max_new_tokens / at_once * step_s(at_once) / copies
        lines.append(Line("distilling", seconds, "seconds", how))
    try:
        questions = load_questions(eval_.questions, eval_.limit_per_category, eval_.limit_per_task)
    except UserError:  # reported by doctor and eval
        return lines
    turns = sum(len(question.turns) for question in questions)
    times = eval_.runs * len(eval_.temperatures) * (1 + len(eval_.methods))
    how = f"{turns} turns of {eval_.max_new_tokens} tokens x {times} (runs, temperatures, methods) at most"
    how += f", {together} (eval --processes {num})" if num > 1 else ""
    return [*lines, Line("measuring", turns * eval_.max_new_tokens * times * step_s(1) / num, "seconds", how)]


def read_bytes_per_s(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Measure how fast this device reads memory, in about a second."""
    values = torch.ones(num_bytes // 4, device=device)
    return num_bytes / _shortest_s(lambda: values.sum().item())


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate of products of large square matrices on this device, in about a second."""
    size = 8192 if device.type == "cuda" else 512
    left = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _shortest_s(lambda: (left @ left)[0, 0].item())  # `item` waits until it is done


def _shortest_s(work: Callable[[], object], measuring_s: float = 0.5) -> float:
    """Return the shortest time of several: other work on this machine is not the device's fault."""
    work()  # prepares the device
    times, end_s = list[float](), time.perf_counter() + measuring_s
    while not times or time.perf_counter() < end_s:
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return min(times)


# ---- what fits ----


def _verdict(recipe: Recipe, need_bytes: int, options: PlanOptions) -> tuple[str | None, bool | None]:
    """Return whether the step fits, in words and as a bool, with the first change that makes it fit with a margin."""
    if options.memory_gib is None:
        return None, None
    memory_bytes = options.memory_gib * 2**30
    need = f"{need_bytes / 2**30:.3g} of {options.memory_gib:g} GiB"
    if need_bytes <= USABLE_FRAC * memory_bytes:
        return f"fits: {need}", True
    ways = ways_out(recipe, need_bytes, options.labelled_share)
    way = next((text for text, size in ways if size <= USABLE_FRAC * memory_bytes), None)
    fits = need_bytes <= memory_bytes
    advice = f"less with {way}" if way else "no single change of the recipe is enough: make several, split the target "
    advice += "" if way else "(data.features.sharded=true; --processes), or take a smaller target"
    return f"{'tight' if fits else 'does not fit'}: {need}; {advice}", fits


def ways_out(recipe: Recipe, need_bytes: int, labelled_share: float | None = None) -> Iterator[tuple[str, int]]:
    """Yield lines of the recipe by which a step needs less than `need_bytes`, with their bytes.

    Smaller batches come first: with them the training stays the same.
    """
    args, options = get_arguments(recipe), recipe.drafter.options
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    changes: list[dict[str, Any]] = []
    for fewer in sorted({max(1, rows // 2), max(1, rows // 4), 1} - {rows}, reverse=True):
        more = (
            {} if GLOBAL_BATCH in recipe.train else {"train.gradient_accumulation_steps": accumulation * rows // fewer}
        )
        changes += [{"train.per_device_train_batch_size": fewer, **more}] if rows % fewer == 0 else []
    for key, value, helps in (
        ("data.max_length_tokens", recipe.data.max_length_tokens // 2, True),
        ("target.dtype", "bfloat16", recipe.target.dtype not in ("bfloat16", "float16")),
        ("train.bf16", True, not (args.bf16 or args.fp16)),
        ("data.features.source", "offline", recipe.data.features.source == "online"),
        ("drafter.options.lm_heads", "shared", options.get("lm_heads") in (None, "separate")),
        ("drafter.options.draft_vocab_size", 32_000, options.get("draft_vocab_size") is None),
        ("train.optim", "adafactor", args.optim.value.startswith("adamw_torch")),
    ):
        changes += [{key: value}] if helps else []
    for change in changes:
        values = recipe.model_dump()
        for key, value in change.items():
            section: Any = values
            *sections, name = key.split(".")
            for part in sections:
                section = section[part]
            section[name] = value
        try:
            changed = Recipe.model_validate(values)
            args = get_arguments(changed)
            batch, *_ = training_batch(changed, args.per_device_train_batch_size, labelled_share)
            # Rows on disk may be those of the recipe as it was.
            batch = {name: rows[:, : changed.data.max_length_tokens] for name, rows in batch.items()}
            size = step_cost(changed, args, batch).peak_bytes
        except (ValueError, UserError):  # no recipe, or not for this kind or this target
            continue
        if size < WORTH_FRAC * need_bytes:
            lines = " ".join(f"{key}={'true' if value is True else value}" for key, value in change.items())
            yield f"{lines} ({bytes_text(size)})", size


def _set_ups(
    recipe: Recipe, args: DrafterTrainingArguments, batch: dict[str, Tensor], cost: StepCost, processes: int
) -> dict[str, dict[str, int]]:
    """Return the bytes of one of N processes by launch and by place of the target; without those that cannot be done.

    The drafter: DDP holds it whole, and a copy of the gradients (buckets). FSDP2: 1/N of all, weights and gradients
    also whole in the backward. ZeRO-1: 1/N of the optimizer's state and an fp32 copy of 1/N of the weights; ZeRO-2: 1/N
    of the gradients; ZeRO-3: 1/N of the weights, whole in use. The target: whole; 1/N of its layers (FSDP2), of which
    none is whole in the backward; in 8 or 4 bits; or, offline, without layers.
    """
    kind, gradients = load_drafter_class(recipe.drafter.kind), tensor_bytes(trained_parameters(cost.drafter))
    plain = recipe.model_copy(deep=True)
    plain.target.quantization, plain.data.features.source = None, "online"
    whole = step_cost(plain, args, batch)
    layers = [tensor_bytes(layer.parameters()) for layer in decoder_layers(whole.target)]
    rest = {"replicated": whole.peak_bytes}
    if "split_target" not in kind.unsupported:
        rest["sharded"] = whole.peak_bytes - sum(layers) + sum(layers) // processes
        for bits in ("int8", "nf4"):
            quantized = plain.target.model_copy(update={"quantization": bits})
            rest[bits] = whole.peak_bytes - saved_bytes(quantized, whole.target)
    if "offline" not in kind.unsupported:
        plain.data.features.source = "offline"
        rest["offline"] = step_cost(plain, args, batch).peak_bytes
    weights, state, held, part = (
        whole.bytes["drafter"],
        whole.bytes["optimiser"],
        whole.bytes["gradients"],
        1 / processes,
    )
    drafter = {
        "DDP": weights + held + gradients + state,
        "FSDP2": weights * (1 + part) + gradients * (1 + part) + state * part,
        "ZeRO-1": weights + held + (gradients + state) * part,
        "ZeRO-2": weights + (2 * gradients + state) * part,
        "ZeRO-3": weights * (1 + part) + (2 * gradients + state) * part,
    }
    split = ("FSDP2", "ZeRO-3") if "split_weights" in kind.unsupported else ()
    alone = weights + held + state
    return {
        launch: {place: round(size - alone + drafter[launch]) for place, size in rest.items()}
        for launch in LAUNCHES
        if launch not in split
    }


# ---- for people ----


def show_plan(plan: Plan, console: Console, memory_gib: float | None = None) -> None:
    """Print the plan; with `memory_gib`, of the device, mark the set-ups that do not fit."""
    table = Table("", "amount", "how it was computed", box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.columns[1].justify, table.columns[2].overflow = "right", "fold"
    for group in GROUPS:
        table.add_row(f"[bold]{group.capitalize()}[/bold]")
        for line in getattr(plan, group):
            table.add_row(f"  {line.what}", format_amount(line), escape(line.how))
    console.print(table, soft_wrap=False)  # folded at the terminal's width
    if plan.set_ups:
        room_bytes = float("inf") if memory_gib is None else USABLE_FRAC * memory_gib * 2**30
        per_process = Table("bytes of each process", *PLACEMENTS, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for launch, sizes in plan.set_ups.items():
            cells = {place: bytes_text(size) + " ✗" * (size > room_bytes) for place, size in sizes.items()}
            per_process.add_row(launch, *(cells.get(place, "-") for place in PLACEMENTS))
        console.print(per_process)
    for note in plan.notes:
        console.print(f"Note: {escape(note)}.")
    if plan.verdict is not None:
        colour = "green" if plan.verdict.startswith("fits") else "yellow" if plan.fits else "red"
        console.print(f"[bold {colour}]{plan.verdict}[/bold {colour}]")


def format_amount(line: Line) -> str:
    """Return `15.0 GiB`, `252 M`, `1,234 tokens/s` or `3 h 20 min`."""
    if line.unit.startswith("bytes"):
        return bytes_text(line.amount) + line.unit.removeprefix("bytes")
    if line.unit == "seconds":
        minutes = round(line.amount / 60)
        return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "< 1 min"
    if line.unit == "parameters":
        amount, prefix = scaled(line.amount, 1000, ("", "k", "M", "G", "T"))
        return f"{amount:.3g} {prefix.replace('G', 'B')}"
    return f"{line.amount:,.0f} {line.unit}"
