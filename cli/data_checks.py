"""Findings of `draftsmith doctor`, and its checks of the data: chat template, engine, conversations, tokens.

Shapes: S tokens of an example.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.text import Text
from transformers import PreTrainedModel

from draftsmith.cli.console import console
from draftsmith.data.distill.distill import CUT_SHORT
from draftsmith.data.distill.ledger import SHARDS, LedgerView
from draftsmith.data.distill.limits import (
    ITS_TOKENIZER,
    TargetLimits,
    count_prompts_with_room,
    no_room_sentence,
    target_limits,
)
from draftsmith.data.distill.token_dataset import load_tokens
from draftsmith.data.engines.engine import check_engine
from draftsmith.data.sources.conversation import Conversation
from draftsmith.data.sources.distilled import check_answers
from draftsmith.data.sources.mixture import SourceCounts, counted_reasons, load_conversations, question_sources
from draftsmith.data.sources.question_sets import questions_files
from draftsmith.data.tokens.chat_tokens import answer_end_ids, template_end_ids
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.data.tokens.templates import (
    PROBE,
    TemplateProblem,
    TemplateRefusal,
    special_ids,
)
from draftsmith.errors import UserError
from draftsmith.models.target.loading import (
    template_variables,
    weights_hash,
)
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

Severity = Literal["ok", "warning", "defect"]
STYLES = {"ok": "green", "warning": "yellow", "defect": "bold red"}
PREVIEW_TOKENS = 400
SAMPLE_CONVERSATIONS = 256
EXAMPLE_ROWS = 64
MANY_LOST_FRAC = 0.25  # of the conversations: above it, the rest may no longer represent the source
LOW_LOSS_FRAC = 0.05  # of the tokens: below it, most of the training's compute is wasted
THINKING = "enable_thinking"  # as Qwen3, GLM, Granite and others name it
LONGER_ANSWERS = "set data.conversations.source to conversations with longer answers"
KEPT_CUT = (
    "answers were cut at max_new_tokens and kept without an end (data.distill.cut_answers=keep): raise "
    "data.distill.max_new_tokens and distil under another name"
)
NO_STOP = "so the drafter would not learn to stop"


@dataclass(frozen=True)
class Finding:
    """Result of one check, a line of `draftsmith doctor`'s checklist.

    check: name of the check. severity: a defect would waste the training; a warning may be intended.
    sentence: the result, and what to do about it. figures: the result as numbers, for `--json`.
    """

    check: str
    severity: Severity
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(check: str, fine: str, figures: dict[str, Any], *faults: tuple[Any, Severity, str]) -> Finding:
        """Build a finding from the first fault that applies, or with severity "ok" from the sentence `fine`.

        Args:
            faults: (whether the fault applies, its severity, its sentence), the most important first.
        """
        severity, sentence = next((each[1:] for each in faults if each[0]), ("ok", fine))
        return Finding(check, severity, sentence, figures)


@dataclass
class Diagnosis:
    """Result of `draftsmith doctor`: findings by heading (`parts`), and training examples to print (`rows`).

    The examples come from the distilled data, or from the source if nothing is distilled yet.
    """

    recipe_name: str
    tokenizer: Any
    parts: dict[str, list[Finding]] = field(default_factory=dict)
    rows: list[TokenizedConversation] = field(default_factory=list)

    def add(self, part: str, check: str, findings: Iterable[Finding]) -> None:
        """Add a check's findings under the heading `part`; a `UserError` raised by the check becomes a defect."""
        listed = self.parts.setdefault(part, [])
        try:
            for finding in findings:
                listed.append(finding)
        except UserError as error:
            listed.append(Finding(check, "defect", str(error)))
        except torch.OutOfMemoryError:
            sentence = "not checked: the GPU's memory is too small; set target.device=cpu, or see `draftsmith plan`"
            listed.append(Finding(check, "warning", sentence))
        if not listed:
            del self.parts[part]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for part in self.parts.values() for finding in part)

    def show(self, preview_rows: int) -> None:
        """Print the examples, then the checklist, so that the result comes last."""
        plain = console.color_system is None
        rows = self.rows[:preview_rows]
        if rows:
            colours = ("Tokens ", ("with loss", "bold green"), ", tokens ", ("without loss", "dim"))
            console.print("Tokens with loss are between « and »." if plain else Text.assemble(*colours))
        for number, row in enumerate(rows, start=1):
            console.print(f"\nExample {number}: {len(row.input_ids)} tokens, {sum(row.loss_mask)} of them with loss")
            console.print(preview(self.tokenizer, row, marks=plain))
        for name, findings in self.parts.items():
            console.print(f"\n{name}", style="bold", markup=False)
            for finding in findings:
                severity = ("  " + finding.severity.ljust(8), STYLES[finding.severity])
                console.print(Text.assemble(severity, finding.check.ljust(24), finding.sentence))
        numbers = {each: self.count(each) for each in ("defect", "warning")}
        counts = "\n" + ", ".join(f"{number} {each}{'s' * (number != 1)}" for each, number in numbers.items())
        console.print(counts, style="bold red" if numbers["defect"] else "bold green")

    def as_json(self) -> dict[str, Any]:
        """Return all findings with their figures; `healthy` is true if there are no defects, even with warnings."""
        findings = [{"part": name, **asdict(finding)} for name, part in self.parts.items() for finding in part]
        return {"recipe": self.recipe_name, "healthy": not self.count("defect"), "findings": findings}


def preview(tokenizer: Any, row: TokenizedConversation, marks: bool = False) -> Text:
    """Return a training example as text, at most `PREVIEW_TOKENS` tokens: those with loss in colour, the others dim.

    Args:
        marks: Also put text with loss between « and ».
    """
    text = Text()
    shown = list(zip(row.input_ids, row.loss_mask, strict=True))[:PREVIEW_TOKENS]
    for carries_loss, run in groupby(shown, key=lambda pair: bool(pair[1])):
        # decode() would raise for a negative id, which `check_rows` reports.
        piece = tokenizer.decode([max(0, token_id) for token_id, _ in run], skip_special_tokens=False)
        text.append(f"«{piece}»" if marks and carries_loss else piece, "bold green" if carries_loss else "dim")
    if len(row.input_ids) > PREVIEW_TOKENS:
        text.append(f" ... and {len(row.input_ids) - PREVIEW_TOKENS} more tokens", "italic")
    return text


# ---- the checks ----


@dataclass(frozen=True)
class Expected:
    """Limits that every training example must obey: the target's sizes and the tokenizer's special tokens.

    vocabulary_size: rows of the target's embedding. special: ids of special tokens. ends: ids that end an answer.
    """

    tokenizer: Any
    limits: TargetLimits
    vocabulary_size: int
    special: frozenset[int]
    ends: frozenset[int]

    def name_of(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token_id))


def get_expected(target: PreTrainedModel, tokenizer: Any) -> Expected:
    """Return the limits that this target and tokenizer set for training examples.

    Raises:
        UserError: There is no chat template, or it does not write each answer once, after its question.
    """
    special = special_ids(tokenizer)
    ends = frozenset(answer_end_ids(target.generation_config, tokenizer)) | frozenset(template_end_ids(tokenizer))
    size = target.get_input_embeddings().weight.shape[0]
    return Expected(tokenizer, target_limits(target.config), size, special, ends)


def check_template(tokenizer: Any) -> Iterator[Finding]:
    if tokenizer.template_date is not None:
        sentence = f"the chat template writes today's date; every stage of this run writes {tokenizer.template_date}"
        yield Finding("date", "ok", f"{sentence} (target.template_date)")
    named = tokenizer.chat_template
    texts = named.values() if isinstance(named, dict) else [named]
    if any(THINKING in template_variables(text) for text in texts):
        sentence = (
            f"the chat template reads {THINKING}, which is not set, so that the target may think before it answers: "
            f"set target.chat_template_kwargs={{{THINKING}: false}}, or true if you serve it with thoughts"
        )
        yield Finding("thoughts", "warning", sentence)


def check_engine_options(recipe: Recipe) -> Iterator[Finding]:
    """Check the options and the installation of the engine that generates the answers (`data.distill.engine`)."""
    if recipe.data.distill.engine != "none":
        check_engine(recipe)
    yield from ()


def check_source(recipe: Recipe, expected: Expected, diagnosis: Diagnosis) -> Iterator[Finding]:
    """Check the recipe's source: read all its conversations and tokenise a sample, kept in `diagnosis.rows`."""
    counts, chosen = SourceCounts(), recipe.data.conversations
    changed: dict[str, Any] = {"skip_invalid": True}
    try:
        questions_files(question_sources(recipe))
    except UserError as error:
        yield Finding("evaluation questions", "defect", str(error))
        changed["decontaminate"] = []
    data = recipe.data.model_copy(update={"conversations": chosen.model_copy(update=changed)})
    found: list[Conversation] = []
    try:
        check_answers(recipe, expected.tokenizer, weights_hash(recipe.target))
        found.extend(load_conversations(recipe.model_copy(update={"data": data}), counts))
    finally:
        if counts.total.invalid:
            yield _describe_invalid(recipe, counts.total.invalid, len(found))
    for name, tally in counts.by_source.items():
        lost = tally.contaminated.total() > MANY_LOST_FRAC * tally.read
        yield Finding(f"source {name}", "warning" if lost else "ok", tally.sentence(), tally.as_json())
    if not question_sources(recipe):
        sentence = "conversations were not searched for evaluation questions: data.conversations.decontaminate is empty"
        yield Finding("evaluation questions", "warning", sentence)

    sample = random.Random(recipe.seed).sample(found, min(SAMPLE_CONVERSATIONS, len(found)))
    rows: list[TokenizedConversation] = []
    problems: list[TemplateProblem] = []
    cut = too_long = answers_lost = 0
    for conversation in sample:
        whole = conversation
        if not conversation.is_answered:  # placeholder answers show whether the prompts fit and the template works
            turns = [PROBE[1] if turn.role == "assistant" and turn.is_empty else turn for turn in conversation.turns]
            ending = [] if turns[-1].role == "assistant" else [PROBE[1]]
            whole = replace(conversation, turns=(*turns, *ending))
        try:
            found_rows, row_counts = tokenize_rows(expected.tokenizer, whole, recipe.data.max_length_tokens)
        except TemplateProblem as problem:
            problems.append(problem)
            continue
        too_long += not found_rows
        out = row_counts["answers_cut"] + row_counts["answers_out"]
        cut += out > 0
        answers_lost += out
        if conversation.is_answered:
            rows += found_rows

    size, length = len(sample), recipe.data.max_length_tokens
    asks = recipe.data.distill.engine != "none" and not chosen.skip_invalid
    stopped = len(problems) == size or (asks and any(isinstance(problem, TemplateRefusal) for problem in problems))
    fault = f"fails for {len(problems)} of {size} conversations: {problems[0]}" if problems else ""
    yield Finding.of(
        "chat template",
        f"works for all {size} conversations that were tried, out of {len(found)}",
        {"refused": len(problems), "sampled": size},
        (problems, "defect" if stopped else "warning", fault),
    )
    counted = f"{answers_lost} answers of {size} conversations are cut at {length} tokens or lie beyond them; "
    counted += f"{too_long} conversations have no answer before"
    way_out = "raise data.max_length_tokens or use shorter conversations"
    many = cut > MANY_LOST_FRAC * size
    yield Finding.of(
        "over-long",
        counted if cut else f"no answer lies beyond {length} tokens",
        {"cut": cut, "too_long": too_long, "conversations": size},
        (many and too_long == size, "defect", f"{counted}, so no conversation is left: {way_out}"),
        (many, "warning", f"{counted}: {way_out}"),
    )
    if recipe.data.distill.engine != "none":
        yield _check_room(recipe, expected, found)
    yield from check_rows(rows, expected, "set target.chat_template to a template without this fault", length)
    unanswered = sum(not conversation.is_answered for conversation in found)
    if unanswered and not (RunFolder(recipe).data / "tokens").is_dir():
        sentence = f"{unanswered} of {len(found)} conversations have no answers to check yet: the target will answer"
        yield Finding("without answers", "ok", sentence, {"unanswered": unanswered})
    diagnosis.rows = rows


def _describe_invalid(recipe: Recipe, reasons: Counter[str], valid: int) -> Finding:
    """Count the invalid conversations; some end a distillation, unless the recipe skips them."""
    stops, what = False, "invalid ones are skipped: correct the source to use them"
    if not recipe.data.conversations.skip_invalid:
        try:
            deque(load_conversations(recipe), maxlen=0)
        except UserError as error:  # with the place of the first one, and the way out
            stops, what = True, f"distillation would stop at {error}"
    sentence = f"{counted_reasons(reasons)}, {valid} valid conversations; {what}"
    figures = {"count": reasons.total(), "reasons": dict(reasons), "valid": valid}
    return Finding("invalid conversations", "defect" if stops else "warning", sentence, figures)


def _check_room(recipe: Recipe, expected: Expected, conversations: list[Conversation]) -> Finding:
    """Check whether prompts leave room for answers."""
    fitting, lengths = count_prompts_with_room(recipe, expected.tokenizer, conversations, expected.limits)
    looked_at, has_none = len(lengths), lengths and not fitting
    counted = f"{looked_at - fitting} of {looked_at} prompts leave no room for an answer of data.distill.max_new_tokens"
    way_out = f"{counted}, so they would fail: lower that key, or use shorter conversations"
    return Finding.of(
        "room for answers",
        f"{fitting} of {looked_at} prompts leave room for an answer",
        {"fitting": fitting, "prompts": looked_at},
        (has_none, "defect", no_room_sentence(recipe, lengths, expected.limits) if has_none else ""),
        (looked_at - fitting > MANY_LOST_FRAC * looked_at, "warning", way_out),
    )


def check_tokens(recipe: Recipe, folder: Path, expected: Expected, diagnosis: Diagnosis) -> Iterator[Finding]:
    """Check every training example of the dataset that distillation wrote to `folder`/tokens."""
    dataset = load_tokens(RunFolder(recipe))
    kept_cut = 0
    if (folder / SHARDS).exists():
        # By default an answer that hits max_new_tokens is dropped, and the conversation's later turns are lost with it.
        view = LedgerView(folder)
        kept_cut = view.shortened[CUT_SHORT] if recipe.data.distill.cut_answers == "keep" else 0
        cut_short, total = view.shortened[CUT_SHORT] + view.failed[CUT_SHORT], len(view) + view.failed.total()
        sentence = f"{cut_short} of {total} conversations ended, or were dropped, at an answer that hit max_new_tokens"
        way_out = f"{sentence}: raise data.distill.max_new_tokens and distil under another name"
        many = cut_short > MANY_LOST_FRAC * total
        figures = {"cut_short": cut_short, "conversations": total}
        yield Finding.of("answers cut short", sentence, figures, (many and not kept_cut, "warning", way_out))
    batches = dataset.with_format("numpy").iter(batch_size=1024)
    pairs = (pair for batch in batches for pair in zip(batch["input_ids"], batch["loss_mask"], strict=True))
    rows, length = (TokenizedConversation(*pair) for pair in pairs), recipe.data.max_length_tokens
    remedy = f"delete {folder / 'tokens'} and run `draftsmith distill` again"
    yield from check_rows(rows, expected, remedy, length, kept_cut)
    examples = dataset.select(range(min(len(dataset), EXAMPLE_ROWS)))
    diagnosis.rows = [TokenizedConversation(row["input_ids"], row["loss_mask"]) for row in examples] or diagnosis.rows


def check_rows(
    rows: Iterable[TokenizedConversation],
    expected: Expected,
    remedy: str,
    max_length_tokens: int,
    kept_cut: int = 0,
) -> Iterator[Finding]:
    """Check training examples: share of tokens with loss, end tokens, double BOS, vocabulary and positions.

    Args:
        rows: The examples; read once, so may be a generator over more than memory holds.
        expected: The limits that the examples must obey.
        remedy: What to do about wrong examples, the end of each defect's sentence.
        max_length_tokens: Examples of this length may end within an answer.
        kept_cut: Number of answers that were cut at `max_new_tokens` and kept without an end.
    """
    sums: Counter[str] = Counter()
    double_starts, silent_ends, outside = Counter[int](), Counter[int](), Counter[int]()
    longest = 0
    for row in rows:
        ids_s, mask_s = np.asarray(row.input_ids), np.asarray(row.loss_mask)
        sums.update(rows=1, tokens=len(ids_s), loss=int((mask_s != 0).sum()), rows_without_loss=int(not mask_s.any()))
        longest = max(longest, len(ids_s))
        outside.update(ids_s[(ids_s < 0) | (ids_s >= expected.vocabulary_size)].tolist())
        if len(ids_s) > 1 and ids_s[0] == ids_s[1] and int(ids_s[0]) in expected.special:
            double_starts[int(ids_s[0])] += 1
        border_s = np.diff(np.concatenate([[0], mask_s != 0, [0]]).astype(np.int8))  # an answer is a run of ones
        for begin, end in zip(np.flatnonzero(border_s == 1), np.flatnonzero(border_s == -1), strict=True):
            sums["answers"] += 1
            if int(ids_s[end - 1]) in expected.ends or end == max_length_tokens:
                continue
            if expected.ends.intersection(ids_s[begin:end].tolist()):
                sums["overrun"] += 1
            elif end < len(ids_s) and int(ids_s[end]) in expected.ends:
                silent_ends[int(ids_s[end])] += 1
            else:
                sums["endless"] += 1
    if not sums["rows"]:
        return

    tokens, loss, empty, answers = (sums[name] for name in ("tokens", "loss", "rows_without_loss", "answers"))
    frac = loss / max(1, tokens)
    share = f"{frac:.1%} of {tokens:,} tokens in {sums['rows']:,} examples carry loss"
    ends = " or ".join(expected.name_of(token_id) for token_id in sorted(expected.ends))
    kept_cut = min(kept_cut, sums["endless"])
    faults = {
        f"do not end with {ends}": sums["endless"] - kept_cut,
        "end with a token that carries no loss": silent_ends.total(),
        "carry loss after their end token": sums["overrun"],
    }
    keys = ("without_end_token", "end_token_without_loss", "loss_after_end_token")
    counted = ", ".join(f"{number} {what}" for what, number in faults.items() if number)
    pad, known, size = expected.tokenizer.pad_token_id, len(expected.tokenizer), expected.vocabulary_size
    is_pad = f" ({expected.name_of(pad)} is also the pad token, and must carry loss here)" if silent_ends[pad] else ""
    yield Finding.of(
        "supervised tokens",
        share,
        {"tokens": tokens, "loss_tokens": loss, "loss_frac": frac},
        (loss == 0, "defect", f"none of {tokens:,} tokens carries loss, so nothing would be learned: {remedy}"),
        (loss == tokens, "defect", f"all {tokens:,} tokens carry loss, also those of user turns: {remedy}"),
        (empty, "defect", f"{empty} of {sums['rows']} examples have no token with loss: {remedy}"),
        (frac < LOW_LOSS_FRAC, "warning", f"only {share}: {LONGER_ANSWERS}"),
    )
    yield Finding.of(
        "end tokens",
        f"all {answers} answers end with {ends}, which carries loss, or are cut at {max_length_tokens} tokens",
        {"answers": answers, **dict(zip(keys, faults.values(), strict=True)), "end_tokens": ends},
        (counted, "defect", f"of {answers} answers {counted}{is_pad}, {NO_STOP}: {remedy}"),
        (kept_cut, "warning", f"{kept_cut} {KEPT_CUT}"),
    )
    if double_starts:
        name, count = expected.name_of(double_starts.most_common(1)[0][0]), double_starts.total()
        sentence = f"{count} of {sums['rows']} examples start with {name} twice instead of once: {remedy}"
        yield Finding("double BOS", "defect", sentence, {"rows_with_double_bos": count})
    ids = ", ".join(str(token_id) for token_id, _ in outside.most_common(5))
    strangers = f"{outside.total()} tokens (ids {ids}) are outside the target's vocabulary of {size:,}"
    unused = f"the tokenizer has {known:,} tokens, the target {size:,}; no example uses the extra ones yet"
    yield Finding.of(
        "vocabulary",
        f"all ids are in the target's vocabulary of {size:,}",
        {"tokens_outside": outside.total(), "target_vocabulary": size, "tokenizer_vocabulary": known},
        (outside, "defect", f"{strangers}: {ITS_TOKENIZER}"),
        (known > size, "warning", f"{unused}: {ITS_TOKENIZER}"),
    )
    limit, length = expected.limits.positions, f"the longest example has {longest:,} tokens"
    # Of rows in which RoPE changes a single one counts, and a sample may have none.
    possible = longest if expected.limits.rope_switch is None else max(longest, max_length_tokens)
    refusal = expected.limits.refusal(possible)
    yield Finding.of(
        "positions",
        length if limit is None else f"{length}, the target has {limit:,} positions",
        {"longest_row_tokens": longest, "target_positions": limit},
        (refusal, "defect", f"examples may have {possible:,} tokens, but {refusal}"),
    )
