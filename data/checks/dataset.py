"""Whether the recipe's data can be trained on, before hours are spent: what `draftsmith doctor` finds in it.

Before distillation a sample of the source's conversations is tokenised as training would; afterwards every row of
`data/tokens` is looked at too. Only reads: a distillation that is running is not disturbed.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

from draftsmith.data.checks.finding import Checked, Finding, Severity
from draftsmith.data.checks.rows import Expected, check_rows
from draftsmith.data.distill.ledger_db import DONE, FAILED, LEDGER_FILE, SHORTENED
from draftsmith.data.distill.ledger_view import LedgerView
from draftsmith.data.distill.report import CUT_SHORT
from draftsmith.data.distill.token_dataset import read_token_report
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.counts import SourceCounts, counted_reasons
from draftsmith.data.sources.mixture import load_conversations, question_sources
from draftsmith.data.tokens.answer_spans import PROBE, TemplateProblem, TemplateRefusal
from draftsmith.data.tokens.chat_tokens import TokenizedConversation, tokenize_shortened
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import FiltersRecipe, Recipe

SAMPLE_CONVERSATIONS = 256
EXAMPLE_ROWS = 64
MANY_LOST_FRAC = 0.25  # of the conversations: above it, what is left is another selection than was meant


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
        *_unanswered(found),
        _template(recipe, problems, len(sample)),
        _lengths(shortened, too_long, len(sample), recipe.data.max_length_tokens),
        *check_rows(rows, expected, "set target.chat_template to a template without this fault"),
    ]
    return Checked(f"source conversations ({len(found)} found, {len(sample)} of them tokenised)", findings, rows)


def check_token_rows(dataset: Any, folder: Path, max_length_tokens: int, expected: Expected) -> Checked:
    """Every row of the dataset that distillation wrote to `folder`/tokens."""
    batches = dataset.with_format("numpy").iter(batch_size=1024)
    pairs = (pair for batch in batches for pair in zip(batch["input_ids"], batch["loss_mask"], strict=True))
    remedy = f"delete {folder / 'tokens'} and run `draftsmith distill` again"
    findings = check_rows((TokenizedConversation(*pair) for pair in pairs), expected, remedy)
    report = read_token_report(folder / "tokens")
    if report is not None:
        counts = report.shortened, report.too_long, report.conversations
        findings.insert(0, _lengths(*counts, max_length_tokens))
    if (folder / LEDGER_FILE).exists():
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


def _unanswered(found: list[Conversation]) -> list[Finding]:
    count = sum(not conversation.is_answered for conversation in found)
    if not count:
        return []
    sentence = f"{count} of {len(found)} conversations, which the target answers: their rows are not looked at yet"
    return [Finding("without answers", "ok", sentence, {"unanswered": count, "conversations": len(found)})]


def _invalid(recipe: Recipe, counts: SourceCounts, found: int) -> list[Finding]:
    """Empty conversations, and other records that are none."""
    invalid = counts.total.invalid
    reasons = [reason for reason in invalid if reason.startswith("empty ") or reason in ("no turns", "no user turn")]
    empty = Counter({reason: invalid[reason] for reason in reasons})
    skips = recipe.data.conversations.skip_invalid
    findings = []
    for check, what in (("empty conversations", empty), ("malformed conversations", invalid - empty)):
        figures = {"count": what.total(), "reasons": dict(what), "valid": found}
        if not what:
            findings.append(Finding(check, "ok", "none", figures))
        elif skips:
            sentence = (
                f"{counted_reasons(what)} beside {found} valid ones, which are skipped: correct the source to use them"
            )
            findings.append(Finding(check, "warning", sentence, figures))
        else:
            sentence = (
                f"{counted_reasons(what)} beside {found} valid ones, at which distillation would stop: correct the "
                "source, or set data.conversations.skip_invalid=true"
            )
            findings.append(Finding(check, "defect", sentence, figures))
    return findings


def _left_out(recipe: Recipe, counts: SourceCounts) -> list[Finding]:
    """Duplicates, evaluation questions, and what the recipe's filters exclude; of a mixture, each source's share."""
    total, read = counts.total, counts.total.read
    findings = [Finding("duplicates", "ok", f"{total.duplicates} of {read}", {"count": total.duplicates})]
    files = question_sources(recipe)
    for check, what, is_asked, unasked in (
        ("evaluation questions", total.contaminated, bool(files), "not looked for: data.conversations.decontaminate"),
        ("filtered out", total.filtered, recipe.data.conversations.filters != FiltersRecipe(), ""),
    ):
        figures = {"count": what.total(), "reasons": dict(what), "read": read}
        if is_asked:
            severity: Severity = "warning" if what.total() > MANY_LOST_FRAC * read else "ok"
            findings.append(Finding(check, severity, f"{counted_reasons(what)} of {read} left out", figures))
        elif unasked:
            findings.append(Finding(check, "warning", f"{unasked} is empty", figures))
    if recipe.data.conversations.mixture:
        findings += [
            Finding(
                f"source {name}", "ok", f"{tally.kept / max(1, total.kept):.1%}: {tally.sentence()}", tally.as_json()
            )
            for name, tally in counts.by_source.items()
        ]
    return findings


def _template(recipe: Recipe, problems: list[TemplateProblem], sampled: int) -> Finding:
    """Conversations that do not go through the chat template. Distillation stops at those that it refuses."""
    refused = len(problems)
    figures = {"refused": refused, "sampled": sampled}
    if not refused:
        return Finding("chat template", "ok", f"takes all {sampled} conversations", figures)
    asks = recipe.data.distill.engine != "none" and not recipe.data.conversations.skip_invalid
    stops = asks and any(isinstance(problem, TemplateRefusal) for problem in problems)
    severity: Any = "defect" if stops or refused == sampled else "warning"
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
