"""Whether the recipe's data can be trained on, before hours are spent: the first part of `draftsmith doctor`.

Before distillation a sample of the source's conversations is tokenised as training would; afterwards every row of
`data/tokens` is looked at too. Only reads: a distillation that is running is not disturbed.

Shapes: S tokens of a row.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.data.distill.distill import CUT_SHORT
from draftsmith.data.distill.ledger import DONE, FAILED, SHARDS, SHORTENED, LedgerView
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.mixture import SourceCounts, counted_reasons, load_conversations, question_sources
from draftsmith.data.tokens.answer_spans import PROBE, TemplateProblem, TemplateRefusal
from draftsmith.data.tokens.chat_tokens import (
    TokenizedConversation,
    answer_end_ids,
    special_ids,
    tokenize_conversation,
    tokenize_shortened,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe

Severity = Literal["ok", "warning", "defect"]
SAMPLE_CONVERSATIONS = 256
EXAMPLE_ROWS = 64
MANY_LOST_FRAC = 0.25  # of the conversations: above it, what is left is another selection than was meant
LOW_LOSS_FRAC = 0.05  # of the tokens: below it, most of the work is for nothing


@dataclass(frozen=True)
class Finding:
    """One line of the checklist.

    Args:
        check: What was looked at, in a word or two.
        severity: A defect would waste the training; a warning may be meant.
        sentence: What was found and, unless it is fine, the way out.
        figures: The same as numbers, for programs.
    """

    check: str
    severity: Severity
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checked:
    """Findings under one heading, and rows to show and to try the drafter on."""

    heading: str
    findings: list[Finding]
    rows: list[TokenizedConversation] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What rows are held against: the target's sizes and the tokenizer's tokens. ends: any of them ends an answer."""

    tokenizer: Any
    vocabulary_size: int
    max_positions: int | None
    special: frozenset[int]
    ends: frozenset[int]

    @classmethod
    def of(cls, target: Any, tokenizer: Any) -> "Expected":
        """
        Raises:
            UserError: The chat template lets no conversation through, or nothing ends an answer.
        """
        special = special_ids(tokenizer)
        # Some templates (Harmony) end an answer of the history with another token than the last one.
        answers = tokenize_conversation(tokenizer, Conversation("probe", PROBE + PROBE)).answers()
        return cls(
            tokenizer,
            target.get_input_embeddings().weight.shape[0],
            getattr(target.config.get_text_config(), "max_position_embeddings", None),
            special,
            frozenset(answer_end_ids(target.generation_config, tokenizer)) | (special & {a[-1] for a in answers}),
        )

    def name_of(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token_id))


def check_source(recipe: Recipe, expected: Expected) -> Checked:
    """The recipe's conversations: all are read, a sample is tokenised."""
    counts = SourceCounts()
    skipping = recipe.data.conversations.model_copy(update={"skip_invalid": True})
    data = recipe.data.model_copy(update={"conversations": skipping})
    try:
        found = list(load_conversations(recipe.model_copy(update={"data": data}), counts, expected.tokenizer))
    except UserError as error:
        return Checked("source conversations", [*_invalid(recipe, counts, 0), Finding("source", "defect", str(error))])
    sample = random.Random(recipe.seed).sample(found, min(SAMPLE_CONVERSATIONS, len(found)))
    rows: list[TokenizedConversation] = []
    problems: list[TemplateProblem] = []
    shortened = too_long = 0
    for conversation in sample:
        whole = conversation if conversation.is_answered else _with_stand_in_answers(conversation)
        try:
            result = tokenize_shortened(expected.tokenizer, whole, recipe.data.max_length_tokens)
        except TemplateProblem as problem:
            problems.append(problem)
            continue
        too_long += result is None
        shortened += result is not None and result[1] > 0
        if result is not None and conversation.is_answered:
            rows.append(result[0])
    findings = [
        *_invalid(recipe, counts, len(found)),
        *_left_out(recipe, counts),
        _template(recipe, problems, len(sample)),
        _lengths(shortened, too_long, len(sample), recipe.data.max_length_tokens),
        *check_rows(rows, expected, "set target.chat_template to a template without this fault"),
    ]
    unanswered = sum(not conversation.is_answered for conversation in found)
    if unanswered:
        sentence = f"{unanswered} of {len(found)} conversations, which the target answers: not looked at yet"
        findings.append(Finding("without answers", "ok", sentence, {"unanswered": unanswered}))
    return Checked(f"source conversations ({len(found)} found, {len(sample)} of them tokenised)", findings, rows)


def check_token_rows(dataset: Any, folder: Path, expected: Expected) -> Checked:
    """Every row of the dataset that distillation wrote to `folder`/tokens."""
    batches = dataset.with_format("numpy").iter(batch_size=1024)
    pairs = (pair for batch in batches for pair in zip(batch["input_ids"], batch["loss_mask"], strict=True))
    remedy = f"delete {folder / 'tokens'} and run `draftsmith distill` again"
    findings = check_rows((TokenizedConversation(*pair) for pair in pairs), expected, remedy)
    if (folder / SHARDS).exists():
        findings.insert(0, _answers_cut_short(folder))
    examples = [
        TokenizedConversation(row["input_ids"], row["loss_mask"])
        for row in dataset.select(range(min(len(dataset), EXAMPLE_ROWS)))
    ]
    return Checked(f"tokens to train on ({len(dataset)} rows)", findings, examples)


def _with_stand_in_answers(conversation: Conversation) -> Conversation:
    """So that prompts show whether they fit and go through the template; the rows themselves would show nothing."""
    answer = PROBE[1]
    turns = [turn if turn.content else answer for turn in conversation.turns]
    return Conversation(conversation.id, tuple(turns if turns[-1].role == "assistant" else [*turns, answer]))


def _invalid(recipe: Recipe, counts: SourceCounts, found: int) -> list[Finding]:
    """Records that are no conversation; distillation stops at them unless it is to skip them."""
    invalid = counts.total.invalid
    if not invalid:
        return []
    figures = {"count": invalid.total(), "reasons": dict(invalid), "valid": found}
    counted = f"{counted_reasons(invalid)} beside {found} valid ones"
    if recipe.data.conversations.skip_invalid:
        sentence = f"{counted}, which are skipped: correct the source to use them"
        return [Finding("invalid conversations", "warning", sentence, figures)]
    sentence = (
        f"{counted}, at which distillation would stop: correct the source, or set data.conversations.skip_invalid=true"
    )
    return [Finding("invalid conversations", "defect", sentence, figures)]


def _left_out(recipe: Recipe, counts: SourceCounts) -> list[Finding]:
    """Of each source: duplicates, evaluation questions, and what the recipe's filters exclude."""
    findings = []
    for name, tally in counts.by_source.items():
        lost = tally.contaminated.total() + tally.filtered.total()
        severity: Severity = "warning" if lost > MANY_LOST_FRAC * tally.read else "ok"
        findings.append(Finding(f"source {name}", severity, tally.sentence(), tally.as_json()))
    if not question_sources(recipe):
        sentence = "not looked for: data.conversations.decontaminate is empty"
        findings.append(Finding("evaluation questions", "warning", sentence))
    return findings


def _template(recipe: Recipe, problems: list[TemplateProblem], sampled: int) -> Finding:
    """Conversations that do not go through the chat template. Distillation stops at those that it refuses."""
    refused = len(problems)
    figures = {"refused": refused, "sampled": sampled}
    if not refused:
        return Finding("chat template", "ok", f"takes all {sampled} conversations", figures)
    asks = recipe.data.distill.engine != "none" and not recipe.data.conversations.skip_invalid
    stops = asks and any(isinstance(problem, TemplateRefusal) for problem in problems)
    severity: Severity = "defect" if stops or refused == sampled else "warning"
    return Finding("chat template", severity, f"{refused} of {sampled} do not go through: {problems[0]}", figures)


def _lengths(shortened: int, too_long: int, conversations: int, max_length_tokens: int) -> Finding:
    figures = {"shortened": shortened, "too_long": too_long, "conversations": conversations}
    counted = (
        f"of {conversations} conversations {shortened} are shortened by whole turns to {max_length_tokens} tokens, "
        f"{too_long} are too long altogether"
    )
    way_out = "raise data.max_length_tokens or take shorter conversations"
    if conversations and too_long == conversations:
        return Finding("over-long", "defect", f"{counted}, so nothing is left: {way_out}", figures)
    if shortened + too_long > MANY_LOST_FRAC * conversations:
        return Finding("over-long", "warning", f"{counted}: {way_out}", figures)
    return Finding("over-long", "ok", counted, figures)


def _answers_cut_short(folder: Path) -> Finding:
    """Answers that hit max_new_tokens. They are never kept as if they were whole, and what would follow is lost."""
    by_state = LedgerView(folder).counts()
    settled = [by_state.get(state, Counter()) for state in (DONE, SHORTENED, FAILED)]
    cut_short, all_settled = sum(counts[CUT_SHORT] for counts in settled), sum(counts.total() for counts in settled)
    figures = {"cut_short": cut_short, "conversations": all_settled}
    counted = f"{cut_short} of {all_settled} conversations ended, or were dropped, at an answer that hit max_new_tokens"
    if cut_short > MANY_LOST_FRAC * all_settled:
        way_out = "raise data.distill.max_new_tokens and distil under another name"
        return Finding("answers cut short", "warning", f"{counted}: {way_out}", figures)
    return Finding("answers cut short", "ok", counted, figures)


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
    overrun_answers: int = 0  # carry loss after their end token
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
    """Share of loss, double BOS, end tokens, vocabulary, positions.

    Args:
        rows: Read once; may be a generator over more than memory holds.
        expected: What they are held against.
        remedy: The way out where the rows themselves are wrong.
    """
    sums = _RowSums()
    for row in rows:
        sums.add(np.asarray(row.input_ids), np.asarray(row.loss_mask), expected)
    if not sums.rows:
        return []
    findings = [_loss_share(sums, remedy), _end_tokens(sums, expected, remedy)]
    if sums.double_starts:
        name, count = expected.name_of(sums.double_starts.most_common(1)[0][0]), sums.double_starts.total()
        sentence = f"{count} of {sums.rows} rows start with {name} twice: {remedy}, it is written once"
        findings.append(Finding("double BOS", "defect", sentence, {"rows_with_double_bos": count}))
    return [*findings, _vocabulary(sums, expected), _positions(sums, expected)]


def _loss_share(sums: _RowSums, remedy: str) -> Finding:
    frac = sums.loss_tokens / max(1, sums.tokens)
    figures = {"tokens": sums.tokens, "loss_tokens": sums.loss_tokens, "loss_frac": frac}
    share = f"{frac:.1%} of {sums.tokens:,} tokens carry loss"
    defect = None
    if sums.loss_tokens == 0:
        defect = f"none of {sums.tokens:,} tokens carries loss, so nothing would be learned"
    elif sums.loss_tokens == sums.tokens:
        defect = f"all {sums.tokens:,} tokens carry loss, the user's too"
    elif sums.rows_without_loss:
        defect = f"{sums.rows_without_loss} of {sums.rows} rows hold no answer"
    if defect is not None:
        return Finding("supervised tokens", "defect", f"{defect}: {remedy}", figures)
    if frac < LOW_LOSS_FRAC:
        sentence = f"only {share}: set data.conversations.source to conversations with longer answers"
        return Finding("supervised tokens", "warning", sentence, figures)
    return Finding("supervised tokens", "ok", share, figures)


def _end_tokens(sums: _RowSums, expected: Expected, remedy: str) -> Finding:
    ends = " or ".join(expected.name_of(token_id) for token_id in sorted(expected.ends))
    faults = [
        f"{number} {what}"
        for number, what in (
            (sums.endless_answers, f"do not end with {ends}"),
            (sums.silent_ends.total(), "end with a token that carries no loss"),
            (sums.overrun_answers, "go on carrying loss after their end token"),
        )
        if number
    ]
    figures = {
        "answers": sums.answers,
        "without_end_token": sums.endless_answers,
        "end_token_without_loss": sums.silent_ends.total(),
        "loss_after_end_token": sums.overrun_answers,
        "end_tokens": ends,
    }
    if not faults:
        return Finding("end tokens", "ok", f"all {sums.answers} answers end with {ends}, which carries loss", figures)
    pad = expected.tokenizer.pad_token_id
    is_pad = f" ({expected.name_of(pad)} is the pad token too, and must keep its loss)" if sums.silent_ends[pad] else ""
    sentence = (
        f"of {sums.answers} answers {', '.join(faults)}{is_pad}, so the drafter would not learn to stop: {remedy}"
    )
    return Finding("end tokens", "defect", sentence, figures)


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
