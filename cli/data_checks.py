"""Findings of `draftsmith doctor`, and its checks of the data: chat template, engine, conversations, tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

import torch
from rich.text import Text
from transformers import PreTrainedModel

from draftsmith.cli.console import console
from draftsmith.data.distill.limits import check_conversations, check_tokens, target_limits
from draftsmith.data.distill.token_dataset import TokenReport, load_tokens, recorded_report
from draftsmith.data.engines.engine import check_engine
from draftsmith.data.sources.distilled import check_answers
from draftsmith.data.sources.mixture import SourceCounts, load_conversations, question_sources
from draftsmith.data.tokens.chat_tokens import answer_end_ids, template_end_ids
from draftsmith.data.tokens.loss_mask import TokenizedConversation
from draftsmith.data.tokens.rows import tokenize_rows
from draftsmith.data.tokens.templates import PROBE, TemplateProblem, TemplateRefusal
from draftsmith.errors import UserError
from draftsmith.models.target.loading import template_variables, weights_hash
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

Severity = Literal["ok", "warning", "defect"]
STYLES = {"ok": "green", "warning": "yellow", "defect": "bold red"}
PREVIEW_TOKENS = 400
SAMPLE_CONVERSATIONS = 256
EXAMPLE_ROWS = 64
MANY_LOST_FRAC = 0.25  # of the conversations: above it, the rest may no longer represent the source
THINKING = "enable_thinking"  # as Qwen3, GLM, Granite and others name it


@dataclass(frozen=True)
class Finding:
    """Result of one check, a line of `draftsmith doctor`'s checklist.

    check: name of the check. severity: a defect would waste the training; a warning may be intended.
    sentence: the result, and what to do about it.
    """

    check: str
    severity: Severity
    sentence: str


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
        rows = self.rows[:preview_rows]
        if rows:
            console.print("Tokens with loss are between « and ».")
        for number, row in enumerate(rows, start=1):
            console.print(f"\nExample {number}: {len(row.input_ids)} tokens, {sum(row.loss_mask)} of them with loss")
            console.print(preview(self.tokenizer, row))
        for name, findings in self.parts.items():
            console.print(f"\n{name}", style="bold", markup=False)
            for finding in findings:
                severity = ("  " + finding.severity.ljust(8), STYLES[finding.severity])
                console.print(Text.assemble(severity, finding.check.ljust(24), finding.sentence))
        numbers = {each: self.count(each) for each in ("defect", "warning")}
        counts = "\n" + ", ".join(f"{number} {each}{'s' * (number != 1)}" for each, number in numbers.items())
        console.print(counts, style="bold red" if numbers["defect"] else "bold green")

    def as_json(self) -> dict[str, Any]:
        """Return all findings; `healthy` is true if there are no defects, even with warnings."""
        findings = [{"part": name, **asdict(finding)} for name, part in self.parts.items() for finding in part]
        return {"recipe": self.recipe_name, "healthy": not self.count("defect"), "findings": findings}


def preview(tokenizer: Any, row: TokenizedConversation) -> Text:
    """Return a training example as text, at most `PREVIEW_TOKENS` tokens: those with loss in colour between « and »."""
    text = Text()
    shown = list(zip(row.input_ids, row.loss_mask, strict=True))[:PREVIEW_TOKENS]
    for carries_loss, run in groupby(shown, key=lambda pair: bool(pair[1])):
        piece = tokenizer.decode([token_id for token_id, _ in run], skip_special_tokens=False)
        text.append(*(f"«{piece}»", "bold green") if carries_loss else (piece, "dim"))
    if len(row.input_ids) > PREVIEW_TOKENS:
        text.append(f" ... and {len(row.input_ids) - PREVIEW_TOKENS} more tokens", "italic")
    return text


# ---- the checks ----


def check_template(target: PreTrainedModel, tokenizer: Any) -> Iterator[Finding]:
    """Check that the chat template writes each answer once, after its question, and that a token ends it."""
    find_end_ids(target, tokenizer)
    named = tokenizer.chat_template
    texts = named.values() if isinstance(named, dict) else [named]
    if any(THINKING in template_variables(text) for text in texts):
        sentence = (
            f"the chat template reads {THINKING}, which is not set, so that the target may think before it answers: "
            f"set target.chat_template_kwargs={{{THINKING}: false}}, or true if you serve it with thoughts"
        )
        yield Finding("thoughts", "warning", sentence)


def find_end_ids(target: PreTrainedModel, tokenizer: Any) -> set[int]:
    """Return the ids of all tokens that end an answer, also an earlier one.

    Raises:
        UserError: There is none, or the chat template cannot be used.
    """
    return {*answer_end_ids(target.generation_config, tokenizer), *template_end_ids(tokenizer)}


def check_engine_options(recipe: Recipe) -> Iterator[Finding]:
    """Check the options and the installation of the engine that generates the answers (`data.distill.engine`)."""
    if recipe.data.distill.engine != "none":
        check_engine(recipe)
    yield from ()


def check_source(
    recipe: Recipe, target: PreTrainedModel, tokenizer: Any, rows: list[TokenizedConversation]
) -> Iterator[Finding]:
    """Check the source's conversations as distillation does, tokenise a sample of them, and add its examples to `rows`.

    A question without an answer gets a short one here, to see whether the template takes the conversation.
    """
    counts, data, limits = SourceCounts(), recipe.data, target_limits(target.config)
    check_answers(recipe, tokenizer, weights_hash(recipe.target))
    conversations = {each.id: each for each in load_conversations(recipe, counts)}
    check_conversations(recipe, tokenizer, conversations, limits, counts)
    for name, tally in counts.by_source.items():
        is_much_lost = tally.contaminated.total() + tally.invalid.total() > MANY_LOST_FRAC * tally.read
        yield Finding(f"source {name}", "warning" if is_much_lost else "ok", tally.sentence())
    if not question_sources(recipe):
        sentence = "conversations were not searched for evaluation questions: data.conversations.decontaminate is empty"
        yield Finding("evaluation questions", "warning", sentence)

    end_ids = find_end_ids(target, tokenizer)
    sample = random.Random(recipe.seed).sample([*conversations.values()], min(SAMPLE_CONVERSATIONS, len(conversations)))
    problems: list[TemplateProblem] = []
    lost, cut, longest, last_ids = Counter[str](), 0, 0, list[int]()
    for conversation in sample:
        turns = [PROBE[1] if turn.role == "assistant" and turn.is_empty else turn for turn in conversation.turns]
        turns += [] if turns[-1].role == "assistant" else [PROBE[1]]
        whole = conversation if conversation.is_answered else replace(conversation, turns=tuple(turns))
        try:
            found, row_counts = tokenize_rows(tokenizer, whole, data.max_length_tokens)
        except TemplateProblem as problem:
            problems.append(problem)
            continue
        cut += row_counts.total() > 0
        lost += row_counts + Counter(too_long=int(not found))
        longest = max([longest, *(len(row.input_ids) for row in found)])
        if conversation.is_answered:
            rows += found
            for row in found:  # the last answer of a full one may be cut
                is_full = len(row.input_ids) == data.max_length_tokens
                last_ids += [answer[-1] for answer in row.answers()[: -1 if is_full else None]]

    size, endless = len(sample), sum(last not in end_ids for last in last_ids)
    if problems:
        asks = data.distill.engine != "none" and not data.conversations.skip_invalid
        stops = len(problems) == size or (asks and any(isinstance(each, TemplateRefusal) for each in problems))
        sentence = f"fails for {len(problems)} of {size} conversations: {problems[0]}"
        yield Finding("chat template", "defect" if stops else "warning", sentence)
    if rows or cut:
        tokens, loss = sum(len(row.input_ids) for row in rows), sum(sum(row.loss_mask) for row in rows)
        lost_counts: dict[str, Any] = dict(lost)
        report = TokenReport(size, len(rows), tokens, loss, path="a sample of the source", **lost_counts)
        severity: Severity = "ok"
        advice = ""
        if cut > MANY_LOST_FRAC * size:
            severity = "defect" if lost["too_long"] == size else "warning"
            advice = ": raise data.max_length_tokens or use shorter conversations"
        yield Finding("examples", severity, report.sentence() + advice)
    if endless:
        ends = " or ".join(map(str, tokenizer.convert_ids_to_tokens(sorted(end_ids))))
        sentence = (
            f"of {len(last_ids)} answers {endless} do not end with {ends}, so the drafter would not learn to stop: set "
            "target.chat_template to a template that ends answers"
        )
        yield Finding("end tokens", "defect", sentence)
    if refusal := limits.refusal(longest):
        yield Finding("positions", "defect", f"examples have up to {longest:,} tokens, but {refusal}")


def check_distilled(recipe: Recipe, target: PreTrainedModel, rows: list[TokenizedConversation]) -> Iterator[Finding]:
    """Check the training examples that distillation wrote as training does, and put the first ones into `rows`."""
    run = RunFolder(recipe)
    dataset = load_tokens(run)
    check_tokens(dataset, target_limits(target.config), run.data / "tokens")
    if (report := recorded_report(run.data / "tokens")) is not None:
        yield Finding("examples", "ok", report.sentence())
    first = dataset.select(range(min(len(dataset), EXAMPLE_ROWS)))
    rows[:] = [TokenizedConversation(row["input_ids"], row["loss_mask"]) for row in first]
