"""Records that hold a prompt in columns of their own, as instruction data sets do, instead of a list of turns.

    {"prompt": "..."}                                              a prompt that the target is to answer
    {"instruction": "...", "input": "...", "output": "..."}        Alpaca; Dolly with `context` and `response`
    {"question": "...", "answer": "..."}                           question answering
    {"turns": ["...", "..."]}                                      Spec-Bench: user turns, one after the other

`data.conversations.columns` names others. An answer may be missing or empty: the target writes its own.
"""

from typing import Any

from draftsmith.data.sources.conversation import InvalidConversation, Turn, listed, text_of
from draftsmith.recipes.schema import ColumnsRecipe

PROMPT_COLUMNS = ("prompt", "instruction", "question", "turns")
INPUT_COLUMNS = ("input", "context")
ANSWER_COLUMNS = ("response", "output", "answer", "completion")
SYSTEM_COLUMNS = ("system_prompt", "system")


def parse_prompt_columns(record: dict[str, Any], where: str, columns: ColumnsRecipe) -> tuple[Turn, ...] | None:
    """The record's turns; an answer that is not there is an empty assistant turn, or none at the end.

    Args:
        record: One JSON object, or row of a Hub dataset.
        where: File and line, for the error message.
        columns: The recipe's names; where it gives none, the usual ones.

    Returns:
        None if the record has no prompt column.

    Raises:
        InvalidConversation: A column that the recipe names is missing, or one holds something other than text.
    """
    prompt_column = _column(record, where, "prompt", columns.prompt, PROMPT_COLUMNS)
    if prompt_column is None:
        return None
    prompts = _texts(record[prompt_column], where, prompt_column)
    input_column = _column(record, where, "input", columns.input, INPUT_COLUMNS)
    if input_column is not None and prompts:
        below = text_of(record[input_column], f"{where}, `{input_column}`")
        prompts[0] += f"\n\n{below}" if below.strip() else ""
    turns: list[Turn] = []
    system_column = _column(record, where, "system", columns.system, SYSTEM_COLUMNS)
    if system_column is not None:
        system = text_of(record[system_column], f"{where}, `{system_column}`")
        turns += [Turn("system", system)] if system.strip() else []
    for prompt, answer in zip(prompts, _answers(record, where, columns, len(prompts)), strict=True):
        if not prompt.strip():
            raise InvalidConversation(where, "empty user turn", f"`{prompt_column}` is empty")
        turns += [Turn("user", prompt), Turn("assistant", answer if answer.strip() else "")]
    while turns and turns[-1] == Turn("assistant", ""):
        turns.pop()
    return tuple(turns)


def _answers(record: dict[str, Any], where: str, columns: ColumnsRecipe, count: int) -> list[str]:
    """One for each prompt, empty where there is none."""
    column = _column(record, where, "answer", columns.answer, ANSWER_COLUMNS)
    if column is None:
        return [""] * count
    value = record[column]
    texts = value if isinstance(value, list) else [value]
    fits = len(texts) == count and all(isinstance(text, str) for text in texts)
    if not fits and columns.answer is None:
        return [""] * count  # a choice's number, for instance: not what the recipe asked for
    if not fits:
        sentence = f"`{column}` must hold one text for each of the {count} prompts"
        raise InvalidConversation(where, "answers do not fit the prompts", sentence)
    return _texts(value, where, column)


def _texts(value: Any, where: str, column: str) -> list[str]:
    """A text, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [text_of(text, f"{where}, `{column}`") for text in values]


def _column(record: dict[str, Any], where: str, key: str, named: str | None, usual: tuple[str, ...]) -> str | None:
    """The column's name; one that is null counts as not there."""
    if named is not None and named not in record:
        raise InvalidConversation(
            where,
            f"no {key} column",
            f"there is no column `{named}`, which data.conversations.columns.{key} names, only {listed(record)}",
        )
    if named is not None:
        return named if record[named] is not None or key == "prompt" else None
    return next((column for column in usual if record.get(column) is not None), None)
