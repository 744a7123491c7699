"""Whether greedy answers are the target's, told from float64: a divergence is a tie, or it is a bug."""

from dataclasses import dataclass
from typing import Any

import torch

# Two logits are compared, in either engine, and each may be off by the rounding.
LOGITS_THAT_ROUND = 4


@dataclass
class GreedyCheck:
    """tokens: compared. ties: (gap, where) of tokens that are not float64's argmax but within the threshold.
    wrong: the same beyond it."""

    threshold: float
    tokens: int
    ties: list[tuple[float, str]]
    wrong: list[tuple[float, str]]

    def sentence(self) -> str:
        gaps = ", ".join(f"{gap:.1e} ({where})" for gap, where in self.ties)
        return f"{self.tokens} greedy tokens, {len(self.ties)} ties below {self.threshold:.1e}: {gaps or '-'}"


def check_greedy(target: Any, answers: dict[str, tuple[list[int], list[int]]]) -> GreedyCheck:
    """Compare answers with what the target says after each of their prefixes.

    The gap of a token is how far its logit lies below the largest one in float64. The rounding is the largest
    difference between the target's float32 and float64 logits on the same tokens.

    Args:
        target: A causal language model in float32; is left as it was.
        answers: Prompt ids and answer ids by name.
    """
    gaps: list[tuple[float, str]] = []
    rounding, tokens = 0.0, 0
    single = {}
    with torch.inference_mode():
        for name, (prompt, answer) in answers.items():
            single[name] = target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        target.double()
        for name, (prompt, answer) in answers.items():
            logits = target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]  # [answer, V]
            rounding = max(rounding, float((logits - single[name]).abs().max()))
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            below = logits.max(dim=1).values - chosen
            gaps += [(gap, f"{name}[{position}]") for position, gap in enumerate(below.tolist()) if gap > 0]
            tokens += len(answer)
        target.float()
    threshold = LOGITS_THAT_ROUND * rounding
    return GreedyCheck(threshold, tokens, [g for g in gaps if g[0] <= threshold], [g for g in gaps if g[0] > threshold])
