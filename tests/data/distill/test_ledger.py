"""The ledger: nothing done is lost or counted twice, whoever is killed and whenever; leases fall to the living."""

import errno
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.distill import ledger as ledger_module
from draftsmith.data.distill import ledger_view as distilled
from draftsmith.data.distill.ledger import LEASE_S, Finished, Ledger
from draftsmith.data.distill.ledger_db import DONE, FAILED, LEDGER_FILE, SHORTENED
from draftsmith.data.distill.ledger_view import LedgerView
from draftsmith.data.distill.shards import ShardReader, ShardWriter
from draftsmith.recipes.errors import UserError

IDS = [f"c{number:02d}" for number in range(6)]


def done(key: str, text: str = "said") -> Finished:
    return Finished(key, DONE, None, {"messages": [{"role": "assistant", "content": text + key}]})


def lines_of(folder: Path) -> list[str]:
    """Every line on disk, whether the ledger knows it or not."""
    return [line for file in sorted((folder / "shards").glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_states_reasons_and_attempts(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        assert list(ledger.lease(IDS[:4]).taken) == IDS[:4]
        cut = Finished(IDS[1], SHORTENED, "answer cut short", {"messages": []})
        assert ledger.commit([], [done(IDS[0]), cut, Finished(IDS[2], FAILED, "HTTP 500")]) == set()
        assert ledger.finished_ids() == set(IDS[:3])
        assert ledger.retry_failed(final=["HTTP 500", "other"]) == 0
        assert ledger.retry_failed(final=["other"]) == 1
        assert ledger.finished_ids() == set(IDS[:2])
        assert list(ledger.lease(IDS).taken) == [IDS[2], IDS[4], IDS[5]]
        ledger.commit([], [done(IDS[2])])
    view = LedgerView(tmp_path)
    assert view.counts() == {"done": {"": 2}, "truncated": {"answer cut short": 1}, "waiting": {"": 3}}
    assert view.attempts() == {1: 2, 2: 1}
    assert [record["id"] for record in view.records()] == IDS[:3]
    assert [record["state"] for record in view.records()] == [DONE, SHORTENED, DONE]


def test_answers_of_a_conversation_at_work_outlive_its_worker(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS[:2])
        ledger.commit([(IDS[0], 0, {"text": "first"})], [])
        ledger.commit([(IDS[0], 1, {"text": "second"}), (IDS[1], 0, {"text": "other"})], [done(IDS[1])])
    with Ledger(tmp_path) as ledger:
        assert ledger.lease(IDS[:1]).taken == {IDS[0]: [{"text": "first"}, {"text": "second"}]}
        ledger.commit([], [done(IDS[0])])
    connection = sqlite3.connect(tmp_path / LEDGER_FILE)
    assert connection.execute("SELECT COUNT(*) FROM answers").fetchone() == (0,)


def test_the_order_of_writing_does_not_show(tmp_path: Path) -> None:
    for name, order in (("one", IDS), ("other", IDS[::-1])):
        for key in order:
            with Ledger(tmp_path / name) as ledger:  # each in a shard of its own
                ledger.lease([key])
                ledger.commit([], [done(key)])
    one, other = LedgerView(tmp_path / "one"), LedgerView(tmp_path / "other")
    assert one.fingerprint() == other.fingerprint()
    assert list(one.records()) == list(other.records())
    with Ledger(tmp_path / "one") as ledger:
        ledger.lease(["d"])
        ledger.commit([], [done("d")])
    assert one.fingerprint() != other.fingerprint()


def test_pages_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distilled, "PAGE_ROWS", 2)
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS[:5])
        ledger.commit([], [done(key) for key in IDS[:5]])
    assert [record["id"] for record in LedgerView(tmp_path).records()] == IDS[:5]


def test_a_line_that_the_ledger_does_not_know_is_found_again(tmp_path: Path) -> None:
    """Killed between the line and the ledger; a torn line behind it is ignored."""
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS[:3])
        ledger.commit([], [done(IDS[0])])
        shard = tmp_path / "shards" / f"{ledger.worker:05d}-000.jsonl"
    line = json.dumps({"id": IDS[1], "state": DONE, "reason": None, "messages": []})
    torn = json.dumps({"id": IDS[2], "state": DONE, "reason": None, "messages": []})
    with shard.open("a") as stream:
        stream.write(line + "\n" + torn[:-5])
    with Ledger(tmp_path) as ledger:
        assert list(ledger.lease(IDS[:3]).taken) == [IDS[2]]
    assert [record["id"] for record in LedgerView(tmp_path).records()] == IDS[:2]


def test_a_lost_ledger_is_made_anew_from_the_shards(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS)
        ledger.commit([], [done(key) for key in IDS[:4]])
    before = LedgerView(tmp_path).fingerprint()
    (tmp_path / LEDGER_FILE).write_bytes(b"not a database, but long enough to look at" * 40)
    with pytest.raises(UserError, match=r"ledger\.sqlite is damaged .*: delete it and run the same command again"):
        Ledger(tmp_path)
    (tmp_path / LEDGER_FILE).unlink()
    with Ledger(tmp_path) as ledger:
        assert ledger.finished_ids() == set(IDS[:4])
    assert LedgerView(tmp_path).fingerprint() == before


def test_a_changed_shard_is_named(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS[:1])
        ledger.commit([], [done(IDS[0])])
    file = next((tmp_path / "shards").glob("*.jsonl"))
    file.write_text("x" + file.read_text())
    with pytest.raises(UserError, match=r"00001-000\.jsonl was changed or damaged at byte 0"):
        list(LedgerView(tmp_path).records())


def test_nothing_there_yet(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `draftsmith distill` with the same recipe first"):
        LedgerView(tmp_path)


def test_a_full_disk_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is cut off again, and the ledger knows nothing of it."""
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS)
        ledger.commit([], [done(IDS[0])])
        before = lines_of(tmp_path)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                ledger.commit([(IDS[1], 0, {"text": "a"})], [done(IDS[2])])
        assert lines_of(tmp_path) == before
        ledger.commit([], [done(IDS[2])])
    assert [record["id"] for record in LedgerView(tmp_path).records()] == [IDS[0], IDS[2]]


def test_a_full_disk_under_the_ledger_itself(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.lease(IDS)
        ledger._connection.execute("PRAGMA max_page_count = 10")
        with pytest.raises(OSError, match="No space left"):
            ledger.commit([(IDS[1], 0, {"text": "a" * 100_000})], [])
        ledger._connection.execute("PRAGMA max_page_count = 100000")


def test_large_shards_go_on_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.data.distill.shards.FULL_SHARD_BYTES", 10)
    writer = ShardWriter(tmp_path, "w")
    places = [place for number in range(3) for place in writer.append([{"number": number, "text": "é"}])]
    assert [place.shard for place in places] == ["w-000.jsonl", "w-001.jsonl", "w-002.jsonl"]
    assert [record["number"] for record in ShardReader(tmp_path).read(iter(places))] == [0, 1, 2]


# --- several processes ------------------------------------------------------------------------------------------------

OTHER = """
import sys, time
from pathlib import Path
from draftsmith.data.distill.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.commit([], []) or print(*ledger.lease(sys.argv[2:]).taken, flush=True)
sys.stdin.read() if sys.stdin.readable() else time.sleep(60)
ledger.close()
"""


def other_process(folder: Path, ids: list[str]) -> tuple[Any, list[str]]:
    """A process that leases these ids and holds them until its stdin is closed."""
    command = [sys.executable, "-c", OTHER, str(folder), *ids]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def test_what_another_process_holds_is_left_to_it_until_it_is_killed(tmp_path: Path) -> None:
    other, taken = other_process(tmp_path, IDS[:3])
    assert taken == IDS[:3]
    with Ledger(tmp_path) as ledger:
        lease = ledger.lease(IDS[:4])
        assert (list(lease.taken), lease.held) == ([IDS[3]], IDS[:3])
        assert ledger.commit([], [done(IDS[0])]) == {IDS[0]}
        assert lines_of(tmp_path) == []
        other.kill()
        other.wait()
        assert list(ledger.lease(IDS[:3]).taken) == IDS[:3]


def test_a_process_that_ends_gives_back_what_it_holds(tmp_path: Path) -> None:
    other, _ = other_process(tmp_path, IDS[:3])
    other.communicate("")
    with Ledger(tmp_path) as ledger:
        assert list(ledger.lease(IDS[:3]).taken) == IDS[:3]


def test_a_heart_that_stands_still_by_our_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host, whose processes we cannot see: dead after LEASE_S without a beat. Wall clocks may jump."""
    with Ledger(tmp_path) as ledger:
        ledger._connection.execute("INSERT INTO workers (host, pid) VALUES ('elsewhere', 1)")
        far = ledger._connection.execute("SELECT MAX(number) FROM workers").fetchone()[0]
        ledger._connection.execute("INSERT INTO conversations (id, state, worker) VALUES ('x', 'leased', ?)", (far,))
        now = [1000.0]
        monkeypatch.setattr(ledger_module.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(ledger_module.time, "time", lambda: random.Random(now[0]).uniform(-1e9, 1e9))
        assert ledger.lease(["x"]).held == ["x"]  # seen for the first time
        now[0] += LEASE_S - 1
        assert ledger.lease(["x"]).held == ["x"]
        ledger._connection.execute("UPDATE workers SET beat = beat + 1 WHERE number = ?", (far,))
        now[0] += LEASE_S - 1
        assert ledger.lease(["x"]).held == ["x"]  # it lived in between
        now[0] += LEASE_S + 1
        assert list(ledger.lease(["x"]).taken) == ["x"]


WORKER = """
import sys, time
from pathlib import Path
from draftsmith.data.distill.ledger import Finished, Ledger
from draftsmith.data.distill.ledger_db import DONE
folder, count = Path(sys.argv[1]), int(sys.argv[2])
ids = [f"c{n:03d}" for n in range(count)]
with Ledger(folder) as ledger:
    while True:
        left = [key for key in ids if key not in ledger.finished_ids()]
        lease = ledger.lease(left[:7])
        if not left:
            break
        for key, answers in lease.taken.items():
            for turn in range(len(answers), 3):
                with (folder / "asked").open("a") as asked:
                    asked.write(f"{key} {turn}\\n")
                ledger.commit([(key, turn, {"text": f"{key}{turn}"})], [])
            ledger.commit([], [Finished(key, DONE, None, {"messages": [key] * 50})])
        if not lease.taken:
            time.sleep(0.05)
"""


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Two workers, SIGKILLed at random moments: every conversation is there exactly once, at most the answers in
    flight were asked for twice, and no line counts that is not whole."""
    count, chance, kills = 150, random.Random(0), 8
    running: list[Any] = []
    for _ in range(kills):
        while len(running) < 2:
            running.append(subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(count)]))
        time.sleep(chance.uniform(0.3, 0.9))
        victim = running.pop(chance.randrange(2))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    subprocess.run([sys.executable, "-c", WORKER, str(tmp_path), str(count)], check=True, timeout=60)
    assert running[0].wait(timeout=60) == 0
    view = LedgerView(tmp_path)
    assert [record["id"] for record in view.records()] == [f"c{number:03d}" for number in range(count)]
    assert view.counts() == {"done": {"": count}}
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) - len(set(asked)) <= kills
    written = [json.loads(line)["id"] for line in lines_of(tmp_path) if line.endswith("}")]
    assert len(written) == len(set(written)) == count
