"""Checks of token rows with their loss masks: would a drafter learn from them what it is asked for in decoding?

Shapes: S tokens of a row.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftsmith.data.checks.finding import Finding
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.tokens.answer_spans import PROBE
from draftsmith.data.tokens.chat_tokens import TokenizedConversation, special_ids, tokenize_conversation
from draftsmith.data.tokens.end_ids import answer_end_ids

LOW_LOSS_FRAC = 0.05  # of the tokens: below it, most of the work is for nothing
ROWS_TO_PAD = 64

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Expected:
    """What rows are held against: the target's sizes, the tokenizer's tokens, and how the trainer makes batches."""

    tokenizer: Any
    vocabulary_size: int
    max_positions: int | None
    special: frozenset[int]
    ends: frozenset[int]  # any of them may end an answer
    collate: Collate

    def name_of(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token_id))


def expected_of(target: Any, tokenizer: Any, collate: Collate) -> Expected:
    """Read off the target and its tokenizer.

    Raises:
        UserError: The chat template lets no conversation through, or nothing ends an answer.
    """
    special = special_ids(tokenizer)
    # Some templates (Harmony) end an answer of the history with another token than the last one.
    answers = tokenize_conversation(tokenizer, Conversation("probe", PROBE + PROBE)).answers()
    return Expected(
        tokenizer=tokenizer,
        vocabulary_size=target.get_input_embeddings().weight.shape[0],
        max_positions=getattr(target.config.get_text_config(), "max_position_embeddings", None),
        special=special,
        ends=frozenset(answer_end_ids(target.generation_config, tokenizer))
        | (special & {answer[-1] for answer in answers}),
        collate=collate,
    )


@dataclass
class _RowSums:
    """Sums over rows. An answer is a run of ones in the loss mask."""

    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    rows_without_loss: int = 0
    double_starts: Counter[int] = field(default_factory=Counter)
    answers: int = 0
    endless_answers: int = 0
    overrun_answers: int = 0  # carry loss behind their end token
    silent_ends: Counter[int] = field(default_factory=Counter)  # end tokens without loss
    outside: Counter[int] = field(default_factory=Counter)
    longest_tokens: int = 0

    def add(self, ids_s: np.ndarray, mask_s: np.ndarray, expected: Expected) -> None:
        self.rows += 1
        self.tokens += len(ids_s)
        self.loss_tokens += int((mask_s != 0).sum())
        self.rows_without_loss += not mask_s.any()
        self.longest_tokens = max(self.longest_tokens, len(ids_s))
        self.outside.update(ids_s[(ids_s < 0) | (ids_s >= expected.vocabulary_size)].tolist())
        if len(ids_s) > 1 and ids_s[0] == ids_s[1] and int(ids_s[0]) in expected.special:
            self.double_starts[int(ids_s[0])] += 1
        border_s = np.diff(np.concatenate([[0], mask_s != 0, [0]]).astype(np.int8))
        for begin, end in zip(np.flatnonzero(border_s == 1), np.flatnonzero(border_s == -1), strict=True):
            self.answers += 1
            if int(ids_s[end - 1]) in expected.ends:
                continue
            if expected.ends.intersection(ids_s[begin:end].tolist()):
                self.overrun_answers += 1
            elif end < len(ids_s) and int(ids_s[end]) in expected.ends:
                self.silent_ends[int(ids_s[end])] += 1
            else:
                self.endless_answers += 1


def check_rows(rows: Iterable[TokenizedConversation], expected: Expected, remedy: str) -> list[Finding]:
    """Share of loss, rows without any, double BOS, end tokens, padding, vocabulary, positions.

    Args:
        rows: Read once; may be a generator over more than memory holds.
        expected: What they are held against.
        remedy: The way out where the rows themselves are wrong.
    """
    sums = _RowSums()
    to_pad: list[TokenizedConversation] = []
    for row in rows:
        sums.add(np.asarray(row.input_ids), np.asarray(row.loss_mask), expected)
        if len(to_pad) < ROWS_TO_PAD:
            to_pad.append(row)
    if not sums.rows:
        return []
    return [
        _loss_share(sums, remedy),
        _rows_without_loss(sums, remedy),
        _double_bos(sums, expected, remedy),
        _end_tokens(sums, expected, remedy),
        _padding(sums, to_pad, expected, remedy),
        _vocabulary(sums, expected),
        _positions(sums, expected),
    ]


def _loss_share(sums: _RowSums, remedy: str) -> Finding:
    frac = sums.loss_tokens / max(1, sums.tokens)
    figures = {"tokens": sums.tokens, "loss_tokens": sums.loss_tokens, "loss_frac": frac}
    if sums.loss_tokens == 0:
        sentence = f"none of {sums.tokens:,} tokens carries loss, so nothing would be learned: {remedy}"
        return Finding("supervised tokens", "defect", sentence, figures)
    if sums.loss_tokens == sums.tokens:
        sentence = f"all {sums.tokens:,} tokens carry loss, the user's too: {remedy}"
        return Finding("supervised tokens", "defect", sentence, figures)
    share = f"{frac:.1%} of {sums.tokens:,} tokens carry loss"
    if frac < LOW_LOSS_FRAC:
        sentence = f"only {share}: set data.conversations.source to conversations with longer answers"
        return Finding("supervised tokens", "warning", sentence, figures)
    return Finding("supervised tokens", "ok", share, figures)


def _rows_without_loss(sums: _RowSums, remedy: str) -> Finding:
    figures = {"rows": sums.rows, "rows_without_loss": sums.rows_without_loss}
    if sums.rows_without_loss:
        sentence = f"{sums.rows_without_loss} of {sums.rows} rows hold no answer: {remedy}"
        return Finding("rows without answers", "defect", sentence, figures)
    return Finding("rows without answers", "ok", f"none of {sums.rows}", figures)


def _double_bos(sums: _RowSums, expected: Expected, remedy: str) -> Finding:
    figures = {"rows_with_double_bos": sums.double_starts.total()}
    if not sums.double_starts:
        return Finding("double BOS", "ok", "no row starts with the same special token twice", figures)
    name = expected.name_of(sums.double_starts.most_common(1)[0][0])
    sentence = f"{sums.double_starts.total()} of {sums.rows} rows start with {name} twice: {remedy}, it is written once"
    return Finding("double BOS", "defect", sentence, figures)


def _end_tokens(sums: _RowSums, expected: Expected, remedy: str) -> Finding:
    """Silent end tokens that are also the pad token have a finding of their own."""
    pad = expected.tokenizer.pad_token_id
    silent = sums.silent_ends.total() - sums.silent_ends[pad]
    ends = " or ".join(expected.name_of(token_id) for token_id in sorted(expected.ends))
    figures = {
        "answers": sums.answers,
        "without_end_token": sums.endless_answers,
        "end_token_without_loss": silent,
        "loss_behind_end_token": sums.overrun_answers,
        "end_tokens": ends,
    }
    faults = [
        f"{number} {what}"
        for number, what in (
            (sums.endless_answers, f"do not end with {ends}"),
            (silent, "end with a token that carries no loss"),
            (sums.overrun_answers, "go on carrying loss behind their end token"),
        )
        if number
    ]
    if not faults:
        return Finding("end tokens", "ok", f"all {sums.answers} answers end with {ends}, which carries loss", figures)
    sentence = f"of {sums.answers} answers {', '.join(faults)}, so the drafter would not learn to stop: {remedy}"
    return Finding("end tokens", "defect", sentence, figures)


def _padding(sums: _RowSums, rows: list[TokenizedConversation], expected: Expected, remedy: str) -> Finding:
    """pad = eos is harmless as long as no mask is made from it; the trainer's batches are tried too."""
    pad = expected.tokenizer.pad_token_id
    masked = sums.silent_ends[pad]
    batch = expected.collate([{"input_ids": row.input_ids, "loss_mask": row.loss_mask} for row in rows])
    lost = padded = 0
    for row, mask_s in zip(rows, np.asarray(batch["loss_mask"]), strict=True):
        length = len(row.loss_mask)
        lost += int((mask_s[:length] != np.asarray(row.loss_mask)).sum())
        padded += int((mask_s[length:] != 0).sum())
    shared = pad is not None and pad in expected.ends
    figures = {"pad_is_end_token": shared, "masked_ends": masked, "changed_in_batch": lost, "padding_with_loss": padded}
    if masked:
        sentence = (
            f"{expected.name_of(pad)} is both pad and end token, and {masked} of {sums.answers} answers have lost "
            f"the loss on it: {remedy}, with a mask that is not made from the pad token"
        )
        return Finding("padding", "defect", sentence, figures)
    if lost or padded:
        what = f"changes the loss mask of {lost} real tokens" if lost else f"carries loss at {padded} places"
        sentence = f"padding {what} in the trainer's batches: tell collation by length, not by the pad token"
        return Finding("padding", "defect", sentence, figures)
    why = f"; {expected.name_of(pad)} is also an end token, and keeps its loss" if shared else ""
    return Finding("padding", "ok", f"carries no loss and takes none away{why}", figures)


def _vocabulary(sums: _RowSums, expected: Expected) -> Finding:
    known, size = len(expected.tokenizer), expected.vocabulary_size
    figures = {"tokens_outside": sums.outside.total(), "target_vocabulary": size, "tokenizer_vocabulary": known}
    way_out = "take the tokenizer that belongs to the target, or resize the target's embeddings and save it"
    if sums.outside:
        ids = ", ".join(str(token_id) for token_id, _ in sums.outside.most_common(5))
        sentence = (
            f"{sums.outside.total()} tokens (ids {ids}) are outside the target's vocabulary of {size:,}: {way_out}"
        )
        return Finding("vocabulary", "defect", sentence, figures)
    if known > size:
        sentence = f"the tokenizer knows {known:,} tokens, the target {size:,}; no row has the others yet: {way_out}"
        return Finding("vocabulary", "warning", sentence, figures)
    return Finding("vocabulary", "ok", f"all ids are among the target's {size:,}", figures)


def _positions(sums: _RowSums, expected: Expected) -> Finding:
    limit, longest = expected.max_positions, sums.longest_tokens
    figures = {"longest_row_tokens": longest, "target_positions": limit}
    if limit is not None and longest > limit:
        sentence = (
            f"the longest row has {longest:,} tokens, the target only {limit:,} positions: "
            f"set data.max_length_tokens to {limit} at most"
        )
        return Finding("positions", "defect", sentence, figures)
    room = "" if limit is None else f", the target {limit:,} positions"
    return Finding("positions", "ok", f"the longest row has {longest:,} tokens{room}", figures)
