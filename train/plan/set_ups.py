"""Which set-up of several processes a recipe's training fits into: what each of them holds, from one step's plan.

A step in one process gives the bytes of each kind at every phase's peak. Of N processes:

    drafter      DDP: whole, and a copy of the gradients in buckets. FSDP2: 1/N, whole while it runs, and gradients
                 whole in the backward. ZeRO-1: the optimiser's 1/N and fp32 copies of 1/N of the weights; -2: gradients
                 too; -3: weights too, whole while they are used.
    target       replicated; sharded (FSDP2): embedding, norm and LM head, 1/N of the layers, and one layer whole while
                 it runs; int8 and nf4 by bitsandbytes; offline: no layers, features from disk.

Not counted, as for one process: the device's own context, workspaces, fragmentation, and the transport's buffers.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor
from transformers import TrainingArguments

from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.fake_run import Phase
from draftsmith.models.target.features import decoder_layers
from draftsmith.models.target.quantized import saved_bytes
from draftsmith.recipes.schema import Recipe
from draftsmith.train.plan.step_cost import FakeTraining
from draftsmith.train.processes.launch import Launch

Placement = Literal["replicated", "sharded", "int8", "nf4", "offline"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
IN_USE = ("drafter forward", "backward")  # phases in which split weights are whole


@dataclass(frozen=True)
class SetUp:
    """One way to train; `bytes` of one process at its peak, None if it cannot be done, with the reason."""

    launch: str
    target: Placement
    processes: int
    bytes: int | None
    why_not: str | None = None


def launches(processes: int) -> list[Launch]:
    """Those that `recipes/accelerate` has."""
    if processes < 2:
        return [Launch("single")]
    split = [Launch("zero", processes, stage) for stage in (1, 2, 3)]
    return [Launch("ddp", processes), Launch("fsdp", processes, 2), *split]


def set_ups(recipe: Recipe, args: TrainingArguments, batch: dict[str, Tensor], processes: int) -> list[SetUp]:
    """Every launch with every placement of the target, for one batch [B, S] of each process.

    Raises:
        UserError: As `FakeTraining`.
    """
    kind = load_drafter_class(recipe.drafter.kind)
    split_obstacle = kind.split_obstacle(recipe.drafter.options)
    plain = _with(recipe, None, "online")
    online, target_bytes = _step(plain, args, batch)
    offline = None if kind.offline_obstacle else _step(_with(recipe, None, "offline"), args, batch)[0]
    found = []
    for launch in launches(processes):
        for placement in PLACEMENTS:
            why_not = split_obstacle if launch.splits_weights else None
            why_not = why_not or (kind.offline_obstacle if placement == "offline" else None)
            why_not = why_not or (kind.whole_target_needed if placement in ("sharded", "int8", "nf4") else None)
            if placement == "sharded" and processes < 2:
                why_not = "it takes several processes"
            of_step = offline if placement == "offline" else online
            size = None
            if why_not is None and of_step is not None:
                size = max(
                    _process_bytes(of_step, name, launch, placement, target_bytes, args.gradient_accumulation_steps)
                    for name in of_step
                )
            found.append(SetUp(launch.name, placement, processes, size, why_not))
    return found


@dataclass(frozen=True)
class _Target:
    """Bytes: of all of it, of its layers, of the largest one, and what quantisation takes away."""

    whole: int
    layers: int
    layer: int
    saved: dict[str, int]


def _with(recipe: Recipe, quantization: str | None, source: str) -> Recipe:
    changed = recipe.model_copy(deep=True)
    changed.target.quantization, changed.data.features.source = quantization, source  # type: ignore[assignment]
    return changed


def _step(recipe: Recipe, args: TrainingArguments, batch: dict[str, Tensor]) -> tuple[dict[str, Phase], _Target]:
    """The phases of one process, and the target's parts."""
    training = FakeTraining(recipe, args)
    of_layers = [] if recipe.data.features.source == "offline" else [_bytes(x) for x in decoder_layers(training.target)]
    saved = {
        name: saved_bytes(_with(recipe, name, "online").target, training.target) if of_layers else 0
        for name in ("int8", "nf4")
    }
    whole = _bytes(training.target)
    return training.step(batch).phases, _Target(whole, sum(of_layers), max(of_layers, default=0), saved)


def _bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _process_bytes(
    phases: dict[str, Phase], name: str, launch: Launch, placement: Placement, target: _Target, accumulation: int
) -> int:
    """Of one process, at the peak of a phase."""
    now, parts = phases[name].at_peak_bytes, launch.processes
    trained = max(phase.at_peak_bytes["gradients"] for phase in phases.values())
    total = phases[name].peak_bytes
    total += _of_the_drafter(now, trained, name, launch, accumulation) - sum(
        now[kind] for kind in ("drafter", "gradients", "optimiser")
    )
    if placement == "sharded":
        total += -target.layers + target.layers // parts + (target.layer if name == "target forward" else 0)
    return total - target.saved.get(placement, 0)


def _of_the_drafter(now: Counter[str], trained: int, phase: str, launch: Launch, accumulation: int) -> int:
    """Weights, gradients and optimiser state, with what the strategy adds."""
    parts, weights, gradients, optimiser = launch.processes, now["drafter"], now["gradients"], now["optimiser"]
    in_use = weights if phase in IN_USE else 0
    if launch.strategy == "single":
        return weights + gradients + optimiser
    if launch.strategy == "ddp":
        return weights + gradients + trained + optimiser
    if launch.strategy == "fsdp":
        # Between the batches of an accumulated step they stay whole.
        whole = trained if phase == "backward" or (accumulation > 1 and phase != "optimiser step") else 0
        return weights // parts + in_use + whole + trained // parts + optimiser // parts
    masters = trained // parts
    if launch.version == 3:
        return weights // parts + in_use + masters + trained // parts + optimiser // parts
    return weights + (gradients if launch.version < 2 else trained // parts) + masters + optimiser // parts
