"""What a drafter would do on answers that it was not trained on, from forwards alone: accuracy by depth, and tau.

The answers are the target's own. So a greedy chain can be replayed without decoding: of the group after which it is
drafted one knows how many of its depths are right, and the next round begins behind those and the target's own token.
At T = 0 that is what the loop does, the target's ties and end of the draft's cache aside.

Shapes: B batch, S sequence, G depths.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.models.losses import DrafterOutput


@dataclass
class HeldOutFigures:
    """Sums over batches; `vector` and `metrics` are of them.

    chains: for chains of 1, 2, ..., G drafted tokens, tokens committed and rounds.
    """

    loss: float = 0.0
    depths_3g: list[list[float]] = field(default_factory=list)
    chains_2g: list[list[float]] = field(default_factory=list)

    def add(self, output: DrafterOutput, loss_mask_bs: Tensor) -> None:
        """Count a batch."""
        parts = (output.depth_loss_sum, output.depth_correct, output.depth_count)
        sums_3g = torch.stack([part.double() for part in parts if part is not None])
        labels = sums_3g[2].sum().item()
        chains_2g = replayed_chains(output.correct_bgs, loss_mask_bs)
        self.loss += 0.0 if output.loss is None else output.loss.item() * labels
        self.depths_3g = _sum(self.depths_3g, sums_3g.tolist())
        self.chains_2g = _sum(self.chains_2g, chains_2g)

    def vector(self) -> Tensor:
        """[1 + 5G] to be added up over processes."""
        return torch.tensor(
            [self.loss, *(value for row in (*self.depths_3g, *self.chains_2g) for value in row)]
        ).double()

    @staticmethod
    def metrics(vector: Tensor, prefix: str) -> dict[str, float]:
        """The mean loss over labels, and of each depth loss, accuracy and the tau of a chain that long."""
        losses, correct, counts, tokens, rounds = vector[1:].view(5, -1).tolist()
        metrics = {f"{prefix}_loss": float(vector[0]) / max(1.0, sum(counts))}
        for j, count in enumerate(counts):
            if count:
                metrics[f"{prefix}_loss_depth{j + 1}"] = round(losses[j] / count, 4)
                metrics[f"{prefix}_accuracy_depth{j + 1}"] = round(correct[j] / count, 4)
            if rounds[j]:
                metrics[f"{prefix}_tau_depth{j + 1}"] = round(tokens[j] / rounds[j], 4)
        return metrics


def replayed_chains(correct_bgs: Tensor | None, loss_mask_bs: Tensor) -> list[list[float]]:
    """Tokens committed, then rounds, of greedy chains of 1, 2, ..., G tokens over all answers.

    Args:
        correct_bgs: Whether depth j of the group at t is the token x_{t+1+j}; False where there is no label.
        loss_mask_bs: 1 at the tokens of answers. An answer's first token comes from the prefill.
    """
    if correct_bgs is None:
        raise ValueError("the drafter's forward says not which labels are right: DrafterOutput.correct_bgs")
    right_bs = correct_bgs.long().cumprod(1).sum(1).tolist()
    depths = correct_bgs.shape[1]
    tokens, rounds = [0.0] * depths, [0.0] * depths
    for right_s, mask_s in zip(right_bs, loss_mask_bs.tolist(), strict=True):
        for first, last in answers_in(mask_s):
            for j in range(depths):
                newest = first
                while newest < last:
                    committed = min(right_s[newest], j + 1) + 1
                    tokens[j] += min(committed, last - newest)
                    rounds[j] += 1
                    newest += committed
    return [tokens, rounds]


def answers_in(mask_s: list[int]) -> list[tuple[int, int]]:
    """First and last token of every run of ones."""
    begins = [s for s, is_answer in enumerate(mask_s) if is_answer and (s == 0 or not mask_s[s - 1])]
    ends = [s for s, is_answer in enumerate(mask_s) if is_answer and (s + 1 == len(mask_s) or not mask_s[s + 1])]
    return list(zip(begins, ends, strict=True))


def _sum(rows: list[list[float]], more: list[list[float]]) -> list[list[float]]:
    if not rows:
        return more
    return [[a + b for a, b in zip(*both, strict=True)] for both in zip(rows, more, strict=True)]
