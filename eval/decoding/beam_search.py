"""Speculative beam search: beam search's own result from fewer forwards of the target (arXiv 2211.17192, A.4).

A round:
1. The draft model goes on from the living beams for gamma steps of a beam search of its own, of width u >= w.
2. The target scores everything that it kept on the way, a tree, in one forward (`Continuations`).
3. Steps of the target's beam search are taken from these logits as long as all of its w living beams were drafted; the
   step after that is free, as its logits belong to the last beams that were. What is alive then begins the next round.

Every step is that of transformers' `generate(num_beams=w, do_sample=False)`, fp32 scores, length penalty and stopping
heuristic included, on logits of the target: the draft model decides the number of forwards and nothing else.

Shapes: W living beams, C candidates of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.decoding.shared_prefix import Continuation, Continuations
from draftsmith.recipes.errors import UserError

IMPOSSIBLE = -1.0e9  # what transformers scores a beam with that does not count


@dataclass(frozen=True)
class Beams:
    """The result.

    sequences: [W] answers, best first, each with its end token if it has one; scores: [W], sums of log probabilities
    over length ** length_penalty; steps: of the beam search; forwards: of the target, the prompt's not counted.
    """

    sequences: list[list[int]]
    scores: list[float]
    steps: int
    forwards: int

    @property
    def steps_per_forward(self) -> float:
        """1 without a draft model; the first step comes from the prompt's forward and is not counted."""
        return (self.steps - 1) / self.forwards if self.forwards else 0.0


def beam_search(
    target: Any,
    prompt_ids: list[int],
    num_beams: int,
    max_new_tokens: int,
    end_ids: Collection[int] = (),
    draft_model: Any = None,
    draft_beams: int | None = None,
    gamma: int = 4,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> Beams:
    """The `num_beams` best answers of the target's beam search, exactly those of transformers' `generate`.

    Args:
        target: A causal language model in eval mode, one that draft trees run on.
        num_beams: w, at least 2.
        end_ids: End tokens.
        draft_model: A causal language model with the target's tokens; None: the plain search, a forward a step.
        draft_beams: u, the draft model's width, by default w.
        gamma: Steps that are drafted in a round.
        length_penalty: As in transformers; so is `early_stopping`.

    Raises:
        UserError: The target cannot run trees or hold the answer, or a width or number of steps makes no sense.
    """
    draft_beams = num_beams if draft_beams is None else draft_beams
    vocabulary = target.config.get_text_config().vocab_size
    if num_beams < 2 or draft_beams < num_beams or gamma < 1 or max_new_tokens < 1:
        raise UserError(
            f"beam search needs num_beams >= 2, draft_beams >= num_beams, gamma >= 1 and max_new_tokens >= 1, not "
            f"{num_beams}, {draft_beams}, {gamma} and {max_new_tokens}"
        )
    if draft_model is not None and draft_model.config.get_text_config().vocab_size < vocabulary:
        raise UserError("the draft model has fewer tokens than the target: use a model of the same family")
    length = len(prompt_ids) + max_new_tokens
    models = [target] if draft_model is None else [target, draft_model]
    for model in models:
        TargetSession(model, length).close()  # refuses what cannot hold the answer, or cannot run trees
    capacity = len(prompt_ids) + num_beams * max_new_tokens + draft_beams * (gamma + 1)
    scored = Continuations(target, prompt_ids, capacity)
    drafted = None if draft_model is None else Continuations(draft_model, prompt_ids, capacity)
    search = _Search(num_beams, max_new_tokens, sorted(end_ids), length_penalty, early_stopping, target.device)
    while True:
        # 3. All that the logits at hand are good for.
        while not search.done and all(beam in scored for beam in search.living):
            search.step(scored.logits(search.living))
        if search.done:
            return Beams(*search.best(), steps=search.steps, forwards=scored.forwards)
        scored.keep(search.living)
        ahead: list[Continuation] = []
        if drafted is not None:
            # 1. What would be longer than the longest answer but one needs no logits.
            steps = min(gamma, max_new_tokens - 1 - search.steps)
            drafted.keep(search.living)
            ahead = _draft(drafted, search.living, search.scores, draft_beams, steps, search.end_ids, vocabulary)
        # 2. The living beams themselves come first: at least one step a round.
        scored.run([*search.living, *ahead])


def _draft(
    model: Continuations,
    living: list[Continuation],
    scores: Tensor,
    width: int,
    steps: int,
    end_ids: list[int],
    vocabulary: int,
) -> list[Continuation]:
    """All that a beam search of the draft model keeps, from these beams on, with the target's scores [W] of them."""
    found: list[Continuation] = []
    for _ in range(steps):
        log_q = model.logits(living)[:, :vocabulary].log_softmax(-1)
        log_q[:, [token for token in end_ids if token < log_q.shape[1]]] = -torch.inf  # ended beams need no logits
        total = (log_q + scores[:, None]).flatten()
        scores, best = total.topk(min(width, len(total)))
        size = log_q.shape[1]
        living = [(*living[place // size], place % size) for place in best.tolist()]
        found += living
    return found


class _Search:
    """transformers' beam search of one prompt (`GenerationMixin._beam_search`, 5.x), a step at a time.

    living: [W] the running beams, best first; scores: [W] fp32, their sums of log probabilities.
    """

    def __init__(
        self,
        num_beams: int,
        max_new_tokens: int,
        end_ids: list[int],
        length_penalty: float,
        early_stopping: bool | Literal["never"],
        device: torch.device,
    ) -> None:
        self.end_ids = end_ids
        self._width, self._max_new_tokens = num_beams, max_new_tokens
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self.steps, self.done = 0, False
        self.living: list[Continuation] = [()] * num_beams
        # Only the first of the equal beams at the start counts.
        self.scores = torch.full((num_beams,), IMPOSSIBLE, device=device)
        self.scores[0] = 0.0
        self._finished: list[Continuation] = [()] * num_beams
        self._finished_scores = torch.full((num_beams,), IMPOSSIBLE, device=device)
        self._is_finished = torch.zeros(num_beams, dtype=torch.bool, device=device)
        self._can_improve = True

    def best(self) -> tuple[list[list[int]], list[float]]:
        """The finished sequences and their scores, best first."""
        return [list(sequence) for sequence in self._finished], self._finished_scores.tolist()

    def step(self, logits: Tensor) -> None:
        """One token more, from the target's logits [W, V] after the living beams."""
        total = logits.log_softmax(-1) + self.scores[:, None]
        vocabulary = total.shape[1]
        count = max(2, 1 + len(self.end_ids)) * self._width
        scores, places = total.flatten().topk(min(count, total.numel()))
        candidates = [(*self.living[place // vocabulary], place % vocabulary) for place in places.tolist()]
        self.steps += 1
        at_limit = self.steps == self._max_new_tokens
        ends = torch.tensor([at_limit or c[-1] in self.end_ids for c in candidates], device=scores.device)
        # The beams that go on.
        running = scores + ends.float() * IMPOSSIBLE
        alive = running.topk(self._width).indices
        self.living, self.scores = [candidates[place] for place in alive.tolist()], running[alive]
        # The best that have ended, of these and the former ones. Candidates beyond the W best only make sure that
        # enough beams go on.
        just_ended = ends & (torch.arange(len(ends), device=ends.device) < self._width)
        penalised = scores / self.steps**self._length_penalty
        full = bool(self._is_finished.all()) and self._early_stopping is True
        penalised = penalised + (full + (not self._can_improve)) * IMPOSSIBLE + (~just_ended).float() * IMPOSSIBLE
        merged = torch.cat([self._finished_scores, penalised])
        order = merged.topk(self._width).indices
        known = [*self._finished, *candidates]
        self._finished, self._finished_scores = [known[place] for place in order.tolist()], merged[order]
        self._is_finished = torch.cat([self._is_finished, just_ended])[order]
        self._can_improve = self._can_improve and self._may_improve()
        open_beam = not (bool(self._is_finished.all()) and self._early_stopping is True)
        self.done = not (self._can_improve and open_beam and not bool(ends.all()))

    def _may_improve(self) -> bool:
        """Whether the best running beam could still be better than the worst finished one (a heuristic)."""
        longest = self._early_stopping == "never" and self._length_penalty > 0
        tokens = self._max_new_tokens if longest else self.steps
        best = self.scores[0] / tokens**self._length_penalty
        worst = torch.where(self._is_finished, self._finished_scores.min(), IMPOSSIBLE)
        return bool((best > worst).any())
