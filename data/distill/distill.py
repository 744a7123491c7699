"""Self-distillation: the target rewrites every assistant turn, in order, each with the rewritten history before it.

A drafter has to predict the target's own text, not another author's. Writes, under `runs/<name>/data/`:

    shards/, unfinished/     the conversations and the state of each (`data/distill/ledger.py`)
    distill_settings.json    the settings that the answers depend on; a folder never mixes two of them

A conversation's next turn is submitted as soon as its previous answer is complete, not in waves, so that the engine is
always full, whatever the number of turns. Answers are written to the ledger as they arrive, so that a kill loses only
answers in flight and those of the last `LONGEST_WRITE_INTERVAL_S`.
"""

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from filelock import FileLock

from draftsmith.data.distill.ledger import (
    DONE,
    FAILED,
    SHARDS,
    SHORTENED,
    UNFINISHED,
    Finished,
    Ledger,
    LedgerView,
    kept_record,
)
from draftsmith.data.distill.limits import (
    ITS_TOKENIZER,
    TargetLimits,
    check_template_tokens,
    no_room_sentence,
    outside_sentence,
    outside_tokens,
    room_for_answers,
)
from draftsmith.data.engines.engine import Completion, Engine, Failure, GenerationSettings, Outcome, Request
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.mixture import SourceCounts, counted_reasons, load_conversations, question_sources
from draftsmith.data.sources.questions import questions_file
from draftsmith.data.tokens.chat_tokens import (
    TemplateProblem,
    TemplateRefusal,
    prompt_token_ids,
    reasoning_ids,
    render,
    template_answer_lead,
    template_calls,
    template_end_token,
    thoughts_field,
    tokenize_conversation,
)
from draftsmith.errors import UserError
from draftsmith.files import file_sha256
from draftsmith.progress import Progress, progress_bar
from draftsmith.recipes.run_folder import RunFolder, check_no_training_reads, check_settings, write_settings
from draftsmith.recipes.schema import Recipe

HELD_POLL_S = 2.0  # between two looks at conversations that another process works on
LONGEST_WRITE_INTERVAL_S = 1.0
CONVERSATIONS_PER_WRITE = 1024  # of `engine: none`

CUT_AT_FIRST, MOST_CUT_FRAC = 500, 0.2  # number of first answers that are checked, and their largest share of cut ones
CUT_SHORT = "answer cut short by max_new_tokens"
PROMPT_TOO_LONG = "prompt too long"
EMPTY_ANSWER = "empty answer"
REFUSED = "refused by the chat template"
REWRITTEN = "rewritten by the chat template"
OUTSIDE = "tokens beyond the target's embedding"
OTHER_CALLS = "called tools whose results are not there"
# What another try would end with again; all other failures are the engine's.
FINAL_REASONS = (CUT_SHORT, PROMPT_TOO_LONG, REFUSED, REWRITTEN)

OpenEngine = Callable[[], AbstractContextManager[Engine]]
Rewriting = Generator[Request, Outcome | None, Finished]  # of one conversation: questions out, outcomes in


@dataclass
class DistillReport:
    """Result of one call of `distill`.

    kept: number of conversations written. shortened: number of these that lost their later turns, by reason.
    """

    folder: Path
    kept: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    answers_cut_short: int = 0
    sources: SourceCounts = field(default_factory=SourceCounts)
    already_done: int = 0
    retried: int = 0
    answers: int = 0
    tokens_generated: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            **vars(self),
            "folder": str(self.folder),
            "sources": {name: tally.as_json() for name, tally in self.sources.by_source.items()},
        }

    def sentence(self) -> str:
        """Return a summary for the console."""
        rate = self.tokens_generated / self.seconds if self.seconds else 0.0
        engine_failures = self.failed.keys() - set(FINAL_REASONS)
        lines = [
            f"{self.kept} conversations written to {self.folder}, {self.already_done} were there already",
            f"shortened: {counted_reasons(self.shortened)}; failed: {counted_reasons(self.failed)}"
            + ("; `draftsmith distill --retry-failed` tries the engine's failures again" if engine_failures else ""),
            self.sources.sentence(),
            f"{self.tokens_generated} tokens in {self.answers} answers, {self.seconds:.0f} s, {rate:.0f} tokens/s",
        ]
        return "\n".join(lines)


def distill(
    recipe: Recipe,
    tokenizer: Any,
    folder: RunFolder,
    open_engine: OpenEngine | None,
    weights: str | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    limits: TargetLimits | None = None,
) -> DistillReport:
    """Regenerate the recipe's conversations with the target, continuing whatever `folder.data` already holds.

    Args:
        recipe: Its `data` section and `seed` are used.
        tokenizer: The target's, with a chat template.
        folder: The run's folder.
        open_engine: Opens the engine, if there is anything to generate; None for `engine: none`.
        weights: A hash of the weights of who answers; a folder is not continued with others.
        retry_failed: Try conversations again that the engine failed at before.
        progress: Show a progress bar.
        limits: Of who answers; by default unknown.

    Raises:
        UserError: Bad conversations, no chat template, no room for answers, or a folder made with other settings.
    """
    template_end_token(tokenizer)  # a template that cannot be used fails here, before hours of generation
    reasoning_ids(tokenizer, recipe.data)
    report = DistillReport(folder.data)
    conversations = {c.id: c for c in load_conversations(recipe, report.sources, tokenizer)}
    settings = _Settings(folder.data, distill_settings(recipe, weights, tokenizer))
    settings.check()
    limits = limits or TargetLimits()
    _check_limits(recipe, tokenizer, conversations, limits, report.sources)
    started = time.perf_counter()
    with Ledger(folder.data) as ledger:
        if not settings.count:  # nor do failures of a call that stored no answer
            ledger.retry_failed()
        report.retried = ledger.retry_failed(FINAL_REASONS) if retry_failed else 0
        done = ledger.finished_ids()
        waiting = deque(key for key in conversations if key not in done)
        report.already_done = len(conversations) - len(waiting)
        if waiting:
            check_no_training_reads(folder.data)
        with progress_bar(len(conversations), "distil", "conv", report.already_done, shown=progress) as bar:
            if open_engine is None:
                _pass_through(ledger, settings, conversations, waiting, report, bar)
            elif waiting:
                with open_engine() as engine:
                    work = _Distillation(recipe, tokenizer, engine, ledger, settings, conversations, report, bar)
                    work.positions = limits.positions
                    work.run(waiting)
    report.seconds = time.perf_counter() - started
    view = LedgerView(folder.data)
    if not len(view):
        again = f"delete {folder.data}" if has_answers(folder.data) else "run it again"
        failed = view.counts().get(FAILED) or report.failed
        raise UserError(
            f"none of the {len(conversations)} conversations gave an answer to train on: {counted_reasons(failed)}; "
            f"change the recipe and {again}"
        )
    return report


def _check_limits(
    recipe: Recipe,
    tokenizer: Any,
    conversations: dict[str, Conversation],
    limits: TargetLimits,
    sources: SourceCounts,
) -> None:
    """Check the conversations against what is known of the target, before any request.

    Conversations that it cannot read are taken out of `conversations` and counted where invalid ones are skipped.

    Raises:
        UserError: A token is beyond the target's embedding, no prompt leaves room for an answer, or the template does
            not write the thoughts of answers that are kept.
    """
    keeps_answers = recipe.data.distill.engine == "none"
    check_template_tokens(tokenizer, limits)
    for key, conversation in list(conversations.items()):
        if tokens := outside_tokens(tokenizer, conversation, limits, keeps_answers):
            if not recipe.data.conversations.skip_invalid:
                raise UserError(outside_sentence(conversation, tokens, limits))
            tally = sources.by_source[conversation.source]
            tally.invalid[OUTSIDE] += 1
            tally.kept -= 1
            del conversations[key]
    if not conversations:
        raise UserError(f"every conversation holds tokens beyond the target's embedding: {ITS_TOKENIZER}")
    is_checked = keeps_answers and not recipe.data.conversations.skip_invalid
    if is_checked and any(turn.reasoning_content for each in conversations.values() for turn in each.turns):
        thoughts_field(tokenizer)
    if not keeps_answers:
        fitting, looked_at = room_for_answers(recipe, tokenizer, conversations.values(), limits)
        if looked_at and not fitting:
            raise UserError(no_room_sentence(recipe, looked_at, limits))


def has_answers(data: Path) -> bool:
    """Return whether a run's data folder holds an answer or a whole conversation; failures alone are neither."""
    if any(file.stat().st_size for file in (data / SHARDS).glob("*.jsonl")):
        return True
    for file in (data / UNFINISHED).glob("*.jsonl"):
        with file.open("rb") as stream:
            if any(b'"answer": ' in line for line in stream):
                return True
    return False


class _Settings:
    """Settings that a folder's answers depend on, fixed by the first answer that is stored.

    A call that fails before it fixes nothing. `count`: whether the settings are fixed.
    """

    def __init__(self, data: Path, values: dict[str, Any]) -> None:
        self._data, self._file, self._values = data, data / "distill_settings.json", values
        self.count = False

    def check(self) -> None:
        """Compare with the settings of the answers that are there, and store these in their place.

        A smaller length means that more is shortened later; a larger one would need answers that were not generated.

        Raises:
            UserError: They differ.
        """
        if has_answers(self._data):
            check_settings(self._file, self._values, "distil again", may_decrease=["data.max_length_tokens"])
            write_settings(self._file, self._values)
            self.count = True

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Fix the settings before the first answers, which are stored within: of two processes one is the first.

        Raises:
            UserError: Another process has stored answers with other settings meanwhile.
        """
        if self.count:
            yield
            return
        with FileLock(self._data / "distill_settings.lock"):
            self.check()
            if not self.count:
                write_settings(self._file, self._values)
            yield
            self.count = True


def distill_settings(recipe: Recipe, weights: str | None, tokenizer: Any) -> dict[str, Any]:
    """Return the settings that the answers depend on, by recipe key; a folder never mixes two of them.

    Args:
        weights: Hash of the weights of the model that answers.
        tokenizer: The target's tokenizer.
    """
    settings, conversations = recipe.data.distill, recipe.data.conversations
    # Limits are left out: conversations may be added later, as may lines of a file.
    chosen = conversations.model_dump(exclude={"limit", "skip_invalid", "name", "mixture", "decontaminate"})
    chosen["mixture"] = [source.model_dump(exclude={"limit", "name"}) for source in conversations.mixture]
    # By content, wherever the files are: other questions would leave conversations in the folder that repeat them.
    chosen["decontaminate (hashes of the question files)"] = sorted(
        file_sha256(questions_file(source))[:16] for source in question_sources(recipe)
    )
    values = {f"data.conversations.{key}": value for key, value in chosen.items()}
    values["data.distill.engine"] = settings.engine
    if settings.engine == "none":
        return values
    if settings.model is not None:
        values["data.distill.model"] = settings.model
    if settings.cut_answers != "drop":  # as it always was before there was a choice
        values["data.distill.cut_answers"] = settings.cut_answers
    return values | {
        "target.model": recipe.target.model,
        "target.revision": recipe.target.revision,
        "target.gguf_file": recipe.target.gguf_file,
        "target.dtype": recipe.target.dtype,
        "the target's weights (hash)": weights,
        "the target's chat template (hash)": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "data.distill.temperature": settings.temperature,
        "data.distill.top_k": settings.top_k,
        "data.distill.top_p": settings.top_p,
        "data.distill.max_new_tokens": settings.max_new_tokens,
        "data.max_length_tokens": recipe.data.max_length_tokens,
        "seed": recipe.seed,
    }


class _Distillation:
    """State of one call of `distill`: requests in flight, and results that are not written yet."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Any,
        engine: Engine,
        ledger: Ledger,
        fixing: _Settings,
        conversations: dict[str, Conversation],
        report: DistillReport,
        bar: Progress,
    ) -> None:
        self.fixing = fixing
        self.positions: int | None = None  # of the target; the engine may have a lower bound
        self.recipe, self.tokenizer, self.engine, self.ledger = recipe, tokenizer, engine, ledger
        self.conversations, self.report, self.bar = conversations, report, bar
        self.in_flight: dict[str, Rewriting] = {}
        self.held: deque[str] = deque()  # by another process, which may die before it has finished them
        self.next_write, self.began_s = 0.0, time.perf_counter()
        self.answers: list[tuple[str, int, dict[str, Any]]] = []
        self.finished: list[Finished] = []
        self.unwritten: list[Finished] = []
        self.answer_lead = template_answer_lead(tokenizer)
        chosen = recipe.data.distill
        self.settings = GenerationSettings(chosen.temperature, chosen.top_k, chosen.top_p, chosen.max_new_tokens)

    def run(self, waiting: deque[str]) -> None:
        """Ask until every conversation is settled, by this process or another."""
        try:
            while waiting or self.held or self.in_flight:
                while waiting and len(self.in_flight) < self.engine.concurrency:
                    self._begin(waiting)
                if self.in_flight:
                    for key, outcome in self.engine.collect():
                        self._go_on(key, self.in_flight.pop(key), outcome)
                elif self.held:
                    time.sleep(HELD_POLL_S)
                if not waiting:
                    waiting, self.held = self.held, waiting
                # Waiting for the disk keeps some engines from generating: not more than a twentieth of the time.
                if not self.in_flight or time.monotonic() > self.next_write:
                    self._write()
        finally:
            self._write()

    def _begin(self, waiting: deque[str]) -> None:
        """Start as many conversations as there is room for."""
        room = self.engine.concurrency - len(self.in_flight)
        wanted = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        taken, held = self.ledger.claim(wanted)
        self.held.extend(held)
        settled_elsewhere = len(wanted) - len(taken) - len(held)
        self.report.already_done += settled_elsewhere
        self.bar.update(settled_elsewhere)
        for key, answers in taken.items():
            self._go_on(key, self._rewrite(self.conversations[key], answers), None)

    def _go_on(self, key: str, rewriting: Rewriting, outcome: Outcome | None) -> None:
        """Hand over the outcome of the last question, if there was one; submit the next, or settle the conversation."""
        try:
            request = rewriting.send(outcome)
        except StopIteration as end:
            self.finished.append(end.value)
        else:
            self.in_flight[key] = rewriting
            self.engine.submit(request)

    def _rewrite(self, source: Conversation, answered: list[dict[str, Any]]) -> Rewriting:
        """Ask each question in turn, with the rewritten history before it.

        Args:
            source: Its own answers are not looked at.
            answered: The first answers, from an earlier call.
        """
        turns: list[Turn] = []
        answer_ids: list[list[int] | None] = []
        reason, rest = None, deque(source.turns)
        while rest:
            turn = rest.popleft()
            if turn.role == "assistant":
                continue
            turns.append(turn)
            if turn.role == "system" or (rest and rest[0].role == "tool"):
                continue
            number = len(answer_ids)
            if number < len(answered):
                text, token_ids = answered[number]["text"], answered[number]["token_ids"]
            else:
                asked = Conversation(source.id, tuple(turns), tools=source.tools)
                prompt_ids = self._prompt_of(asked)
                if isinstance(prompt_ids, str):
                    reason = prompt_ids
                    break
                # Of the answer alone, so that it depends on neither its neighbours nor interruptions; 63 bits.
                digest = hashlib.sha256(f"{self.recipe.seed}:{source.id}:{number}".encode()).digest()
                seed = int.from_bytes(digest[:8], "big") >> 1
                outcome = yield Request(source.id, prompt_ids, asked.messages, self.settings, seed, source.tools)
                assert outcome is not None
                if isinstance(outcome, Failure):  # the answers so far stay in the ledger, for another try
                    return Finished(source.id, FAILED, outcome.reason)
                text, token_ids = self._text_of(outcome, source), outcome.token_ids
                self.report.answers += 1
                self.report.tokens_generated += len(token_ids or self.tokenizer(text, verbose=False)["input_ids"])
                if outcome.finish_reason == "length":
                    self.report.answers_cut_short += 1
                    reason = CUT_SHORT
                    # Its tokens are the target's own. A text alone would be tokenised with an end that nobody said.
                    if not (self.recipe.data.distill.cut_answers == "keep" and token_ids and text.strip()):
                        self._check_cut()
                        break
                elif not text.strip():
                    reason = EMPTY_ANSWER
                    break
                else:
                    self.answers.append((source.id, number, {"text": text, "token_ids": token_ids}))
            said = Turn("assistant", text)
            if reason is None:  # of an answer that was cut short a call would have an end that nobody said
                said, reason = self._said(text, source, turns, rest)
            turns.append(said)
            answer_ids.append(token_ids)
            if reason is not None:
                break
        return self._settled(source, turns, answer_ids, reason)

    def _said(self, text: str, source: Conversation, turns: list[Turn], rest: deque[Turn]) -> tuple[Turn, str | None]:
        """Return the answer as a turn, and the reason if the conversation must end with it.

        If the target calls the same functions as the source's assistant, it gets the same results. If it answers
        without a call, the source's tool calls and results are left out.

        Args:
            text: Text of the answer.
            source: The conversation that is rewritten.
            turns: The turns before the answer.
            rest: The source's turns from this answer on; turns that no longer fit are removed from it.
        """
        theirs = rest.popleft() if rest and rest[0].role == "assistant" else Turn("assistant", "")
        results = list(takewhile(lambda turn: turn.role == "tool", rest))
        answer = Turn("assistant", text)
        if not source.tools and not results:
            return answer, None
        form = template_calls(self.tokenizer)
        if form is None:
            return answer, OTHER_CALLS if results else None
        called = form.names(text)
        if called and rest and (not results or called != (theirs.called or form.names(theirs.content))):
            return answer, OTHER_CALLS
        if not called:
            while results and rest and rest[0].role != "user":
                rest.popleft()
            return answer, None
        calling = form.turn(text, [turn.tool_call_id for turn in results if turn.tool_call_id])
        try:
            render(self.tokenizer, (*turns, calling), tools=source.tools)
        except TemplateProblem:  # some templates cannot write two calls in one turn, for instance
            return answer, None
        return calling, None

    def _check_cut(self) -> None:
        """Check that not too many of the first answers were cut, as each one ends its conversation.

        Raises:
            UserError: More than `MOST_CUT_FRAC` of the first `CUT_AT_FIRST` answers were cut.
        """
        answers, cut = self.report.answers, self.report.answers_cut_short
        if answers <= CUT_AT_FIRST and cut > MOST_CUT_FRAC * CUT_AT_FIRST:
            raise UserError(
                f"{cut} of the first {answers} answers were cut at {self.settings.max_new_tokens} tokens, and with "
                "each its conversation ends: raise data.distill.max_new_tokens, set data.distill.cut_answers=keep to "
                "train on the cut answers, or, for a target that thinks first, target.chat_template_kwargs="
                "{enable_thinking: false}; the answers so far are kept"
            )

    def _prompt_of(self, conversation: Conversation) -> list[int] | str:
        """Return the prompt's token ids, or the reason why the target cannot answer it."""
        try:
            prompt_ids = prompt_token_ids(self.tokenizer, conversation.turns, conversation.tools)
        except TemplateRefusal:
            if not self.recipe.data.conversations.skip_invalid:
                raise
            return REFUSED
        bounds = [bound for bound in (self.engine.max_length_tokens, self.positions) if bound is not None]
        longest = min(bounds, default=None)
        if longest is not None and len(prompt_ids) + self.settings.max_new_tokens > longest:
            return PROMPT_TOO_LONG
        # A longer sequence would be shortened again when the tokens are made.
        return PROMPT_TOO_LONG if len(prompt_ids) >= self.recipe.data.max_length_tokens else prompt_ids

    def _text_of(self, completion: Completion, source: Conversation) -> str:
        text = completion.text
        if text is None:
            ids = completion.token_ids or []
            ids = ids[:-1] if completion.finish_reason == "stop" else ids
            # Some calls begin with a special token.
            skipped = not source.tools
            text = self.tokenizer.decode(ids, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)
        return text.removeprefix(self.answer_lead)

    def _settled(
        self, source: Conversation, turns: list[Turn], answer_ids: list[list[int] | None], reason: str | None
    ) -> Finished:
        """Build the ledger's entry of a conversation, which ends with its last answer.

        Args:
            reason: Why answers are missing; None if all turns were answered.
        """
        if not answer_ids:
            return Finished(source.id, FAILED, reason)
        while turns[-1].role != "assistant":
            turns.pop()
        conversation = replace(source, turns=tuple(turns))
        # Check that it can be tokenised. A single answer always can, right after its own prompt; the template may
        # rewrite earlier ones.
        if len(answer_ids) > 1 or None in answer_ids:
            try:
                tokenize_conversation(self.tokenizer, conversation, answer_ids)
            except TemplateProblem:  # an answer with two </think>, for instance
                return Finished(source.id, FAILED, REWRITTEN)
        record = kept_record(conversation) | {"answer_ids": answer_ids}
        return Finished(source.id, DONE if reason is None else SHORTENED, reason, record)

    def _write(self) -> None:
        """Write all that is new to the ledger; before the first answer nothing, so that failures alone fix nothing."""
        for conversation in self.finished:
            self.bar.update()
            if conversation.record is None:
                self.report.failed[conversation.reason or ""] += 1
            else:
                self.report.kept += 1
                self.report.shortened.update([conversation.reason] if conversation.reason else [])
        self.unwritten += self.finished
        self.finished = []
        rate = self.report.tokens_generated / max(time.perf_counter() - self.began_s, 1e-9)
        self.bar.set_postfix({"tokens/s": f"{rate:.0f}", "failed": self.report.failed.total()}, refresh=False)
        if not (self.fixing.count or self.answers or any(each.record is not None for each in self.unwritten)):
            return
        began = time.monotonic()
        with self.fixing.fixed():
            self.ledger.commit(self.answers, self.unwritten)
        self.next_write = time.monotonic() + min(19 * (time.monotonic() - began), LONGEST_WRITE_INTERVAL_S)
        self.answers, self.unwritten = [], []


def _pass_through(
    ledger: Ledger,
    settings: _Settings,
    conversations: dict[str, Conversation],
    waiting: deque[str],
    report: DistillReport,
    bar: Progress,
) -> None:
    """Write the conversations as they are, for `engine: none`, without a question that nobody answered."""
    keys = iter(waiting)
    while page := list(islice(keys, CONVERSATIONS_PER_WRITE)):
        finished = []
        for key in ledger.claim(page).taken:
            turns = conversations[key].turns
            while turns[-1].role != "assistant":
                turns = turns[:-1]
            finished.append(Finished(key, DONE, None, kept_record(replace(conversations[key], turns=turns))))
        with settings.fixed():
            ledger.commit([], finished)
        report.kept += len(finished)
        bar.update(len(finished))
