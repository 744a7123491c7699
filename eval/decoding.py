"""The loop: draft, verify, commit. One for every method, the autoregressive baseline included.

The first token comes from the prefill and belongs to no round. Tokens behind an end token or beyond the limit are cut
and count nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from draftsmith.eval.methods.method import Method, ReadsLogits
from draftsmith.eval.sampling import Sampling, first_token
from draftsmith.eval.session import TargetSession
from draftsmith.eval.verify import verify
from draftsmith.recipes.errors import UserError


@dataclass(slots=True)
class Generation:
    """One answer and what it took.

    ids: generated token ids, the end token included.
    accept_lengths: tokens kept per round, the target's own included; their mean is tau.
    draft_lengths: drafted tokens kept per round; their mean is tau without the target's own token.
    """

    ids: list[int]
    accept_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    wall_time_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def accepted_drafts(self) -> int:
        return sum(self.draft_lengths)


@torch.inference_mode()
def generate(
    session: TargetSession,
    method: Method,
    prompt_ids: list[int],
    sampling: Sampling,
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Answer a prompt. Greedy answers are exactly the target's; sampled ones have exactly its distribution.

    Raises:
        UserError: Prompt and answer do not fit into the session.
    """
    if len(prompt_ids) + max_new_tokens > session.max_length_tokens:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens and an answer of {max_new_tokens} do not fit into a session of "
            f"{session.max_length_tokens}: lower eval.max_new_tokens or shorten the prompt"
        )
    clock = time.perf_counter
    began = clock()
    step = session.prefill(prompt_ids)
    newest = first_token(step.logits[-1], sampling, generator)
    method.start(prompt_ids, step.features)
    method.observe([newest], step.features[-1:])
    out = Generation([newest])
    out.prefill_s = clock() - began
    reader = method if isinstance(method, ReadsLogits) else None
    while len(out.ids) < max_new_tokens and newest not in eos_ids:
        # 1. Draft. What is deeper than the tokens that are still wanted could not be kept.
        started = clock()
        tree = method.propose().cut_to_depth(max_new_tokens - len(out.ids) - 1)
        drafted = clock()
        # 2. Verify all nodes in one forward.
        step = session.forward_tree(tree)
        session.synchronize()
        out.verify_s += clock() - drafted
        out.draft_s += drafted - started
        verdict = verify(tree, step.logits, sampling, generator)
        if reader is not None:
            reader.read_logits(tree, step.logits)
        # 3. Commit the accepted path and the target's own token.
        path = verdict.path
        session.commit(path)
        committed = [tree.tokens[node] for node in path[1:]]
        committed.append(verdict.next_token)
        kept = kept_tokens(committed, eos_ids, max_new_tokens - len(out.ids))
        out.ids += committed[:kept]
        out.accept_lengths.append(kept)
        out.draft_lengths.append(min(kept, len(path) - 1))
        newest = out.ids[-1]
        features = step.features[: len(path)] if path[-1] == len(path) - 1 else step.features[path]
        method.observe(committed, features)
    session.synchronize()
    out.wall_time_s = clock() - began
    return out


def kept_tokens(committed: list[int], eos_ids: Collection[int], wanted: int) -> int:
    """How many of the committed tokens belong to the answer."""
    for index, token in enumerate(committed[:wanted]):
        if token in eos_ids:
            return index + 1
    return min(len(committed), wanted)
