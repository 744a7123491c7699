"""tau by the length of the context, of drafters with and without a sliding window, on the embedded target.

    python benchmarks/context_length.py RUNS [--kinds parallel eagle3 dflash2] [--window 128] [--longest 256]
        [--steps 746] [--lengths 64 128 ...] [--answers 60] [--new-tokens 64] [--json FILE]

The drafters of the shipped recipes are trained in the folder RUNS, on the same examples of at most `--longest` tokens.
A finished training is not repeated. A context is the last N tokens of held-out conversations and a held-out question.
The target answers it greedily, and every drafter drafts chains through this answer (`eval/bench/replay.py`).
`kept` is tau at the longest context over tau of all rounds within `--longest` tokens.
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from parts.timing import benchmark_parser, write_figures
from transformers import PreTrainedModel

from draftsmith.cli.stages import run_distill
from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.data.tokens.loss_mask import runs_of_ones
from draftsmith.eval.bench.replay import accepted_lengths
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.registry import load_drafter
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import MethodConfig, Recipe
from draftsmith.train.drafter.rows import split_rows
from draftsmith.train.drafter.stage import train_drafter

HELD_OUT_FRAC = 0.1


def make_recipe(options: Any, kind: str, name: str, *overrides: str) -> Recipe:
    shared = (
        f"runs_dir={options.runs}", f"name={name}", f"data.max_length_tokens={options.longest}",
        f"data.eval_rows_frac={HELD_OUT_FRAC}", f"train.max_steps={options.steps}", "data.distill.cut_answers=keep",
    )  # fmt: skip
    return load_recipe("quickstart", [f"drafter.kind={kind}", *shared, *overrides])


def make_contexts(heldout: Dataset, length: int, count: int) -> list[list[int]]:
    """Return `count` contexts of `length` tokens: a question each, after as many conversations as it takes."""
    prompts = [row["input_ids"][: runs_of_ones(row["loss_mask"])[0][0]] for row in heldout]
    contexts = []
    for number in range(count):
        ids, before = prompts[number % len(prompts)], number
        while len(ids) < length:
            before += 1
            ids = heldout[before % len(prompts)]["input_ids"] + ids
        contexts.append(ids[-length:])
    return contexts


@torch.inference_mode()
def with_answers(target: PreTrainedModel, contexts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Return each context, all of one length, followed by the target's greedy answer."""
    end = target.config.eos_token_id
    ids_bs = torch.tensor(contexts, device=target.device)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": end}
    rows, length = target.generate(ids_bs, attention_mask=torch.ones_like(ids_bs), **options).tolist(), ids_bs.shape[1]
    return [row[: row.index(end, length) + 1] if end in row[length:] else row for row in rows]


@torch.inference_mode()
def rounds_by_length(
    folder: Path, target: PreTrainedModel, texts: dict[int, list[list[int]]]
) -> dict[int, list[tuple[int, int]]]:
    """Return for each length of the context the rounds of a drafter's chains: tokens before it, and committed."""
    drafter = load_drafter(folder, target)
    decoder = drafter.decoder(max(len(ids) for rows in texts.values() for ids in rows) + 1)
    method = build_tree_drafter(MethodConfig(name="chain"), decoder, Sampling())
    rounds: dict[int, list[tuple[int, int]]] = {}
    for length, rows in texts.items():
        rounds[length] = []
        for ids in rows:
            features_sf = target_features(target, torch.tensor([ids]), layers=drafter.feature_layers)[0]
            before = length + 1
            for committed in accepted_lengths(method, ids, features_sf, length, len(ids) - 1):
                rounds[length].append((before, committed))
                before += committed
    return rounds


def tau_of(rounds: list[tuple[int, int]]) -> float:
    return sum(committed for _, committed in rounds) / len(rounds)


def measured(options: Any) -> dict[str, Any]:
    answers_run = make_recipe(options, "parallel", "answers")
    run_distill(answers_run)
    data = RunFolder(answers_run).data
    target, _ = load_target(answers_run.target)
    _, heldout = split_rows(load_tokens(RunFolder(answers_run)), HELD_OUT_FRAC)
    assert heldout is not None
    texts = {
        length: with_answers(target, make_contexts(heldout, length, options.answers), options.new_tokens)
        for length in options.lengths
    }
    arms: dict[str, Any] = {}
    for kind in options.kinds:
        for window in (None, options.window):
            name = kind if window is None else f"{kind}-{window}"
            recipe = make_recipe(options, kind, name, f"drafter.options.sliding_window={window or 'null'}")
            folder = RunFolder(recipe)
            folder.root.mkdir(parents=True, exist_ok=True)
            if not folder.data.exists():
                folder.data.symlink_to(data.absolute(), target_is_directory=True)
            train_drafter(recipe)
            rounds = rounds_by_length(folder.drafter, target, texts)
            within = [each for of_length in rounds.values() for each in of_length if sum(each) <= options.longest]
            arms[name] = {
                "tau": {length: tau_of(of_length) for length, of_length in rounds.items()},
                "rounds": {length: len(of_length) for length, of_length in rounds.items()},
                "tau_within": tau_of(within),
                "kept": tau_of(rounds[max(rounds)]) / tau_of(within),
            }
            print(name, arms[name], flush=True)
    settings = ("window", "longest", "steps", "answers", "new_tokens")
    return {**{key: getattr(options, key) for key in settings}, "drafters": arms}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["parallel", "eagle3", "dflash2"])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--steps", type=int, default=746)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 768, 960])
    parser.add_argument("--answers", type=int, default=60)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    write_figures(options, measured(options))


if __name__ == "__main__":
    main()
