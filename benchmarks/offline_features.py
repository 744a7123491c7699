"""A training step on features from disk against one that runs the target: times in turns, and bytes on disk.

    OMP_NUM_THREADS=2 python benchmarks/offline_features.py [--json FILE]

The embedded target (its architecture, random weights: time does not depend on them), the quickstart's drafter, rows of
random tokens with every second half labelled. A step is the batch's collation (offline: with its features, from files
that are mapped into memory), the target's forward where there is one, loss, backward and AdamW. The files are in the
page cache, as they are from the second epoch on where memory is large enough: a slow disk is not measured.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from draftsmith.models.drafters.parallel import ParallelDrafter
from draftsmith.models.target.loading import EMBEDDED_TARGET
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.results import write_result
from draftsmith.train.batches.collate import ROWS_COLUMN, collate_right_padded
from draftsmith.train.features.cache import FeatureCache, FeatureCollator, FeatureIndex, cut_into_shards, write_shard
from draftsmith.train.features.write import row_features, shard_features

BATCH_SIZE = 4
NUM_ROWS = 32


class TrainingSteps:
    """Target, drafter, optimiser and rows; a step either way."""

    def __init__(self, length: int, dtype: str, folder: Path) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(EMBEDDED_TARGET, max_position_embeddings=8192)
        self._target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._target.eval().requires_grad_(False)
        self._drafter = ParallelDrafter.from_target(self._target, load_recipe("quickstart").drafter.options)
        self._optimizer = torch.optim.AdamW(self._drafter.parameters(), lr=1e-4)
        ids = torch.randint(0, config.vocab_size, (NUM_ROWS, length)).tolist()
        mask = [0] * (length // 2) + [1] * (length - length // 2)
        self._rows = datasets.Dataset.from_list([{"input_ids": row, "loss_mask": mask} for row in ids])
        layers = self._drafter.layers_read
        index = FeatureIndex(layers, config.hidden_size, {"data.features.dtype": dtype}, [])
        self.bytes_per_token = index.bytes_per_token
        index.shards.extend(cut_into_shards([length] * NUM_ROWS, index.bytes_per_token))
        with tqdm(disable=True) as bar:
            for shard in index.shards:
                of_shard = self._rows[shard.rows.start : shard.rows.stop]["input_ids"]
                computed = row_features(self._target, layers, of_shard, BATCH_SIZE)
                write_shard(folder / shard.file, shard_features(computed, index, shard, bar))
        self.disk_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self._offline = FeatureCollator(FeatureCache(folder, index, layers))
        self._rows = self._rows.add_column(ROWS_COLUMN, [[row] for row in range(NUM_ROWS)])

    def run(self, offline: bool, turn: int) -> float:
        """Seconds of a step on one of the batches."""
        rows = [self._rows[(turn * BATCH_SIZE + place) % NUM_ROWS] for place in range(BATCH_SIZE)]
        begin_s = time.perf_counter()
        batch: dict[str, Tensor] = (self._offline if offline else collate_right_padded)(rows)
        if offline:
            features = self._drafter.split_features(batch["features"].to(self._target.dtype))
        else:
            features = self._drafter.training_features(self._target, batch["input_ids"])
        loss = self._drafter(batch["input_ids"], features[0], batch["loss_mask"], teacher_features=features[1]).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin_s


def measure(length: int, dtype: str, turns: int) -> dict[str, Any]:
    """Medians over alternating turns, after one to warm up."""
    times_s: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        steps = TrainingSteps(length, dtype, Path(folder))
        for turn in range(turns + 1):
            for offline, times in times_s.items():
                time_s = steps.run(offline, turn)
                if turn:
                    times.append(time_s)
    ratios = [online / offline for online, offline in zip(times_s[False], times_s[True], strict=True)]
    return {
        "length_tokens": length,
        "batch_rows": BATCH_SIZE,
        "dtype": dtype,
        "online_s": statistics.median(times_s[False]),
        "offline_s": statistics.median(times_s[True]),
        "speedup": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "bytes_per_token": steps.bytes_per_token,
        "disk_bytes": steps.disk_bytes,
        "disk_tokens": NUM_ROWS * length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a training step, features from disk against the target's.")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024], help="tokens of a row")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="on disk")
    parser.add_argument("--turns", type=int, default=9, help="measurements of each")
    options = parser.parse_args()
    rows = []
    for length in options.lengths:
        row = measure(length, options.dtype, options.turns)
        rows.append(row)
        print(
            f"S={length:5d}  online {1000 * row['online_s']:6.0f} ms   offline {1000 * row['offline_s']:6.0f} ms   "
            f"speedup {row['speedup']:.2f}x ({row['lowest']:.2f} to {row['highest']:.2f})   "
            f"{row['disk_bytes'] / 2**20:.1f} MiB on disk, {row['bytes_per_token']:,} bytes a token",
            flush=True,
        )
    if options.json:
        write_result(options.json, {"threads": torch.get_num_threads(), "rows": rows})


if __name__ == "__main__":
    main()
