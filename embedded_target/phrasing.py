"""Question and answer templates that turn one standard-library item into a conversation.

Every kind is a function `(rng, item[, others]) -> turns | None`, where `turns` alternates user and assistant texts and
None means that the item does not suit the kind. Questions vary in phrasing, answers hardly do and are mostly copied
from the prompt: a small model must learn this in a few million tokens, and keep to it on unseen modules.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from items import Argument, StdlibItem

MAX_SOURCE_LINES = 12
MAX_SOURCE_CHARS = 520
NEW_ARGUMENT_NAMES = ["value", "entry", "data", "target", "text", "number", "subject", "source", "first", "param"]
NEW_FUNCTION_NAMES = [
    "run_task",
    "load_entry",
    "convert",
    "handle_request",
    "process",
    "build_result",
    "compute",
    "helper",
]


def first_paragraph(docstring: str, max_chars: int = 260) -> str:
    """Return the first paragraph on one line, cut after the last sentence that fits; '' if no sentence does."""
    text = " ".join(docstring.split("\n\n")[0].split())
    if len(text) <= max_chars:
        return text
    end = text.rfind(". ", 0, max_chars)
    return text[: end + 1] if end > 20 else ""


def first_sentence(docstring: str) -> str:
    text = first_paragraph(docstring)
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def join_names(names: Sequence[str]) -> str:
    """Return the names in a sentence: `a`, `b` and `c`."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def code_block(source: str) -> str:
    return f"```python\n{source}\n```"


def is_short(source: str) -> bool:
    return 0 < len(source) <= MAX_SOURCE_CHARS and source.count("\n") < MAX_SOURCE_LINES


def visible_arguments(item: StdlibItem) -> list[Argument]:
    return [argument for argument in item.arguments if argument.name not in ("self", "cls")]


def argument_bullet(argument: Argument) -> str:
    if argument.name.startswith("**"):
        return f"- `{argument.name}`: extra keyword arguments"
    if argument.name.startswith("*"):
        return f"- `{argument.name}`: extra positional arguments"
    return f"- `{argument.name}`: " + ("required" if argument.default is None else f"default `{argument.default}`")


def arguments_answer(item: StdlibItem) -> str:
    arguments = visible_arguments(item)
    if not arguments:
        return f"`{item.name}` takes no arguments."
    count = "1 argument" if len(arguments) == 1 else f"{len(arguments)} arguments"
    return f"`{item.name}` takes {count}:\n" + "\n".join(argument_bullet(argument) for argument in arguments)


def defaults_answer(item: StdlibItem) -> str:
    with_default = [a.name for a in visible_arguments(item) if a.default is not None]
    if not with_default:
        return "None of them has a default value."
    return f"These arguments have a default value: {join_names(with_default)}. You can leave them out of the call."


def calls_answer(item: StdlibItem) -> str:
    return f"It calls {join_names(item.calls)}." if item.calls else "It calls no other functions."


def returns_answer(item: StdlibItem) -> str:
    return (
        f"It returns {join_names(item.returns)}." if item.returns else "It does not return a value, so you get `None`."
    )


def raises_answer(item: StdlibItem) -> str:
    return f"It raises {join_names(item.raises)}." if item.raises else "It does not raise an exception itself."


def docstring_answer(item: StdlibItem) -> str:
    sentence = first_sentence(item.docstring)
    return f'Its docstring says: "{sentence}"' if sentence else "It has no docstring."


def overview_answer(item: StdlibItem) -> str:
    parts = [docstring_answer(item)] if item.docstring else []
    return " ".join([*parts, calls_answer(item), returns_answer(item), raises_answer(item)])


def explain(rng: random.Random, item: StdlibItem) -> list[str] | None:
    """A question from memory: only the name, the module and perhaps the signature are given."""
    paragraph = first_paragraph(item.docstring)
    if not (item.is_public and len(paragraph) >= 25):
        return None
    shown = item.qualname if rng.random() < 0.5 or item.kind == "class" else item.signature
    question = rng.choice(
        (
            f"What does `{shown}` from `{item.module}` do?",
            f"Explain `{shown}` from the module `{item.module}`.",
            f"What is the {item.kind} `{shown}` in `{item.module}` for?",
            f"I found `{shown}` in `{item.module}`. What is its purpose?",
            f"Tell me about `{shown}` in the `{item.module}` module.",
        )
    )
    return [
        question,
        f"`{item.name}` is a {item.kind} of the module `{item.module}`. Its documentation says:\n{paragraph}",
    ]


def recite(rng: random.Random, item: StdlibItem) -> list[str] | None:
    """The source from memory, for short items only."""
    if item.kind == "class" or not is_short(item.body) or item.body.count("\n") > 7:
        return None
    question = rng.choice(
        (
            f"Show me the source of `{item.signature}` from `{item.module}`.",
            f"How is `{item.signature}` in `{item.module}` implemented?",
            f"Write the code of `{item.signature}` from the module `{item.module}`.",
        )
    )
    return [question, f"Here is the code of `{item.name}`:\n{code_block(item.body)}"]


READING_QUESTIONS = (
    (arguments_answer, ("Which arguments does it take?", "List its arguments.", "What are the parameters?")),
    (calls_answer, ("Which functions does it call?", "What does it call?", "List the calls in it.")),
    (returns_answer, ("What does it return?", "Which values are returned?", "What is the return value?")),
    (raises_answer, ("What does it raise?", "Which exceptions can it raise?", "Does it raise anything?")),
    (
        overview_answer,
        ("Describe this function.", "Give me an overview.", "What is going on here?", "Review this code."),
    ),
)


def _ask_with_source(rng: random.Random, item: StdlibItem, question: str) -> str:
    if rng.random() < 0.3:
        return f"{question}\n{code_block(item.source)}"
    opening = rng.choice(
        (
            f"Here is a function from `{item.module}`:",
            "Look at this function:",
            "I am reading this code:",
            f"This is from the module `{item.module}`.",
        )
    )
    return f"{opening}\n{code_block(item.source)}\n{question}"


def read(rng: random.Random, item: StdlibItem) -> list[str] | None:
    """A question about a source given in the prompt, answered by extraction; two questions in half of the cases."""
    if item.kind == "class" or not is_short(item.source) or item.line_count < 3:
        return None
    weights = (1, 1, 1, 1, 5)
    (answer, questions) = rng.choices(READING_QUESTIONS, weights)[0]
    if answer is overview_answer or rng.random() < 0.3:
        return [_ask_with_source(rng, item, rng.choice(questions)), answer(item)]
    (second_answer, second_questions) = rng.choice([entry for entry in READING_QUESTIONS[:4] if entry[0] is not answer])
    question = f"{rng.choice(questions)} {rng.choice(second_questions)}"
    return [_ask_with_source(rng, item, question), f"{answer(item)}\n{second_answer(item)}"]


def converse(rng: random.Random, item: StdlibItem) -> list[str] | None:
    """Several turns about one function: source or signature first, then shorter questions that refer back to it."""
    if item.kind == "class" or not is_short(item.source) or item.line_count < 3 or not visible_arguments(item):
        return None
    opening = rng.choice(READING_QUESTIONS[0][1])
    turns = [_ask_with_source(rng, item, opening), arguments_answer(item)]
    following = [
        (rng.choice(("Which of them are optional?", "Which have a default value?")), defaults_answer(item)),
        (rng.choice(READING_QUESTIONS[1][1]), calls_answer(item)),
        (rng.choice(READING_QUESTIONS[2][1]), returns_answer(item)),
        (rng.choice(READING_QUESTIONS[3][1]), raises_answer(item)),
        (rng.choice(("What does its docstring say?", "Quote its docstring.")), docstring_answer(item)),
    ]
    for question, answer in rng.sample(following, rng.choice((1, 2, 2, 3))):
        turns += [question, answer]
    if rng.random() < 0.5:
        turns += [
            rng.choice(("Sum it up.", "Summarize all of that.", "Thanks. Now give me an overview.")),
            overview_answer(item),
        ]
    return turns


def retrieve(rng: random.Random, item: StdlibItem, others: Sequence[StdlibItem]) -> list[str] | None:
    """Build a prompt with numbered documentation snippets, and an answer that quotes the one in question."""
    if not item.is_public or not 30 <= len(first_paragraph(item.docstring, 200)) <= 200:
        return None
    snippets = [item, *others]
    rng.shuffle(snippets)
    lines = [
        f"[{number}] `{snippet.module}.{snippet.qualname}`: {first_paragraph(snippet.docstring, 200)}"
        for number, snippet in enumerate(snippets, start=1)
    ]
    quote = first_paragraph(item.docstring, 200)
    words = quote.rstrip(".").split()
    if rng.random() < 0.35 and len(words) >= 6:
        start = rng.randrange(0, len(words) - 5)
        fragment = " ".join(words[start : start + 6])
        question = rng.choice((f'Which of them mentions "{fragment}"?', f'Where does it say "{fragment}"?'))
    else:
        question = rng.choice(
            (
                f"What do the snippets say about `{item.name}`?",
                f"According to these snippets, what is `{item.name}`?",
                f"What is `{item.qualname}` for?",
                f"Use the snippets to explain `{item.qualname}`.",
            )
        )
    number = snippets.index(item) + 1
    opening = rng.choice(("Here is some documentation:", "Answer from these snippets.", "Documentation snippets:"))
    prompt = "\n".join([opening, *lines, question])
    return [
        prompt,
        f'Snippet [{number}] answers this. It is about `{item.name}` of `{item.module}` and says: "{quote}"',
    ]


def _rename(source: str, old: str, new: str) -> str:
    return re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, source)


def rewrite(rng: random.Random, item: StdlibItem) -> list[str] | None:
    """Edits of code given in the prompt: rename an argument or the function, list the signature, drop the docstring."""
    if item.kind == "class" or not is_short(item.source) or item.line_count < 3:
        return None
    ways = [_rename_argument, _rename_function, _drop_docstring, _list_signature]
    rng.shuffle(ways)
    for way in ways:
        turns = way(rng, item)
        if turns:
            return turns
    return None


def _rename_argument(rng: random.Random, item: StdlibItem) -> list[str] | None:
    plain = [a.name for a in visible_arguments(item) if not a.name.startswith("*")]
    code = item.body
    usable = [name for name in plain if not re.search(rf"\b{name}=|['\"][^'\"\n]*\b{name}\b", code)]
    fresh = [name for name in NEW_ARGUMENT_NAMES if not re.search(rf"\b{name}\b", code)]
    if not (usable and fresh and is_short(code)):
        return None
    old, new = rng.choice(usable), rng.choice(fresh)
    question = rng.choice(
        (
            f"Rename the argument `{old}` to `{new}` in this function:",
            f"In this code, call the parameter `{new}` instead of `{old}`.",
            f"Rewrite this function so that `{old}` is named `{new}`:",
        )
    )
    answer = f"I renamed `{old}` to `{new}`:\n{code_block(_rename(code, old, new))}"
    return [f"{question}\n{code_block(code)}", answer]


def _rename_function(rng: random.Random, item: StdlibItem) -> list[str] | None:
    if item.name.startswith("__") or not is_short(item.body) or len(re.findall(rf"\b{item.name}\b", item.body)) != 1:
        return None
    new = rng.choice(NEW_FUNCTION_NAMES)
    question = rng.choice(
        (f"Rename this function to `{new}`:", f"Give this function the name `{new}`.", f"Call this function `{new}`:")
    )
    answer = f"I renamed `{item.name}` to `{new}`:\n{code_block(_rename(item.body, item.name, new))}"
    return [f"{question}\n{code_block(item.body)}", answer]


def _drop_docstring(rng: random.Random, item: StdlibItem) -> list[str] | None:
    if not (item.docstring and is_short(item.body)):
        return None
    question = rng.choice(("Remove the docstring from this function:", "Show this function without its docstring."))
    return [f"{question}\n{code_block(item.source)}", f"Without the docstring:\n{code_block(item.body)}"]


def _list_signature(rng: random.Random, item: StdlibItem) -> list[str] | None:
    if len(visible_arguments(item)) < 2:
        return None
    question = rng.choice(
        (
            f"Turn this signature into a list: `{item.signature}`",
            f"Write the arguments of `{item.signature}` as bullet points.",
        )
    )
    return [question, arguments_answer(item)]


def summarize(rng: random.Random, item: StdlibItem) -> list[str] | None:
    """A longer docstring in the prompt; the answer is its first sentence and what can be read off the signature."""
    docstring = item.docstring
    if not (item.is_public and 120 <= len(docstring) <= 600 and len(first_sentence(docstring)) >= 20):
        return None
    question = rng.choice(("Summarize this docstring", "Sum up this documentation", "Give me the short version"))
    arguments = visible_arguments(item)
    prompt = f"{question} of `{item.signature if arguments else item.qualname}`:\n{docstring}"
    answer = f"`{item.name}` in short: {first_sentence(docstring)}"
    if arguments:
        answer += f"\nYou call it with {join_names([argument.name for argument in arguments])}."
    return [prompt, answer]
