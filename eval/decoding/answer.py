"""One answer and what it took: filled by the loops, kept by the bench, read by the report."""

from __future__ import annotations

from dataclasses import dataclass, field

TIMELINE_ROUNDS = 16  # the first of an answer, whose phases are kept one by one


@dataclass(slots=True)
class AnswerRecord:
    """One answer to one prompt.

    ids: generated token ids, the end token or the token that completed a stop string included.
    text: the text before the stop string that ended the answer, if one did; the bench decodes the others.
    accept_lengths: tokens kept per round, the target's own included; their mean is tau.
    draft_lengths: drafted tokens kept per round; their mean is tau without the target's own token.
    draft_depths: the longest path drafted, per round.
    tried: drafted positions that verification came to; the share of accepted ones is the acceptance rate alpha.
    outside_tokens: tokens of the rounds that are not in the method's draft vocabulary, all of them the target's own;
        None: it can draft every token.
    ended_outside: the rounds, from 0, at which such a token stood where drafts were rejected: what the vocabulary, if
        nothing else, has ended. None as above.
    round_s: seconds of each round, of which the four phases below are the parts.
    phases_s: the four phases of each of the first rounds, for a picture of them.
    first_token_s: from the prompt to its first token; prefill_s: to the beginning of the first round.
    draft_s, verify_s, choose_s, commit_s: drafting; the target's forward over the tree, its device waited for;
        choosing the path, which waits for the device itself; keeping it. What the commit leaves to a GPU is done
        while the next draft is, and counts there.
    """

    ids: list[int] = field(default_factory=list)
    text: str | None = None
    accept_lengths: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    tried: int = 0
    outside_tokens: int | None = None
    ended_outside: list[int] | None = None
    round_s: list[float] = field(default_factory=list)
    phases_s: list[list[float]] = field(default_factory=list)
    wall_time_s: float = 0.0
    first_token_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    choose_s: float = 0.0
    commit_s: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def accepted_drafts(self) -> int:
        return sum(self.draft_lengths)

    def add_round_s(self, started: float, drafted: float, verified: float, chosen: float, done: float) -> None:
        """Where a round's time went: readings of one clock."""
        phases = [drafted - started, verified - drafted, chosen - verified, done - chosen]
        self.draft_s += phases[0]
        self.verify_s += phases[1]
        self.choose_s += phases[2]
        self.commit_s += phases[3]
        if len(self.phases_s) < TIMELINE_ROUNDS:
            self.phases_s.append([round(seconds, 7) for seconds in phases])
        self.round_s.append(done - started)
