"""`draftsmith chat`: chat with a target in the terminal; /plain switches its drafter off and on.

Each answer is streamed round by round, with accepted draft tokens in colour. Every answer prefills the whole
conversation again: the session keeps no KV cache between turns.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
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

    def answer(self, question: str) -> None:
        """Generate an answer and print it round by round, then its figures; print why if there is no room for it."""
        history = [*self.history, Turn("user", question)]
        prompt = prompt_token_ids(self.tokenizer, history)
        room = self.session.max_length_tokens - len(prompt)
        if room < 2:
            console.print(ENDED)
            return
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
        figures = f"{len(ids)} tokens"
        if record is None:
            figures += ", stopped"
        elif coloured.rounds:  # of which the prefill gave the first token
            figures += f", {(len(ids) - 1) / (record.wall_time_s - record.prefill_s):.1f} tokens/s"
            figures += f", {(len(ids) - 1) / coloured.rounds:.2f} tokens per round" if self.drafts else ""
        figures += "" if self.drafts else ", without the drafter"
        figures += f"; cut at {new_tokens} tokens" if record and is_cut(record, new_tokens, self.end_ids) else ""
        console.print(Text(figures, style="dim"))


def chat(recipe: Recipe, new_tokens: int) -> None:
    """Read messages from the terminal and answer them until /quit or the input's end.

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
                elif message:
                    talk.answer(message)
        console.print()
