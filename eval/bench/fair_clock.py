"""What a method's answers and its baseline's must have in common before a speedup is told, and the check that they do.

Times are compared within one process, on the same target, dtype, prompts, sampling and token limit. Every answer in
the records carries these settings as they were when it was made, so that no later edit of a recipe, a target or a
record can make two of them look alike.

The target is told by its weights, not by its name: SHA-256 over integer sums of their bits, row by row, which any
device adds up alike in a moment.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from draftsmith.eval.bench.records import SETTINGS, QuestionRecord
from draftsmith.eval.decoding.method import AUTOREGRESSIVE
from draftsmith.eval.trees.sampling import Sampling
from draftsmith.recipes.errors import UserError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def answer_settings(
    of_target: dict[str, str], prompt_ids: list[int], turns: tuple[str, ...], sampling: Sampling, max_new_tokens: int
) -> dict[str, Any]:
    """What an answer was made with.

    Args:
        of_target: `target_settings` of the model at work.
        prompt_ids: Of the first turn. The later ones follow each method's own answers: they count as asked.
        turns: The question's, as asked.
    """
    prompts = json.dumps([prompt_ids, turns[1:]]).encode()
    return {
        **of_target,
        "prompts": hashlib.sha256(prompts).hexdigest()[:16],
        "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
        "max_new_tokens": max_new_tokens,
    }


def target_settings(target: Any) -> dict[str, str]:
    return {"target": weights_fingerprint(target), "dtype": str(target.dtype).removeprefix("torch.")}


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> str:
    """Of all parameters as they are now: names, shapes and bits."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        bits = weight.detach().contiguous().view(_INTEGERS[weight.element_size()])
        sums = bits.sum(-1, dtype=torch.int64) if bits.dim() else bits.to(torch.int64)
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fair_clock(records: list[QuestionRecord]) -> None:
    """A speedup compares like with like, in one process.

    Raises:
        UserError: Names the record and what differs.
    """
    if not records:
        raise UserError("nothing has been measured yet: run `draftsmith eval` with this recipe first")
    for record in records:
        answers, where = record.answers.values(), record.where
        if len({answer.process for answer in answers}) > 1:
            raise UserError(
                f"{where} mixes times of several processes, which cannot be compared: delete that line from "
                "records.jsonl and run `draftsmith eval` again"
            )
        baselines = {answer.temperature: answer for answer in answers if answer.method == AUTOREGRESSIVE}
        for answer in answers:
            if answer.temperature not in baselines:
                raise UserError(
                    f"{where} lacks its autoregressive baseline: delete that line from records.jsonl and run "
                    "`draftsmith eval` again"
                )
            for setting, word in SETTINGS.items():
                found, wanted = answer.settings[setting], baselines[answer.temperature].settings[setting]
                if found != wanted:
                    raise UserError(
                        f"{where}: {answer.method} was measured with other {word} than its autoregressive baseline "
                        f"({found} against {wanted}), so no speedup can be told: delete that line from records.jsonl "
                        "and run `draftsmith eval` again"
                    )
        if record.answers.keys() != records[0].answers.keys():
            raise UserError(
                f"{where} has other methods than the first record: delete that line from records.jsonl and run "
                "`draftsmith eval` again"
            )
        for key, answer in record.answers.items():
            of_first = records[0].answers[key].settings
            for setting, word in SETTINGS.items():
                # Each question has its own prompts.
                if setting != "prompts" and answer.settings[setting] != of_first[setting]:
                    raise UserError(
                        f"{where} was measured with another {word} than the first record: delete the folder to "
                        "measure again"
                    )
