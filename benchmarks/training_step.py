"""Training, in turns: group attention alone, a whole step, its lower bounds, and a step on features from disk.

    OMP_NUM_THREADS=2 python benchmarks/training_step.py attention --lengths 512 1024 2048 [--json FILE]
    OMP_NUM_THREADS=2 python benchmarks/training_step.py step [--json FILE]
    OMP_NUM_THREADS=2 python benchmarks/training_step.py bound --shape 135m --lengths 256 [--json FILE]
    OMP_NUM_THREADS=2 python benchmarks/training_step.py offline --lengths 128 256 512 1024 [--json FILE]

`attention` and `bound` run on the GPU, if the machine has one.

`attention`: forward and backward of every other backend against `dense`, 4 heads of 64.

`step`: the target's forward, the drafter's layer with all its groups, the LM head, the backward and AdamW, `folded`
against `dense`, at the embedded target's widths with random weights and every token supervised (the worst case: no row
can be skipped). Peak memory is the growth of the resident set of a fresh process over its size before the first step.

`bound`: a step on a random target of that shape, in turns with its parts alone, which use other libraries' code if it
exists: the target's forward; one decoder layer of transformers with plain causal attention over G sequences of S rows,
forward and backward; the chunked loss of the labelled rows. In addition, the step builds the rows and their labels,
merges own groups into the attention and reads its inputs by `fc`. The optimizer's step is timed separately.

`offline`: the quickstart's drafter on batches of rows whose second half is labelled, with features from files that are
mapped into memory against the target's forward; collation is part of the step. The files are in the page cache, as from
the second epoch on where memory is large enough: a slow disk is not measured.

Shapes: G = K+1 depths, S positions, D hidden, N labelled rows.
"""

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from parts.shapes import SHAPES, random_target
from parts.timing import (
    Work,
    benchmark_parser,
    in_turns,
    peak_growth_bytes,
    peak_resident_bytes,
    ratios,
    write_figures,
)
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel

from draftsmith.models.cpu_kernels import use_grouped_sdpa
from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.groups.attention import group_attention
from draftsmith.models.loss import head_loss
from draftsmith.models.target.features import required_layers, split_features, target_features
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.recipes.loading import load_recipe
from draftsmith.train.drafter.rows import ROWS_COLUMN
from draftsmith.train.drafter.trainer import FeatureCollator, collate_right_padded
from draftsmith.train.features.cache import FeatureCache, FeatureIndex, cut_into_shards, write_shard
from draftsmith.train.features.write import row_features, shard_features

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ("folded", "dense")
HEADS, HEAD_SIZE = 4, 64
BATCH_SIZE, NUM_ROWS, DISK_DTYPE = 4, 32, "bfloat16"


class Step:
    """Target, drafter and optimiser at the embedded target's widths, with random weights."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(EMBEDDED_TARGET, max_position_embeddings=8192)
        self.target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.target.eval().requires_grad_(False)
        self.drafter = ParallelDrafter.from_target(self.target, options)
        self._optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4)

    def run(self, ids_bs: Tensor, loss_mask_bs: Tensor, features: tuple[Tensor, Tensor | None] | None = None) -> None:
        """Run one optimizer step, and the target if no features are given."""
        inputs, teacher = features or self.drafter.training_features(self.target, ids_bs)
        self.drafter(ids_bs, inputs, loss_mask_bs, teacher_features=teacher).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run_random(self, length: int) -> None:
        """Run one optimizer step on a row of random tokens, all of them labelled."""
        ids_bs = torch.randint(0, self.target.config.vocab_size, (1, length))
        self.run(ids_bs, torch.ones_like(ids_bs))


def measure_attention(length: int, masks: int, turns: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, masks + 1, length, HEAD_SIZE)
    qkv = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for _ in range(3)]

    def forward_backward(backend: str) -> None:
        for part in qkv:
            part.grad = None
        out = group_attention(qkv[0], qkv[1], qkv[2], backend=backend)
        out.backward(torch.ones_like(out))

    works = {backend: partial(forward_backward, backend) for backend in BACKENDS}
    times_s = in_turns(works, DEVICE, turns, warmup=1)
    milliseconds = {f"{backend}_ms": 1e3 * median(times) for backend, times in times_s.items()}
    mask_bytes = (length * (masks + 1)) ** 2
    return {**milliseconds, **ratios("speedup", times_s["dense"], times_s["folded"]), "dense_mask_bytes": mask_bytes}


def measure_step(length: int, masks: int, turns: int) -> dict[str, Any]:
    steps = {backend: Step(num_masks=masks, attention=backend) for backend in BACKENDS}
    works = {backend: partial(step.run_random, length) for backend, step in steps.items()}
    times_s = in_turns(works, CPU, turns, warmup=1)
    figures: dict[str, Any] = {f"{backend}_tokens_per_s": length / median(times) for backend, times in times_s.items()}
    figures |= ratios("speedup", times_s["dense"], times_s["folded"])
    for backend in BACKENDS:  # in fresh processes: a resident set does not shrink reliably
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            figures[f"{backend}_mib"] = process.submit(peak_growth_mib, backend, length, masks).result()
    return figures


def peak_growth_mib(backend: str, length: int, masks: int) -> float:
    step = Step(num_masks=masks, attention=backend)
    step.run_random(16)  # the baseline includes optimizer state and thread pools
    before_bytes = peak_resident_bytes()
    step.run_random(length)
    return (peak_resident_bytes() - before_bytes) / 2**20


def measure_offline(length: int, masks: int, turns: int) -> dict[str, Any]:
    step = Step(**load_recipe("quickstart").drafter.options | {"num_masks": masks})
    ids = torch.randint(0, step.target.config.vocab_size, (NUM_ROWS, length)).tolist()
    mask = [0] * (length // 2) + [1] * (length - length // 2)
    rows = datasets.Dataset.from_list([{"input_ids": row, "loss_mask": mask} for row in ids])
    layers = required_layers(step.drafter)
    index = FeatureIndex(layers, step.target.config.hidden_size, {"data.features.dtype": DISK_DTYPE}, [])
    index.shards.extend(cut_into_shards([length] * NUM_ROWS, index.bytes_per_token))
    with tempfile.TemporaryDirectory() as name, tqdm(disable=True) as bar:
        folder = Path(name)
        for shard in index.shards:
            shard_ids = rows[shard.rows.start : shard.rows.stop]["input_ids"]
            computed = row_features(step.target, layers, shard_ids, BATCH_SIZE)
            write_shard(folder / shard.file, shard_features(computed, index, shard, bar))
        disk_bytes = sum(file.stat().st_size for file in folder.iterdir())
        read = FeatureCollator(FeatureCache(folder, index, layers))
        rows = rows.add_column(ROWS_COLUMN, [[row] for row in range(NUM_ROWS)])
        places = {"online": 0, "offline": 0}

        def run(side: str) -> None:
            begin = BATCH_SIZE * places[side]
            places[side] += 1
            batch = [rows[(begin + place) % NUM_ROWS] for place in range(BATCH_SIZE)]
            collated: dict[str, Tensor] = (read if side == "offline" else collate_right_padded)(batch)
            features = None
            if side == "offline":
                features = split_features(step.drafter, collated["features"].to(step.target.dtype))
            step.run(collated["input_ids"], collated["loss_mask"], features)

        times_s = in_turns({side: partial(run, side) for side in places}, CPU, turns, warmup=1)
    return {
        **{f"{side}_s": median(times) for side, times in times_s.items()},
        **ratios("speedup", times_s["online"], times_s["offline"]),
        "batch_rows": BATCH_SIZE,
        "dtype": DISK_DTYPE,
        "bytes_per_token": index.bytes_per_token,
        "disk_bytes": disk_bytes,
        "disk_tokens": NUM_ROWS * length,
    }


def measure_bound(shape: str, length: int, masks: int, turns: int) -> dict[str, Any]:
    """Measure the step and its parts by each backend: medians, and the ratio of the step to their sum by turns."""
    torch.manual_seed(0)
    target = random_target(shape, DEVICE)
    use_grouped_sdpa(target)
    return {backend: step_beside_its_parts(target, backend, length, masks, turns) for backend in BACKENDS}


def step_beside_its_parts(target: PreTrainedModel, backend: str, length: int, masks: int, turns: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(DEVICE):  # in fp32, under autocast where the target is in half precision
        options = {"num_masks": masks, "inputs": "both", "attention": backend}
        drafter = ParallelDrafter.from_target(target, options).train()
    optimizer = torch.optim.AdamW([each for each in drafter.parameters() if each.requires_grad], lr=1e-4, fused=True)
    ids = torch.randint(3, target.config.vocab_size, (1, length), device=DEVICE)
    labelled = torch.ones_like(ids)
    rows = int(drafter.label_counts(drafter.groups(ids, labelled))[0].sum())
    half = partial(torch.autocast, DEVICE.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16)

    def step() -> None:
        features = target_features(target, ids)
        with half():
            loss = drafter(ids, features, labelled).loss
        loss.backward()

    def optimize() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def both() -> None:
        step()
        optimize()

    works: dict[str, Work] = {
        "step": step,
        "optimizer": optimize,
        "target": lambda: target_features(target, ids),
        "layer": causal_layer(target, masks + 1, length, half),
        "loss": chunked_loss(target, rows, half),
    }
    times_s = in_turns(works, DEVICE, turns)
    bounds_s = [sum(parts) for parts in zip(times_s["target"], times_s["layer"], times_s["loss"], strict=True)]
    whole_s = [sum(parts) for parts in zip(times_s["step"], times_s["optimizer"], strict=True)]
    return {
        **{f"{name}_s": median(times) for name, times in times_s.items()},
        "tokens_per_s": length / median(whole_s),
        "peak_bytes": peak_growth_bytes(both, DEVICE),
        "labelled_rows": rows,
        **ratios("ratio", times_s["step"], bounds_s),
        **ratios("ratio_with_optimizer", whole_s, bounds_s),
    }


def causal_layer(target: PreTrainedModel, depths: int, length: int, half: Callable[[], Any]) -> Work:
    """Build a forward and backward of transformers' layer, fp32, on [G, S, D]: one causal sequence per depth."""
    config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8})
    with torch.device(DEVICE):
        model = LlamaModel._from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
        positions = torch.arange(length)[None]
    hidden = torch.randn(depths, length, config.hidden_size, device=DEVICE).requires_grad_()
    rotary = model.rotary_emb(hidden, positions)

    def work() -> None:
        with half():
            out = model.layers[0](hidden, position_embeddings=rotary, attention_mask=None)
        out = out if isinstance(out, Tensor) else out[0]
        out.backward(torch.ones_like(out))
        model.zero_grad()
        hidden.grad = None

    return work


def chunked_loss(target: PreTrainedModel, rows: int, half: Callable[[], Any]) -> Work:
    """Make a forward and backward of the cross entropy of N rows [N, D] through the target's frozen head."""
    hidden = torch.randn(rows, target.config.hidden_size, device=DEVICE).requires_grad_()
    labels = torch.randint(3, target.config.vocab_size, (rows,), device=DEVICE)
    weights = torch.full((rows,), 1 / rows, device=DEVICE)

    def work() -> None:
        with half():
            loss = head_loss(hidden, target.get_output_embeddings(), labels, weights).loss
        loss.backward()
        hidden.grad = None

    return work


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("what", choices=("attention", "step", "bound", "offline"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="sequence lengths S")
    parser.add_argument("--masks", type=int, default=4, help="K")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each side")
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="of the target of `bound`")
    options = parser.parse_args()
    measures: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
        "attention": measure_attention,
        "step": measure_step,
        "bound": partial(measure_bound, options.shape),
        "offline": measure_offline,
    }
    rows = []
    for length in options.lengths:
        figures = measures[options.what](length, options.masks, options.turns)
        rows.append({"length_tokens": length, "masks": options.masks, **figures})
        print(f"S={length}: " + ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
    write_figures(options, {"threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
