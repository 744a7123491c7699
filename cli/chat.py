"""`draftsmith chat`: chat with a target in the terminal; /plain switches its drafter off and on.

Each answer is streamed round by round, with accepted draft tokens in colour. Every answer prefills the whole
conversation again: the session keeps no KV cache between turns.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from draftsmith.cli.console import console, read_message
from draftsmith.cli.demo import LEGEND, ColouredAnswer, is_cut
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.eval.bench.measured_methods import Arm, load_models, measured_methods
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.decoding.session import open_session
from draftsmith.models.target.loading import session_tokens
from draftsmith.recipes.schema import Recipe

WARM_UP_TOKENS = 16  # length of a hidden answer, with and without the drafter
ENDED = "The conversation fills the target's context: /reset starts a new one."
COMMAND = re.compile(r"/[a-z]+")
HELP = "/plain: switch the drafter off or on; /reset: forget the conversation; /quit: leave. Ctrl-C stops an answer."


@dataclass
class ChatAnswer:
    """One answer of `draftsmith chat` with its figures.

    drafted: the drafter was on. whole: not stopped by Ctrl-C. cut_at: limit of new tokens if the answer ended at it,
    else None. tau: None if the answer took no round.
    """

    question: str
    answer: str
    drafted: bool
    whole: bool
    cut_at: int | None
    tokens: int
    tokens_per_s: float | None
    tau: float | None

    def sentence(self) -> str:
        """Return the figures as one line."""
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        tau = "" if self.tau is None or not self.drafted else f", {self.tau:.2f} tokens per round"
        how = f"{self.tokens} tokens{speed}{tau}{'' if self.drafted else ', without the drafter'}"
        return how if self.cut_at is None else f"{how}; cut at {self.cut_at} tokens"


@dataclass
class Chat:
    """A conversation, with the session and the methods that answer its next message.

    methods: [without the drafter, with the drafter].
    """

    session: Any
    tokenizer: Any
    methods: list[Arm]
    end_ids: frozenset[int]
    new_tokens: int
    history: list[Turn] = field(default_factory=list)
    drafts: bool = True

    def answer(self, question: str) -> ChatAnswer | None:
        """Generate an answer and print it round by round.

        Returns None, after printing the reason, if the conversation leaves no room for an answer.
        """
        history = [*self.history, Turn("user", question)]
        prompt = prompt_token_ids(self.tokenizer, history)
        room = self.session.max_length_tokens - len(prompt)
        if room < 2:
            console.print(ENDED)
            return None
        measured = self.methods[self.drafts]
        coloured = ColouredAnswer(self.tokenizer)
        record: AnswerRecord | None = None
        new_tokens = min(self.new_tokens, room)
        with suppress(KeyboardInterrupt):
            record = measured.answer(
                self.session,
                prompt,
                new_tokens,
                self.end_ids,
                on_round=lambda round_: console.print(coloured.add(round_), end=""),
            )
        ids = coloured.ids if record is None else record.ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        if not coloured.rounds:  # the prefill's token was the whole answer
            console.print(Text(text), end="")
        console.print()
        self.history = [*history, Turn("assistant", text)] if text else self.history
        tokens = len(ids) - 1
        seconds = 0.0 if record is None else record.wall_time_s - record.prefill_s
        return ChatAnswer(
            question=question,
            answer=text,
            drafted=self.drafts,
            whole=record is not None,
            cut_at=new_tokens if record is not None and is_cut(record, new_tokens, self.end_ids) else None,
            tokens=len(ids),
            tokens_per_s=tokens / seconds if tokens and seconds else None,
            tau=tokens / coloured.rounds if coloured.rounds else None,
        )


def chat(recipe: Recipe, new_tokens: int) -> list[dict[str, Any]]:
    """Read messages from the terminal and answer them until /quit or the input's end. Returns the answers.

    Args:
        recipe: Recipe whose first method drafts; its first temperature is used.
        new_tokens: Maximum number of tokens of an answer.

    Raises:
        UserError: The target or the drafter cannot be loaded.
    """
    model, tokenizer, drafters = load_models(recipe)
    length = session_tokens(model)
    methods = measured_methods(recipe, drafters, model, tokenizer, length)
    end_ids = frozenset(answer_end_ids(model.generation_config, tokenizer))
    answers: list[ChatAnswer] = []
    with open_session(model, length, recipe.eval.compile) as session:
        hello = prompt_token_ids(tokenizer, [Turn("user", "Hello")])
        for measured in methods:  # compile now: in the first answer it would lower the tokens/s
            measured.answer(session, hello, min(WARM_UP_TOKENS, length - len(hello)), end_ids)
            measured.generator.manual_seed(recipe.seed)
        talk = Chat(session, tokenizer, methods, end_ids, new_tokens)
        console.print(LEGEND)
        console.print(Text(HELP, style="dim"))
        with suppress(ImportError):  # GNU readline: a pasted text of several lines is one message
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        with suppress(EOFError, KeyboardInterrupt):
            while (message := read_message()) != "/quit":
                if message is None:
                    console.print("That line is not UTF-8: set the terminal to UTF-8, or convert the piped input.")
                elif message == "/reset":
                    talk.history = []
                    console.print("a new conversation")
                elif message == "/plain":
                    talk.drafts = not talk.drafts
                    console.print("with the drafter" if talk.drafts else "without the drafter")
                elif COMMAND.fullmatch(message):
                    console.print(Text(HELP, style="dim"))
                elif message and (answer := talk.answer(message)) is not None:
                    console.print(Text(answer.sentence(), style="dim"))
                    answers.append(answer)
        console.print()
    return [asdict(each) for each in answers]
