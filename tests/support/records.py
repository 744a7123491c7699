"""Measurement records whose figures can be checked by hand."""

from draftsmith.eval.bench.records import MethodResult, QuestionRecord
from draftsmith.eval.decoding.generate import AnswerRecord


def made_up(run: int, seconds: float, baseline_seconds: float, same: bool = True) -> QuestionRecord:
    """10 tokens in 3 rounds of 3 after a prompt of 126 and a first token; the baseline takes 9 rounds."""

    def answered(method: str, wall: float, accepted: list[int], ids: list[int]) -> MethodResult:
        settings = {
            "target": "12ab",
            "dtype": "float32",
            "prompts": "34cd",
            "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
            "max_new_tokens": 10,
        }
        answer = AnswerRecord(
            ids=ids,
            text="x",
            accept_lengths=accepted,
            draft_lengths=[length - 1 for length in accepted],
            draft_depths=[2 * (method == "chain")] * len(accepted),
            tried=sum(length - 1 for length in accepted),
            prompt_tokens=126,
            round_s=[0.37] * len(accepted),
            wall_time_s=wall,
            first_token_s=0.05,
            prefill_s=0.0,
            draft_s=0.1 * len(accepted),
            verify_s=0.2 * len(accepted),
            choose_s=0.03 * len(accepted),
            commit_s=0.04 * len(accepted),
        )
        return MethodResult(method, 0.0, 1.0, "p", settings, [answer], 0)

    answers = {
        "autoregressive@0": answered("autoregressive", baseline_seconds, [1] * 9, [1] * 10),
        "chain@0": answered("chain", seconds, [3] * 3, [1] * 10 if same else [2] * 10),
    }
    return QuestionRecord(run, 1, "math", 0.0, answers)
