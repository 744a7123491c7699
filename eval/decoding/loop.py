"""The loop: draft, verify, commit. One for every method, the autoregressive baseline included.

The first token comes from the prefill and belongs to no round. Tokens behind an end token, behind the one that
completes a stop string, or beyond the limit are cut and count nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from draftsmith.eval.decoding.method import Method, ReadsLogits
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.decoding.stop_strings import StopStrings, StopWatch
from draftsmith.eval.trees.sampling import Sampling, first_token
from draftsmith.eval.trees.verify import verify
from draftsmith.recipes.errors import UserError


@dataclass(slots=True)
class Generation:
    """One answer and what it took.

    ids: generated token ids, the end token or the token that completed a stop string included.
    accept_lengths: tokens kept per round, the target's own included; their mean is tau.
    draft_lengths: drafted tokens kept per round; their mean is tau without the target's own token.
    text_before_stop: the text before the stop string that ended the answer, if one did.
    draft_depths: the longest path drafted, per round.
    tried: drafted positions that verification came to; the share of accepted ones is the acceptance rate alpha.
    round_s: seconds of each round, of which the four phases below are the parts.
    first_token_s: from the prompt to its first token; prefill_s: to the beginning of the first round.
    draft_s, verify_s, choose_s, commit_s: drafting; the target's forward over the tree, its device waited for;
        choosing the path, which waits for the device itself; keeping it. What the commit leaves to a GPU is done
        while the next draft is, and counts there.
    """

    ids: list[int]
    accept_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    tried: int = 0
    round_s: list[float] = field(default_factory=list)
    wall_time_s: float = 0.0
    first_token_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    text_before_stop: str | None = None
    choose_s: float = 0.0
    commit_s: float = 0.0

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
    end_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
    stop: StopStrings | None = None,
    lenience: float = 1.0,
) -> Generation:
    """Answer a prompt. Greedy answers are exactly the target's; sampled ones have exactly its distribution.

    Neither holds with a lenience below 1, see `draftsmith.eval.trees.verify`.

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
    first_s = clock() - began
    method.start(prompt_ids, step.features)
    method.observe([newest], step.features[-1:])
    out = Generation([newest], first_token_s=first_s)
    started = clock()
    out.prefill_s = started - began
    reader = method if isinstance(method, ReadsLogits) else None
    watch = None if stop is None else stop.watch()
    _, ended = kept_tokens([newest], end_ids, watch)
    while len(out.ids) < max_new_tokens and not ended:
        # 1. Draft. What is deeper than the tokens that are still wanted could not be kept.
        tree = method.propose().cut_to_depth(max_new_tokens - len(out.ids) - 1)
        drafted = clock()
        # 2. Verify all nodes in one forward.
        step = session.forward_tree(tree)
        session.synchronize()
        verified = clock()
        verdict = verify(tree, step.logits, sampling, generator, lenience)
        if reader is not None:
            reader.read_logits(tree, step.logits)
        chosen = clock()
        # 3. Commit the accepted path and the target's own token.
        path = verdict.path
        session.commit(path)
        committed = [tree.tokens[node] for node in path[1:]]
        committed.append(verdict.next_token)
        kept, ended = kept_tokens(committed[: max_new_tokens - len(out.ids)], end_ids, watch)
        out.ids += committed[:kept]
        out.accept_lengths.append(kept)
        out.draft_lengths.append(min(kept, len(path) - 1))
        out.draft_depths.append(tree.shape.max_depth)
        rejected = kept == len(committed) and bool(tree.children(path[-1]))
        out.tried += out.draft_lengths[-1] + rejected
        features = step.features[: len(path)] if path[-1] == len(path) - 1 else step.features[path]
        method.observe(committed, features)
        done = clock()
        out.draft_s += drafted - started
        out.verify_s += verified - drafted
        out.choose_s += chosen - verified
        out.commit_s += done - chosen
        out.round_s.append(done - started)
        started = done
    out.text_before_stop = None if watch is None else watch.text_before
    session.synchronize()
    out.wall_time_s = clock() - began
    return out


def kept_tokens(committed: list[int], end_ids: Collection[int], watch: StopWatch | None) -> tuple[int, bool]:
    """How many of the committed tokens belong to the answer, and whether it ends with them."""
    for index, token in enumerate(committed):
        if token in end_ids or (watch is not None and watch.completes(token)):
            return index + 1, True
    return len(committed), False
