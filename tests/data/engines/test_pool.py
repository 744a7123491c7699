"""Engines in processes of their own: even load, affinity, devices, and what a death says."""

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine, broken_engine

from draftsmith.data.engines.engine import Completion, GenerationSettings, Outcome, Request
from draftsmith.data.engines.pool import EnginePool
from draftsmith.recipes.errors import UserError


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    pool = EnginePool(partial(FakeEngine, 3, 100), [{}, {}])
    yield pool
    pool.close()


def request(key: str, *prompt_ids: int) -> Request:
    return Request(key, list(prompt_ids), [], GenerationSettings(), 0)


def run(pool: EnginePool, asked: list[Request]) -> dict[str, Outcome]:
    for each in asked:
        pool.submit(each)
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(asked):
        outcomes.update(pool.collect())
    return outcomes


def worker_of(outcome: Outcome) -> int:
    assert isinstance(outcome, Completion)
    assert outcome.token_ids is not None
    return outcome.token_ids[-1]


def test_requests_are_spread_and_later_turns_stay(pool: EnginePool) -> None:
    assert (pool.concurrency, pool.max_length_tokens) == (6, 100)
    first = run(pool, [request(f"c{n}", n) for n in range(8)])
    assert {key: outcome.token_ids[0] for key, outcome in first.items() if isinstance(outcome, Completion)} == {
        f"c{n}": 2 * n for n in range(8)
    }
    places = {key: worker_of(outcome) for key, outcome in first.items()}
    assert sorted(Counter(places.values()).values()) == [4, 4]
    for _ in range(3):
        again = run(pool, [request(key, 1) for key in sorted(places)])
        assert {key: worker_of(outcome) for key, outcome in again.items()} == places


def test_affinity_gives_way_to_an_uneven_load(pool: EnginePool) -> None:
    places = {key: worker_of(outcome) for key, outcome in run(pool, [request(f"c{n}", n) for n in range(60)]).items()}
    here = [key for key, place in places.items() if place == places["c0"]]
    assert len(here) == 30
    again = Counter(worker_of(outcome) for outcome in run(pool, [request(key, 1) for key in here]).values())
    # One eighth and a constant more than the other worker, never all of them.
    assert again[places["c0"]] < 22


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (-1, r"engine worker [12] ended with exit code 7: .* run the same command again"),
        (-2, r"engine worker [12] ended with exit code 1: .* run the same command again"),
        (-3, "memory does not hold it"),
    ],
)
def test_a_dead_worker_ends_the_pool_with_one_sentence(pool: EnginePool, kind: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(pool, [request("bad", kind), request("other", 1), *(request(f"c{n}", n) for n in range(50))])


def test_submitting_to_a_dead_worker_says_the_same(pool: EnginePool) -> None:
    for worker in pool._workers:
        worker._process.kill()
        worker._process.join()
    with pytest.raises(UserError, match=r"engine worker [12] was killed by signal 9"):
        run(pool, [request(f"c{n}", n) for n in range(50)])


def test_a_worker_that_cannot_make_its_engine() -> None:
    with pytest.raises(UserError, match=r"^vLLM does not start$"):
        EnginePool(broken_engine, [{}, {}])


def test_more_than_a_pipe_holds_in_both_directions() -> None:
    """Long answers wait to be collected while long prompts are submitted: neither side waits for the other."""
    pool = EnginePool(FakeEngine, [{}])
    try:
        outcomes = run(pool, [request(f"c{n}", -4, *range(10**5)) for n in range(4)])
        assert {len(outcome.token_ids or ()) for outcome in outcomes.values() if isinstance(outcome, Completion)} == {
            10**6 + 1
        }
    finally:
        pool.close()


def test_every_worker_has_its_devices_and_is_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    environments = [{"FAKE_ENGINE_CLOSED": str(closed), "CUDA_VISIBLE_DEVICES": devices} for devices in ("0,1", "2,3")]
    pool = EnginePool(partial(FakeEngine, delay_s=0.05), environments)
    for n in range(20):
        pool.submit(request(f"c{n}", n))
    began = time.monotonic()
    pool.close()  # in the middle
    assert time.monotonic() - began < 5
    assert sorted(closed.read_text().splitlines()) == ["0,1", "2,3"]
