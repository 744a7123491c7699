"""Conversations that repeat an evaluation question: every rule at its border, and against a brute-force reference."""

import json
import random
from pathlib import Path

import pytest

from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.data.sources.mixture import SourceCounts, load_conversations
from draftsmith.data.sources.questions import CONTAINED, SAME, SHARED, Contamination, Match
from draftsmith.errors import UserError
from draftsmith.recipes.schema import Recipe

SHORT = "Who sings the song that we heard?"  # 7 words
LONG = " ".join(f"w{n}" for n in range(30))
FOLLOW_UP = "Now rewrite it in one sentence"


def load_question_index(tmp_path: Path, *questions: list[str]) -> str:
    file = tmp_path / "q.jsonl"
    lines = [{"question_id": n, "category": "x", "turns": turns} for n, turns in enumerate(questions)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def talk(user: str, answer: str = "yes") -> Conversation:
    return Conversation("id", (Turn("user", user), Turn("assistant", answer)))


@pytest.mark.parametrize(
    ("user", "answer", "reason", "question"),
    [
        ("who sings\tthe song, that WE heard", "yes", SAME, 0),
        ("Tell me: who sings the song that we heard? Thanks", "yes", CONTAINED, 0),
        ("who sings the song that we saw", "yes", None, 0),
        ("Why?", "yes", SAME, 2),
        ("Why? Because of it.", "yes", None, 0),
        (" ".join(f"w{n}" for n in range(5, 18)), "yes", SHARED, 1),
        (" ".join(f"w{n}" for n in range(5, 17)), "yes", None, 0),
        ("hello", "It says: " + " ".join(f"w{n}" for n in range(17, 30)) + " and so on", SHARED, 1),
        (FOLLOW_UP, "yes", None, 0),
    ],
)
def test_contamination_rules(tmp_path: Path, user: str, answer: str, reason: str | None, question: int) -> None:
    contamination = Contamination([load_question_index(tmp_path, [SHORT, FOLLOW_UP], [LONG], ["why"])])
    assert contamination.find(talk(user, answer)) == (Match(reason, f"q.jsonl:{question}") if reason else None)


@pytest.mark.parametrize("shared_words", [5, 6, 8, 13])
def test_shared_runs_equal_a_brute_force_search(tmp_path: Path, shared_words: int) -> None:
    """500 random texts over three words, in which shared runs are common."""
    rng = random.Random(shared_words)
    question = [rng.choice("abc") for _ in range(shared_words + 25)]
    runs = {tuple(question[s : s + shared_words]) for s in range(len(question) - shared_words + 1)}
    contamination = Contamination([load_question_index(tmp_path, [" ".join(question)])], shared_words)
    found = expected = 0
    for _ in range(500):
        text = [rng.choice("abc") for _ in range(rng.randrange(60))]
        if rng.random() < 0.4:
            start, at = rng.randrange(len(question) - shared_words), rng.randrange(len(text) + 1)
            text[at:at] = question[start : start + shared_words - rng.randrange(2)]
        contained = any(tuple(text[s : s + shared_words]) in runs for s in range(len(text)))
        assert (contamination.find(talk(" ".join(text) or "-")) is not None) == contained
        found, expected = found + contained, expected + (not contained)
    assert min(found, expected) > 50


def test_default_questions_are_those_of_the_recipe(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (SHORT, "something else")))
    file = load_question_index(tmp_path, [SHORT])
    values = {"name": "a", "eval": {"questions": file}, "data": {"conversations": {"source": str(source)}}}
    counts = SourceCounts()
    (left,) = load_conversations(Recipe.model_validate(values), counts)
    assert left.turns[0].content == "something else"
    assert counts.total.contaminated == {SAME: 1}
    (name,) = counts.contaminated_ids.values()
    assert name == "q.jsonl:0"
    values["data"]["conversations"]["decontaminate"] = []  # type: ignore[index]
    assert len(list(load_conversations(Recipe.model_validate(values)))) == 2
    values["data"]["conversations"]["decontaminate"] = ["gone.jsonl"]  # type: ignore[index]
    with pytest.raises(UserError, match=r"questions file gone.jsonl does not exist: set .*decontaminate"):
        list(load_conversations(Recipe.model_validate(values)))
