"""`draftsmith bench --engine vllm` with real vLLM and the embedded target: a server for each arm."""

import json
from pathlib import Path

import pytest
from support.finished_run import write_lines
from support.served_drafters import NEW_TOKENS, SERVED, Setup, count_our_rounds, load_embedded, train_briefly
from support.tiny_runs import recipe_in, save_trained
from support.vllm_answers import setup
from support.vllm_server import NEEDS_VLLM, vllm_environment

from draftsmith.cli.engine_bench import ServingOptions, bench
from draftsmith.data.sources.questions import load_questions
from draftsmith.data.tokens.chat_tokens import answer_end_ids
from draftsmith.eval.engines.load_test import DRAFTING, NGRAM, PLAIN
from draftsmith.recipes.run_folder import RunFolder

__all__ = ["setup", "vllm_environment"]  # fixtures
pytestmark = NEEDS_VLLM


def test_started_servers_equal_our_decoder(setup: Setup, tmp_path: Path) -> None:
    """Of the answers that do not end early, so that both count the same rounds."""
    target, tokenizer, prompts = load_embedded()
    ends = set(answer_end_ids(target.generation_config, tokenizer))
    whole = [number for number, answer in enumerate(setup.answers) if not ends & set(answer[:NEW_TOKENS])]
    assert len(whole) >= 4
    questions = load_questions("embedded")[: len(prompts)]
    lines = [{"question_id": n, "category": "all", "turns": [questions[n].turns[0]]} for n in whole]
    write_lines(tmp_path / "questions.jsonl", lines)
    kind, _, options = SERVED["parallel"]
    recipe = recipe_in(
        tmp_path,
        target={"model": "embedded", "dtype": "float32"},
        drafter={"kind": kind, "options": options},
        eval={"questions": str(tmp_path / "questions.jsonl"), "max_new_tokens": NEW_TOKENS},
    )
    drafter = train_briefly(kind, options, setup.target, setup.prompts, setup.answers)
    save_trained(recipe, drafter)
    bench(recipe, ServingOptions(concurrency="1,16", ngram=True))
    figures = json.loads((RunFolder(recipe).eval / "vllm.json").read_text())["figures"]
    some = Setup(target, [setup.prompts[n] for n in whole], [setup.answers[n] for n in whole])
    rounds, accepted, _ = count_our_rounds(drafter, some)
    arms = [(row["arm"], row["concurrency"]) for row in figures["rows"]]
    assert arms == [(arm, concurrency) for arm in (PLAIN, NGRAM, DRAFTING) for concurrency in (1, 16)]
    for row in figures["rows"]:
        assert (row["answers"], row["tokens"], row["failures"]) == (len(whole), len(whole) * NEW_TOKENS, {})
    for row in figures["rows"][-2:]:
        assert row["drafts"] == rounds
        assert row["acceptance_by_depth"] == [count / rounds for count in accepted]
        assert row["tau_committed"] == len(whole) * (NEW_TOKENS - 1) / rounds
    own = figures["own_chain"]  # the same rounds in our own loop, replayed
    assert own["own_tau"] == pytest.approx(own["engine_tau"], rel=1e-9)
    assert any(note.startswith("Accepts here what it accepts there") for note in figures["notes"])
    assert [(proof["prompts"], proof["divergences"]) for proof in figures["greedy"]] == [(len(whole), [])] * 4
