"""Self-distillation: the target rewrites every assistant turn, in order, each with the rewritten history before it.

A drafter has to predict what the target says, not what some other author said. Writes, under `runs/<name>/data/`:

    distilled.jsonl         one conversation a line: id, OpenAI messages, token counts
    dropped.jsonl           ids that gave nothing usable, with the reason; they are not tried again
    distill_settings.json   what the answers depend on; a folder never mixes two settings

Conversations wait in a pool; every step generates the next turn of all of them, so batches stay full however many turns
they have. Finished ones are appended at once, so an interrupted run continues where it stopped.
"""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftsmith.data.chat_tokens import (
    TemplateProblem,
    TemplateRefusal,
    prompt_token_ids,
    template_answer_lead,
    template_end_token,
    tokenize_conversation,
)
from draftsmith.data.conversations import Conversation, Turn, counted_reasons
from draftsmith.data.distill_settings import check_settings
from draftsmith.data.engine import AnswerSampling, Completion, Engine
from draftsmith.data.jsonl_log import JsonlLog
from draftsmith.data.sources import SourceCounts, load_conversations
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

CUT_SHORT = "answer cut short by max_new_tokens"
PROMPT_TOO_LONG = "prompt too long"
EMPTY_ANSWER = "empty answer"
REFUSED = "refused by the chat template"
REWRITTEN = "rewritten by the chat template"


@dataclass
class DistillReport:
    """What one call did. `kept` are conversations written; of these, `shortened` lost their later turns."""

    file: Path
    kept: int = 0
    shortened: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated_turns: int = 0
    skipped_invalid: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    already_done: int = 0
    answers: int = 0
    drifted_answers: int = 0
    tokens_generated: int = 0
    seconds: float = 0.0

    def sentence(self) -> str:
        """What was done, for the console."""
        rate = self.tokens_generated / self.seconds if self.seconds else 0.0
        return "\n".join(
            [
                f"{self.kept} conversations written to {self.file}, {self.already_done} were there already",
                f"shortened: {counted_reasons(self.shortened)}; dropped: {counted_reasons(self.dropped)}",
                f"source: {counted_reasons(self.skipped_invalid)} invalid, {self.duplicates} duplicates",
                f"{self.tokens_generated} tokens in {self.answers} answers, {self.seconds:.0f} s, {rate:.0f} tokens/s",
                f"{self.drifted_answers} answers tokenise differently from what the target generated",
            ]
        )


@dataclass
class _Rewriting:
    """A conversation on its way: the turns so far (answers regenerated) and the original turns still to come."""

    id: str
    turns: list[Turn]
    waiting: deque[Turn]
    answer_ids: list[list[int]] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    def take_user_turns(self) -> bool:
        """Move the turns up to the next answer over; False if there is no question left."""
        asked = False
        while self.waiting and self.waiting[0].role != "assistant":
            self.turns.append(self.waiting.popleft())
            asked = True
        if self.waiting:
            self.waiting.popleft()  # the source's own answer: the target writes its own
        return asked


def distill(
    recipe: Recipe, target: Any, tokenizer: Any, folder: RunFolder, engine: Engine | None = None, progress: bool = True
) -> DistillReport:
    """Regenerate the recipe's conversations with the target, continuing whatever `folder.data` already holds.

    Args:
        recipe: Its `data` section and `seed` are used.
        target: The loaded model; None is fine with `engine: none` or an engine of one's own.
        tokenizer: The target's, with a chat template.
        folder: The run's folder.
        engine: Used in place of the one that `data.distill.engine` names.
        progress: Show a progress bar.

    Raises:
        UserError: Bad conversations, no chat template, or a folder made with other settings.
    """
    template_end_token(tokenizer)  # a template that cannot be used fails here, before hours of generation
    source_counts = SourceCounts()
    conversations = list(load_conversations(recipe, source_counts, tokenizer))
    check_settings(recipe, target, tokenizer, folder.data)
    if engine is None and recipe.data.distill.engine == "transformers":
        from draftsmith.data.transformers_engine import TransformersEngine

        engine = TransformersEngine(target, tokenizer, recipe.data.distill.batch_size)
    run = _Distillation(recipe, tokenizer, folder.data, engine)
    run.report.skipped_invalid, run.report.duplicates = source_counts.invalid, source_counts.duplicates
    waiting = deque(conversation for conversation in conversations if conversation.id not in run.done)
    run.report.already_done = len(conversations) - len(waiting)
    started = time.perf_counter()
    with tqdm(
        total=len(conversations), initial=run.report.already_done, desc="distil", unit="conv", disable=not progress
    ) as bar:
        run.rewrite_all(waiting, bar)
    run.report.seconds = time.perf_counter() - started
    if not run.kept_log.file.exists():
        raise UserError(
            f"none of the {len(conversations)} conversations gave an answer to train on: "
            f"{counted_reasons(run.dropped_reasons())}; "
            f"see {run.dropped_log.file}, change the recipe and delete {folder.data}"
        )
    return run.report


class _Distillation:
    """The state of one call: the two logs, the report, and how answers are made."""

    def __init__(self, recipe: Recipe, tokenizer: Any, folder: Path, engine: Engine | None) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.engine = engine
        self.kept_log = JsonlLog(folder / "distilled.jsonl")
        self.dropped_log = JsonlLog(folder / "dropped.jsonl")
        self.done = {record["id"] for log in (self.kept_log, self.dropped_log) for record in log}
        self.report = DistillReport(self.kept_log.file)
        self.answer_lead = template_answer_lead(tokenizer)
        settings = recipe.data.distill
        self.sampling = AnswerSampling(
            settings.temperature, settings.top_k, settings.top_p, settings.max_new_tokens, recipe.seed
        )

    def dropped_reasons(self) -> Counter[str]:
        """Over all calls for this folder."""
        return Counter(record["reason"] for record in self.dropped_log)

    def rewrite_all(self, waiting: deque[Conversation], bar: Any) -> None:
        """Run the pool until nobody waits."""
        engine = self.engine
        if engine is None:
            self._pass_through(waiting, bar)
            return
        pool: list[_Rewriting] = []
        while waiting or pool:
            while waiting and len(pool) < engine.concurrency:
                conversation = waiting.popleft()
                pool.append(_Rewriting(conversation.id, [], deque(conversation.turns)))
            finished: list[tuple[_Rewriting, str | None]] = []
            asking: list[_Rewriting] = []
            for rewriting in pool:
                if not rewriting.take_user_turns():
                    finished.append((rewriting, None))
                elif reason := self._prompt_problem(rewriting, engine):
                    finished.append((rewriting, reason))
                else:
                    asking.append(rewriting)
            completions = (
                engine.generate([rewriting.prompt_ids for rewriting in asking], self.sampling) if asking else []
            )
            pool = []
            for rewriting, completion in zip(asking, completions, strict=True):
                reason = self._take_answer(rewriting, completion)
                if reason is None and rewriting.waiting:
                    pool.append(rewriting)
                else:
                    finished.append((rewriting, reason))
            self._write(finished)
            bar.update(len(finished))
            bar.set_postfix(tokens=self.report.tokens_generated, refresh=False)

    def _prompt_problem(self, rewriting: _Rewriting, engine: Engine) -> str | None:
        """Set the prompt's ids; returns why the target cannot be asked, if so."""
        try:
            rewriting.prompt_ids = prompt_token_ids(self.tokenizer, rewriting.turns)
        except TemplateRefusal:
            if not self.recipe.data.conversations.skip_invalid:
                raise
            return REFUSED
        longest = engine.max_length_tokens
        if longest is not None and len(rewriting.prompt_ids) + self.sampling.max_new_tokens > longest:
            return PROMPT_TOO_LONG
        # A longer sequence would be cut off again when the tokens are made.
        return PROMPT_TOO_LONG if len(rewriting.prompt_ids) >= self.recipe.data.max_length_tokens else None

    def _take_answer(self, rewriting: _Rewriting, completion: Completion) -> str | None:
        """Append the answer to the conversation; returns why it cannot be used, if so."""
        self.report.tokens_generated += len(completion.token_ids)
        self.report.answers += 1
        if completion.finish_reason == "length":
            self.report.truncated_turns += 1
            return CUT_SHORT
        text = self.tokenizer.decode(
            completion.token_ids[:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).removeprefix(self.answer_lead)
        if not text.strip():
            return EMPTY_ANSWER
        rewriting.turns.append(Turn("assistant", text))
        rewriting.answer_ids.append(completion.token_ids)
        return None

    def _write(self, finished: list[tuple[_Rewriting, str | None]]) -> None:
        """Append the finished conversations, cut behind their last answer, and those that came to nothing."""
        kept, dropped = [], []
        for rewriting, reason in finished:
            if not rewriting.answer_ids:
                dropped.append({"id": rewriting.id, "reason": reason or "no question"})
                continue
            while rewriting.turns[-1].role != "assistant":
                rewriting.turns.pop()
            try:
                kept.append(self._record(rewriting, reason))
            except TemplateProblem:  # an answer that the template rewrites, with two </think> for instance
                dropped.append({"id": rewriting.id, "reason": REWRITTEN})
                continue
            if reason is not None:
                self.report.shortened[reason] += 1
        self.kept_log.append(kept)
        self.dropped_log.append(dropped)
        self.report.kept += len(kept)
        self.report.dropped.update(record["reason"] for record in dropped)

    def _record(self, rewriting: _Rewriting, reason: str | None) -> dict[str, Any]:
        conversation = Conversation(rewriting.id, tuple(rewriting.turns))
        # The text is the truth; where it does not tokenise back to what was generated, the record says so.
        answers = tokenize_conversation(self.tokenizer, conversation).answers()
        drifted = [
            turn for turn, ids in enumerate(rewriting.answer_ids) if turn >= len(answers) or answers[turn] != ids
        ]
        self.report.drifted_answers += len(drifted)
        return {
            "id": conversation.id,
            "messages": conversation.messages,
            "answer_tokens": [len(ids) for ids in rewriting.answer_ids],
            "drifted_answers": drifted,
            "shortened": reason,
        }

    def _pass_through(self, waiting: deque[Conversation], bar: Any) -> None:
        """`engine: none`: the conversations as they are, without a question that nobody answered."""
        while waiting:
            batch = [waiting.popleft() for _ in range(min(len(waiting), 1024))]
            records = []
            for conversation in batch:
                messages = conversation.messages
                if messages[-1]["role"] != "assistant":
                    messages.pop()
                records.append({"id": conversation.id, "messages": messages})
            self.kept_log.append(records)
            self.report.kept += len(records)
            bar.update(len(records))


def read_distilled(folder: Path) -> list[Conversation]:
    """The conversations of `distilled.jsonl`, sorted by id: the order does not depend on interruptions.

    Raises:
        UserError: There is no such file yet.
    """
    file = folder / "distilled.jsonl"
    if not file.exists():
        raise UserError(f"{file} does not exist: run `draftsmith distill` with the same recipe first")
    by_id = {
        record["id"]: Conversation(record["id"], tuple(Turn(m["role"], m["content"]) for m in record["messages"]))
        for record in JsonlLog(file)
    }
    return [by_id[key] for key in sorted(by_id)]
