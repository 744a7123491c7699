"""Self-distillation: the target rewrites every assistant turn, in order, each with the rewritten history before it.

A drafter has to predict the target's own text, not another author's. Writes, under `runs/<name>/data/`:

    shards/, unfinished/     the conversations and the state of each (`data/distill/ledger.py`)
    distill_settings.json    the settings that the answers depend on; a folder never mixes two of them

A conversation's next turn is submitted as soon as its previous answer is complete, not in waves, so that the engine is
always full, whatever the number of turns. Answers are written to the ledger as they arrive, at least every
`LONGEST_WRITE_INTERVAL_S`, so that a kill loses only answers in flight and those that arrived since the last write.

With several processes (`RANK`, `WORLD_SIZE`), a process answers the conversations whose number modulo WORLD_SIZE is its
rank. The process that finishes last finds all conversations finished.
"""

import hashlib
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Generator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from draftsmith.data.distill.ledger import Ledger
from draftsmith.data.distill.limits import TargetLimits, check_conversations
from draftsmith.data.distill.settings import FolderSettings, distill_settings, has_answers
from draftsmith.data.engines.engine import (
    Completion,
    Engine,
    EngineSetting,
    Failure,
    GenerationSettings,
    Outcome,
    Request,
    open_engine,
)
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.distilled import check_answers
from draftsmith.data.sources.mixture import SourceCounts, counted_reasons, load_conversations
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.data.tokens.templates import (
    TemplateProblem,
    TemplateRefusal,
    answer_form,
    last_answer,
    render,
    special_ids,
    template_calls,
)
from draftsmith.errors import UserError
from draftsmith.progress import Progress, progress_bar
from draftsmith.recipes.run_folder import RunFolder, check_no_training_reads, process_of_launch, run_lock
from draftsmith.recipes.schema import Recipe

LONGEST_WRITE_INTERVAL_S = 1.0
CONVERSATIONS_PER_WRITE = 1024  # of `engine: none`

CUT_AT_FIRST, MOST_CUT_FRAC = 500, 0.2  # number of first answers that are checked, and their largest share of cut ones
MANY_CUT_FRAC = 0.05  # share of conversations that lose answers, from which on there is advice
CUT_SHORT = "answer cut short by max_new_tokens"
PROMPT_TOO_LONG = "prompt too long"
ENGINE_TOO_SHORT = "prompt too long for the engine"  # whose limit is no setting of the folder
EMPTY_ANSWER = "empty answer"
REFUSED = "refused by the chat template"
REWRITTEN = "rewritten by the chat template"
OTHER_CALLS = "called tools whose results are not there"
# Failures that a retry would repeat; all others are the engine's.
FINAL_REASONS = (CUT_SHORT, PROMPT_TOO_LONG, REFUSED, REWRITTEN)


@dataclass
class DistillReport:
    """Result of one call of `distill`.

    ids: the recipe's conversations. kept: number of conversations that this call wrote; shortened: those without their
    later turns, by reason. failed: conversations without any answer, by reason. answers_dropped: cut answers that were
    left out. already_done, failed_before: conversations that earlier calls wrote, or failed at, by reason.
    left: number of conversations that the other processes of the launch have not finished.
    """

    folder: Path
    ids: Collection[str] = field(default=(), repr=False)
    kept: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    answers_cut_short: int = 0
    answers_dropped: int = 0
    sources: SourceCounts = field(default_factory=SourceCounts)
    already_done: int = 0
    failed_before: Counter[str] = field(default_factory=Counter)
    left: int = 0
    retried: int = 0
    answers: int = 0
    tokens_generated: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without `ids`."""
        return {
            **{name: value for name, value in vars(self).items() if name != "ids"},
            "folder": str(self.folder),
            "sources": {name: tally.as_json() for name, tally in self.sources.by_source.items()},
        }

    def sentence(self) -> str:
        """Return a summary of a few lines for the console: conversations, reasons, tokens and speed."""
        rate = self.tokens_generated / self.seconds if self.seconds else 0.0
        engine_failures = (self.failed + self.failed_before).keys() - set(FINAL_REASONS)
        there = f"{self.already_done} were distilled before" if self.already_done else ""
        written = f"{self.kept} conversations written to {self.folder}" if self.kept or not there else ""
        lines = [", ".join(filter(None, (written, there)))]
        ended = {"shortened": self.shortened, "left out": self.failed, "left out before": self.failed_before}
        counted = [f"{what}: {counted_reasons(counts)}" for what, counts in ended.items() if counts]
        if self.answers_dropped > MANY_CUT_FRAC * (self.kept + self.failed.total()):
            counted.append("raise data.distill.max_new_tokens, or keep cut answers with data.distill.cut_answers=keep")
        if engine_failures:
            counted.append("`draftsmith distill --retry-failed` tries the engine's failures again")
        lines += ["; ".join(counted)] if counted else []
        lines.append(self.sources.sentence())
        if self.answers:
            generated = f"{self.tokens_generated} tokens in {self.answers} answers"
            lines.append(f"{generated}, {self.seconds:.0f} s, {rate:.0f} tokens/s")
        if self.left:
            lines.append(
                f"{self.left} conversations are left to the other processes; the last of these will tokenise all: run "
                "the same command again if one of them was stopped"
            )
        return "\n".join(lines)


def distill(
    recipe: Recipe,
    tokenizer: Any,
    folder: RunFolder,
    weights: str | None = None,
    retry_failed: bool = False,
    limits: TargetLimits | None = None,
    features: Path | None = None,
) -> DistillReport:
    """Rewrite the recipe's conversations with the target, resuming from the results in `folder.data`.

    Args:
        recipe: The `data` section and `seed` are used.
        tokenizer: The target's tokenizer, with a chat template.
        folder: The run's folder.
        weights: Hash of the weights of the model that answers; a folder is not resumed with other weights.
        retry_failed: Try conversations again at which the engine failed before.
        limits: Vocabulary size and positions of the model that answers; by default unknown, and not checked.
        features: Folder for the hidden states that servers write next to answers; None: they are not requested.

    Raises:
        UserError: Bad conversations, answers of another target, no chat template, no room for answers, or a folder made
            with other settings.
    """
    answer_form(tokenizer)  # a template that cannot be used fails here, before hours of generation
    check_answers(recipe, tokenizer, weights)
    report = DistillReport(folder.data)
    report.ids = conversations = {c.id: c for c in load_conversations(recipe, report.sources)}
    settings = FolderSettings(folder.data, distill_settings(recipe, weights, tokenizer))
    settings.check()
    limits = limits or TargetLimits()
    check_conversations(recipe, tokenizer, conversations, limits, report.sources)
    started = time.perf_counter()
    number, processes = process_of_launch()
    with run_lock(folder.data.resolve(), "distill") if number == 0 else nullcontext():  # for all of a launch
        ledger = Ledger(folder.data, conversations)
        if not settings.are_fixed:  # nor do failures of a call that stored no answer
            ledger.retry_failed()
        report.retried = ledger.retry_failed(FINAL_REASONS) if retry_failed else 0
        ours = list(conversations)[number::processes]
        if processes > 1:  # the others print nothing else
            share = f"{len(ours)} of {len(conversations)} conversations"
            print(f"process {number + 1} of {processes} answers {share}", file=sys.stderr)
        waiting = deque(key for key in ours if not ledger.is_finished(key))
        if waiting:
            check_no_training_reads(folder.data)
        with progress_bar(len(ours), "distil", "conv", len(ours) - len(waiting)) as bar:
            if recipe.data.distill.engine == "none":
                _pass_through(ledger, settings, [conversations[key] for key in waiting], report, bar)
            elif waiting:
                with open_engine(EngineSetting.of(recipe, tokenizer, features)) as engine:
                    positions = limits.positions
                    _Distillation(
                        recipe, tokenizer, engine, ledger, settings, conversations, report, bar, positions
                    ).run(waiting)
    report.seconds = time.perf_counter() - started
    view = Ledger(folder.data, conversations)
    report.already_done, report.failed_before = len(view) - report.kept, view.failed - report.failed
    report.left = len(conversations) - len(view) - view.failed.total() if processes > 1 else 0
    if not len(view) and not report.left:
        again = f"delete {folder.data}" if has_answers(folder.data) else "run it again"
        reasons = counted_reasons(view.failed or report.failed)
        raise UserError(
            f"none of the {len(conversations)} conversations gave an answer to train on: {reasons}; change the recipe"
            f"{' (raise max_new_tokens, or data.distill.cut_answers=keep)' if CUT_SHORT in reasons else ''} and {again}"
        )
    return report


Rewriting = Generator[Request, Outcome, None]  # one conversation: requests for its answers out, their outcomes in


@dataclass
class _Distillation:
    """State of one call of `distill`: requests in flight, and results that are not written yet.

    positions: the target's number of positions; the engine may have a lower limit.
    """

    recipe: Recipe
    tokenizer: Any
    engine: Engine
    ledger: Ledger
    settings: FolderSettings
    conversations: dict[str, Conversation]
    report: DistillReport
    bar: Progress
    positions: int | None
    in_flight: dict[str, Rewriting] = field(default_factory=dict)
    answers: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    kept: list[Conversation] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # reasons by id
    too_many_cut: UserError | None = None
    next_write_s: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)

    def run(self, waiting: deque[str]) -> None:
        """Rewrite until every waiting conversation is finished."""
        try:
            while waiting or self.in_flight:
                while waiting and len(self.in_flight) < self.engine.concurrency:
                    key = waiting.popleft()
                    self._advance(key, self._rewrite(self.conversations[key]))
                if self.in_flight:
                    for key, outcome in self.engine.collect():
                        self._advance(key, self.in_flight.pop(key), outcome)
                    if self.too_many_cut is not None:
                        raise self.too_many_cut
                # Some engines cannot generate while we wait for the disk: spend a twentieth of the time on that, or
                # more if writes are slow, as one is due every `LONGEST_WRITE_INTERVAL_S`.
                if not self.in_flight or time.monotonic() > self.next_write_s:
                    self._write()
        finally:
            self._write()

    def _advance(self, key: str, rewriting: Rewriting, outcome: Any = None) -> None:
        """Record the outcome of the last request, and submit its next one."""
        try:
            request = rewriting.send(outcome)
        except StopIteration:
            self.bar.update()
        else:
            self.in_flight[key] = rewriting
            self.engine.submit(request)

    def _rewrite(self, source: Conversation) -> Rewriting:
        """Rewrite a conversation: ask for each answer that is not stored, then keep the result for the next write.

        Raises:
            TemplateRefusal: The template refuses a prompt, and invalid conversations are not skipped.
        """
        stored, rest, turns = self.ledger.stored_answers(source.id), deque(source.turns), list[Turn]()
        answers: list[dict[str, Any]] = []
        reason: str | None = None  # why later answers are missing
        while reason is None and _reach_question(turns, rest):
            if len(answers) < len(stored):
                answer = stored[len(answers)]
            else:
                try:
                    prompt_ids = prompt_token_ids(self.tokenizer, turns, source.tools)
                except TemplateRefusal:
                    if not self.recipe.data.conversations.skip_invalid:
                        raise
                    reason = REFUSED
                    break
                if reason := self._too_long(len(prompt_ids)):
                    break
                outcome = yield self._request(source, prompt_ids, len(answers))
                if isinstance(outcome, Failure):
                    reason = outcome.reason
                    if not outcome.is_final:
                        answers.clear()  # they stay in the ledger, for another try
                    break
                answer, reason = self._read_answer(outcome, source, turns, prompt_ids)
                if not answer:
                    break
                if reason is None:
                    self.answers.append((source.id, len(answers), answer))
            answers.append(answer)
            turn = Turn("assistant", answer["text"])
            if reason is None:  # else it is cut, and so would be a call
                turn, reason = self._with_calls(turn, turns, rest, source)
            turns.append(turn)
        if not answers:
            assert reason is not None
            self.failed[source.id] = reason
            self.report.failed[reason] += 1
            return
        while turns[-1].role != "assistant":
            turns.pop()
        ids, prompts = (tuple(each.get(key) for each in answers) for key in ("token_ids", "prompt_ids"))
        kept = replace(source, turns=tuple(turns), answer_ids=ids, prompt_ids=prompts, shortened=reason)
        self.kept.append(kept)
        self.report.kept += 1
        self.report.shortened.update([reason] if reason else [])

    def _request(self, source: Conversation, prompt_ids: list[int], number: int) -> Request:
        """Return the request for an answer of a conversation, by the number of the answer from 0."""
        # A seed per answer (63 bits), so that it depends neither on the other requests nor on interruptions.
        digest = hashlib.sha256(f"{self.recipe.seed}:{source.id}:{number}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1
        return Request(source.id, prompt_ids, self._generation, seed, source.tools)

    def _too_long(self, length: int) -> str | None:
        """Return the reason if a prompt of this length leaves no room for an answer.

        A prompt of `data.max_length_tokens` or more would be left out later, when it is tokenised for training.
        """
        whole, longest = length + self._generation.max_new_tokens, self.engine.max_length_tokens
        if length >= self.recipe.data.max_length_tokens or (self.positions is not None and whole > self.positions):
            return PROMPT_TOO_LONG
        return ENGINE_TOO_SHORT if longest is not None and whole > longest else None

    @cached_property
    def _generation(self) -> GenerationSettings:
        chosen = self.recipe.data.distill
        return GenerationSettings(chosen.temperature, chosen.top_k, chosen.top_p, chosen.max_new_tokens)

    def _read_answer(
        self, completion: Completion, source: Conversation, turns: list[Turn], prompt_ids: list[int]
    ) -> tuple[dict[str, Any], str | None]:
        """Return an answer as the ledger stores it, empty if it is dropped, and why its conversation ends with it."""
        text, token_ids = self._text_of(completion, source), completion.token_ids
        answer: dict[str, Any] = {"text": text, "token_ids": token_ids, "prompt_ids": prompt_ids}
        self.report.answers += 1
        self.report.tokens_generated += len(token_ids or self.tokenizer(text, verbose=False)["input_ids"])
        if completion.finish_reason == "length":
            self.report.answers_cut_short += 1
            # Its tokens are the target's own. A text alone would be tokenised with an end that was not generated.
            if self.recipe.data.distill.cut_answers == "keep" and token_ids and text.strip():
                return answer, CUT_SHORT
            self.report.answers_dropped += 1
            self._count_cut()
            return {}, CUT_SHORT
        if not text.strip():
            return {}, EMPTY_ANSWER
        if token_ids is None and not self._is_written(turns, text, source):
            return {}, REWRITTEN
        return answer, None

    def _is_written(self, turns: list[Turn], text: str, source: Conversation) -> bool:
        """Return whether the template writes all of an answer without ids, which is tokenised as it is written."""
        try:
            last_answer(self.tokenizer, (*turns, Turn("assistant", text)), source.tools)
        except TemplateProblem:  # an answer with two </think>, for instance
            return False
        return True

    def _text_of(self, completion: Completion, source: Conversation) -> str:
        """Return the text of an answer without the opening, such as `<think>`, that the chat template writes."""
        text = completion.text
        if text is None:
            ids = completion.token_ids or []
            ids = ids[:-1] if completion.finish_reason == "stop" else ids
            if not source.tools:  # some calls begin with a special token
                ids = [token_id for token_id in ids if token_id not in self._skipped_ids]
            text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.removeprefix(self._answer_lead)

    @cached_property
    def _skipped_ids(self) -> frozenset[int]:
        """Special tokens, without those around thoughts, by which the template tells thoughts from the answer."""
        vocabulary = self.tokenizer.get_vocab()
        return special_ids(self.tokenizer) - {vocabulary.get(token) for token in self.recipe.data.reasoning_tokens}

    @cached_property
    def _answer_lead(self) -> str:
        return answer_form(self.tokenizer).lead

    def _count_cut(self) -> None:
        """Set `too_many_cut` if more than `MOST_CUT_FRAC` of the first `CUT_AT_FIRST` answers were cut and dropped."""
        answers, cut = self.report.answers, self.report.answers_dropped
        if answers <= CUT_AT_FIRST and cut > MOST_CUT_FRAC * CUT_AT_FIRST:
            self.too_many_cut = UserError(
                f"{cut} of the first {answers} answers were cut at {self._generation.max_new_tokens} tokens, and with "
                "each its conversation ends: raise data.distill.max_new_tokens, set data.distill.cut_answers=keep to "
                "train on the cut answers, or, for a target that thinks first, target.chat_template_kwargs="
                f"{{enable_thinking: false}}; then delete {self.report.folder} or give this recipe another `name`"
            )

    def _with_calls(
        self, answer: Turn, turns: list[Turn], rest: deque[Turn], source: Conversation
    ) -> tuple[Turn, str | None]:
        """Return a whole answer with its tool calls, and why its conversation ends with it.

        If the target calls the same functions as the source's assistant, it gets the same results; if others, the
        conversation ends. If it answers without a call, the source's tool calls and results are left out.

        Args:
            turns: The turns before the answer.
            rest: The source's turns from that answer on, from which those are removed that are left out.
        """
        replaced = rest.popleft() if rest and rest[0].role == "assistant" else Turn("assistant", "")
        results = list(takewhile(lambda turn: turn.role == "tool", rest))
        form = template_calls(self.tokenizer, source.tools) if source.tools or results else None
        called = form.names(answer.content) if form else []
        if results and form is None:
            return answer, OTHER_CALLS
        if form and called:
            if rest and (not results or called != (replaced.called or form.names(replaced.content))):
                return answer, OTHER_CALLS
            calling = form.turn(answer.content, [turn.tool_call_id for turn in results if turn.tool_call_id])
            # The answer stays a text if the template cannot write its calls, such as two in one turn.
            with suppress(TemplateProblem):
                render(self.tokenizer, (*turns, calling), tools=source.tools)
                return calling, None
            return answer, None
        while results and rest and rest[0].role != "user":
            rest.popleft()
        return answer, None

    def _write(self) -> None:
        """Write new results to the ledger; nothing before the first answer, so that failures fix no settings."""
        rate = self.report.tokens_generated / max(time.perf_counter() - self.start_s, 1e-9)
        self.bar.set_postfix({"tokens/s": f"{rate:.0f}", "failed": self.report.failed.total()}, refresh=False)
        if not (self.settings.are_fixed or self.answers or self.kept):
            return
        start_s = time.monotonic()
        self.settings.fix()
        self.ledger.commit(self.answers, self.kept, self.failed)
        end_s = time.monotonic()
        self.next_write_s = end_s + min(19 * (end_s - start_s), LONGEST_WRITE_INTERVAL_S)
        self.answers, self.kept, self.failed = [], [], {}


def _reach_question(turns: list[Turn], rest: deque[Turn]) -> bool:
    """Move turns from `rest` to `turns` up to the next one that the target answers; False if no such turn is left."""
    while rest:
        turn = rest.popleft()
        if turn.role == "assistant":
            continue
        turns.append(turn)
        if turn.role != "system" and not (rest and rest[0].role == "tool"):
            return True
    return False


def _pass_through(
    ledger: Ledger, settings: FolderSettings, waiting: list[Conversation], report: DistillReport, bar: Progress
) -> None:
    """Write the conversations unchanged, for `engine: none`, without a last question that has no answer."""
    for begin in range(0, len(waiting), CONVERSATIONS_PER_WRITE):
        kept = []
        for source in waiting[begin : begin + CONVERSATIONS_PER_WRITE]:
            turns = source.turns
            while turns[-1].role != "assistant":
                turns = turns[:-1]
            kept.append(replace(source, turns=turns))
        settings.fix()
        ledger.commit([], kept)
        report.kept += len(kept)
        bar.update(len(kept))
