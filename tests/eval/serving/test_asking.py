"""Every question to an engine, and the figures of what comes back, with an engine whose answers are known.

Question 1 (w5): drafts of two tokens of which 2, 0 and 1 were kept: 7 tokens, tau 1 + 3/3 = 2. Question 2 (w6), asked
twice: 0 and 0 kept, 3 tokens a turn, tau 1.
"""

from pathlib import Path
from typing import Any

import pytest
from support.counting_engine import CountingEngine
from support.tiny_models import VOCABULARY
from support.tiny_runs import save_tokenizer
from transformers import AutoTokenizer

from draftsmith.data.engines.engine import GenerationSettings
from draftsmith.data.sources.questions import Question
from draftsmith.eval.serving.asking import DRAFTING, PLAIN, Asked, Asking, ask, level_figures, with_speedups

QUESTIONS = [Question(1, "writing", ("w5",)), Question(2, "math", ("w6", "w7"))]


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Asking:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(Path(folder), VOCABULARY)
    return Asking(AutoTokenizer.from_pretrained(folder), GenerationSettings(max_new_tokens=8), 0)


def test_one_at_a_time_each_question_has_its_own_tau(asking: Asking) -> None:
    engine = CountingEngine()
    asked = ask(engine, QUESTIONS, asking, 1)
    assert engine.most_in_flight == 1
    row = level_figures(asked, DRAFTING, 0.0, 1)
    assert [counts.drafts for counts in asked.by_question] == [3, 4]
    assert row["drafts"] == 7
    assert row["tau"] == pytest.approx(1 + 3 / 7)
    assert row["tau_by_question"] == pytest.approx((2 + 1) / 2)
    assert row["tau_committed"] == pytest.approx((6 + 2 + 2) / 7)
    assert row["acceptance_by_depth"] == pytest.approx([2 / 7, 1 / 7])
    assert row["acceptance_conditional"] == pytest.approx([2 / 7, 1 / 2])
    assert row["tokens"] == 7 + 3 + 3
    assert row["first_token_s"] == 0.5
    assert row["time_per_output_token_s"] == pytest.approx(0.25)


def test_a_turn_follows_the_answer_before_it(asking: Asking) -> None:
    engine = CountingEngine()
    ask(engine, QUESTIONS, asking, 1)
    assert [request.key for request in engine.requests] == ["1/0", "2/0", "2/1"]
    # w6, the three tokens that were answered, w7; the template puts nothing else between.
    assert engine.requests[2].prompt_ids == [6, 10, 10, 10, 7]


def test_many_at_once(asking: Asking) -> None:
    engine = CountingEngine()
    asked = ask(engine, QUESTIONS, asking, 4)
    assert engine.most_in_flight == 2
    assert asked.by_question == []
    row = level_figures(asked, DRAFTING, 0.0, 4)
    assert row["tau"] == pytest.approx(1 + 3 / 7)
    assert row["tau_by_question"] is None


def test_answers_that_were_cut_have_a_lower_committed_tau(asking: Asking) -> None:
    """Two of the 7 tokens fell off at the end; the counters know nothing of it."""
    asked = ask(CountingEngine(), QUESTIONS[:1], asking, 1)
    (answer,) = asked.answers
    del answer.ids[-2:]
    row = level_figures(asked, DRAFTING, 0.0, 1)
    assert row["tau"] == 2
    assert row["tau_committed"] == pytest.approx(4 / 3)


def test_failures_are_counted_and_end_their_conversation(asking: Asking) -> None:
    engine = CountingEngine(fails=6)
    asked = ask(engine, QUESTIONS, asking, 2)
    assert asked.failures == {"HTTP 500": 1}
    assert sorted(request.key for request in engine.requests) == ["1/0", "2/0"]
    assert len(asked.answers) == 1


def test_a_turn_without_room_is_left_out(asking: Asking) -> None:
    engine = CountingEngine(max_length_tokens=12)
    asked = ask(engine, QUESTIONS, asking, 2)
    assert asked.turns_left_out == 1
    assert len(asked.answers) == 2


def test_speedup_is_against_the_same_temperature_and_concurrency() -> None:
    def row(arm: str, concurrency: int, tokens_per_s: float) -> dict[str, Any]:
        return {"arm": arm, "temperature": 0.0, "concurrency": concurrency, "tokens_per_s": tokens_per_s}

    rows = with_speedups([row(PLAIN, 1, 10), row(PLAIN, 4, 40), row(DRAFTING, 1, 15), row(DRAFTING, 4, 30)])
    assert [each["speedup"] for each in rows] == [None, None, 1.5, 0.75]
    assert with_speedups([row(DRAFTING, 1, 15)])[0]["speedup"] is None


def test_nothing_drafted() -> None:
    row = level_figures(Asked(), PLAIN, 0.0, 1)
    assert row["tau"] is row["tau_committed"] is row["tokens_per_s"] is None
