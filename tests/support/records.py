"""Measurement records whose figures can be checked by hand."""

from typing import Any


def made_up(run: int, seconds: float, baseline_seconds: float, same: bool = True) -> dict[str, Any]:
    """10 tokens in 3 rounds of 3 after a first token; the baseline takes 9 rounds."""

    def answer(method: str, wall: float, accepted: list[int], ids: list[int]) -> dict[str, Any]:
        return {
            "method": method,
            "temperature": 0.0,
            "process": "p",
            "settings": {
                "target": "12ab",
                "dtype": "float32",
                "prompts": "34cd",
                "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
                "max_new_tokens": 10,
            },
            "sequential": False,
            "token_ids": [ids],
            "new_tokens": [10],
            "wall_time": [wall],
            "prefill_s": [0.0],
            "draft_s": [0.1 * len(accepted)],
            "verify_s": [0.2 * len(accepted)],
            "choose_s": [0.03 * len(accepted)],
            "commit_s": [0.04 * len(accepted)],
            "first_token_s": [0.05],
            "round_s": [0.37] * len(accepted),
            "accept_lengths": accepted,
            "draft_lengths": [length - 1 for length in accepted],
            "draft_depths": [2 * (method == "chain")] * len(accepted),
            "tried": [sum(length - 1 for length in accepted)],
        }

    answers = {
        "autoregressive@0": answer("autoregressive", baseline_seconds, [1] * 9, [1] * 10),
        "chain@0": answer("chain", seconds, [3] * 3, [1] * 10 if same else [2] * 10),
    }
    return {"run": run, "question_id": 1, "category": "math", "answers": answers}
