"""DSpark's Markov head (DeepSeek-AI and Peking University, 2026): what the token before says of the next one.

The depths of a parallel drafter are drafted in one forward, so depth k knows nothing of the token that depth k-1 came
to: its logits are those of a marginal. The head adds B(x_{k-1}, v) = W1[x_{k-1}] W2 to them, of one low rank for all
depths: a bigram's bias, at the price of a gather and a product as wide as the rank. In training x_{k-1} is the true
token (the label of the depth before), at work the drafted one; q of a path is then exact by the chain rule.

Depth 1 has the bias too, of the newest committed token, as DSpark's blocks have that begin with it
(`sample_from_anchor`): one rule for all depths, although the layers have read that token themselves. W1 has all of the
target's tokens, W2 those that are drafted, under DSpark's names.

W1 starts as torch's embeddings do, with standard deviation 1, W2 as zeros: a drafter starts as it would without.

Shapes: V vocabulary, V' drafted tokens, r rank.
"""

import torch
from torch import Tensor, nn

from draftsmith.models.head_loss import LowRankLogits


class MarkovHead(nn.Module):
    """B = W1 W2.

    Args:
        vocabulary: V, the tokens that may stand before.
        drafted: V', the columns of the logits.
        rank: r.
    """

    def __init__(self, vocabulary: int, drafted: int, rank: int) -> None:
        super().__init__()
        # Whatever else is drawn stays what it is without the head.
        with torch.random.fork_rng(devices=[]):
            self.markov_w1 = nn.Embedding(vocabulary, rank)
            self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def factors(self, previous_n: Tensor) -> LowRankLogits:
        """B of N previous tokens [N], as its two factors."""
        return LowRankLogits(self.markov_w1(previous_n), self.markov_w2.weight)

    def forward(self, previous: Tensor) -> Tensor:
        """[...] -> [..., V'], in the weights' dtype."""
        return self.markov_w2(self.markov_w1(previous))
