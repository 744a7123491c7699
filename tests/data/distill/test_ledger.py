"""The ledger: no result is lost, counted twice or requested twice, whenever a process is killed."""

import errno
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from draftsmith.data.distill.ledger import Ledger, LedgerView
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.errors import UserError

IDS = [f"c{number:02d}" for number in range(6)]


def finished(key: str, text: str = "said") -> Conversation:
    return Conversation(key, (Turn("assistant", text + key),))


def read_lines(folder: Path, kind: str = "shards") -> list[str]:
    return [line for file in sorted((folder / kind).glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_states_and_reasons_are_stored(tmp_path: Path) -> None:
    cut = Conversation(IDS[1], (), shortened="answer cut short")
    Ledger(tmp_path).commit([], [finished(IDS[0]), cut], {IDS[2]: "HTTP 500"})
    ledger = Ledger(tmp_path)
    assert [key for key in IDS if ledger.is_finished(key)] == IDS[:3]
    assert ledger.failed == {"HTTP 500": 1}
    assert ledger.retry_failed(final=["HTTP 500", "other"]) == 0
    assert ledger.retry_failed(final=["other"]) == 1
    assert [key for key in IDS if ledger.is_finished(key)] == IDS[:2]
    ledger.commit([], [finished(IDS[2])])
    view = LedgerView(tmp_path)
    assert (len(view), view.shortened, view.failed) == (3, {"answer cut short": 1}, {})
    assert [record["id"] for record in view.records()] == IDS[:3]
    assert [record["reason"] for record in view.records()] == [None, "answer cut short", None]


def test_answers_of_unfinished_conversations_survive_a_killed_process(tmp_path: Path) -> None:
    ledger, said = Ledger(tmp_path), [{"text": text, "token_ids": None} for text in ("first", "second", "other")]
    ledger.commit([(IDS[0], 0, said[0])])
    ledger.commit([(IDS[0], 1, said[1]), (IDS[1], 0, said[2])], [finished(IDS[1])])
    ledger.commit([(IDS[2], 0, said[0])], [], {IDS[2]: "HTTP 500"})
    again = Ledger(tmp_path)
    assert again.retry_failed() == 1
    assert [again.stored_answers(key) for key in IDS[:4]] == [said[:2], [], said[:1], []]


def test_torn_line_is_ignored(tmp_path: Path) -> None:
    """A kill leaves the first bytes of a line: the conversation is not finished, and is written to another file."""
    Ledger(tmp_path).commit([], [finished(IDS[0])])
    with LedgerView(tmp_path).files()[0].open("a") as stream:
        stream.write(json.dumps({"id": IDS[1], "reason": None, "messages": []})[:-5])
    ledger = Ledger(tmp_path)
    assert [ledger.is_finished(key) for key in IDS[:2]] == [True, False]
    ledger.commit([], [finished(IDS[1])])
    assert [record["messages"][0]["content"] for record in LedgerView(tmp_path).records()] == ["saidc00", "saidc01"]


def test_damaged_line_is_located_in_the_error(tmp_path: Path) -> None:
    Ledger(tmp_path).commit([], [finished(IDS[0]), finished(IDS[1])])
    view = LedgerView(tmp_path)
    file = view.files()[0]
    begin = len(file.read_bytes().splitlines(keepends=True)[0])
    file.write_text(file.read_text().replace('{"id": "c01"', '{"jd": "c01"'))
    for reader in (lambda: list(view.records()), lambda: LedgerView(tmp_path)):
        with pytest.raises(UserError, match=rf"00001\.jsonl was changed or damaged at byte {begin}: restore it"):
            reader()


def test_full_disk_keeps_earlier_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial line is truncated, and the error names the file."""
    ledger = Ledger(tmp_path)
    ledger.commit([], [finished(IDS[0])])
    before = read_lines(tmp_path)

    def raise_disk_full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_disk_full)
        for answers, kept in (([(IDS[1], 0, {"text": "a", "token_ids": None})], []), ([], [finished(IDS[2])])):
            with pytest.raises(OSError, match=r"No space left on device: .*00001\.jsonl"):
                ledger.commit(answers, kept)
    assert read_lines(tmp_path) == before
    assert read_lines(tmp_path, "unfinished") == []
    ledger.commit([], [finished(IDS[2])])
    assert [record["id"] for record in LedgerView(tmp_path).records()] == [IDS[0], IDS[2]]


# --- several processes ------------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def work(folder: Path, steps: int, conversations: int, number: int, processes: int) -> None:
    """Answer this process's share of conversations of three turns; kill this process at a step, by SIGKILL."""
    ids, done, ledger = [f"c{each:02d}" for each in range(conversations)], 0, Ledger(folder)
    for key in ids[number::processes]:
        if ledger.is_finished(key):
            continue
        for turn in range(len(ledger.stored_answers(key)), 3):
            with (folder / "asked").open("a") as asked:
                asked.write(f"{key} {turn}\n")
            done += 1
            if done == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            ledger.commit([(key, turn, {"text": f"{key}{turn}", "token_ids": None})])
        ledger.commit([], [Conversation(key, (Turn("user", key),) * 50)])


def test_repeated_kills_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    """Two processes at a time, each with its share, kill themselves after some turns.

    Every conversation is in the ledger exactly once, and each killed process costs at most one answer, the one in
    flight, generated twice.
    """
    conversations, chance, kills = 20, random.Random(0), 0
    while kills < 5:
        steps = [chance.randrange(2, 12) for _ in range(2)]
        pair = [FORK.Process(target=work, args=(tmp_path, steps[n], conversations, n, 2)) for n in range(2)]
        for process in pair:
            process.start()
        for process in pair:
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            kills += process.exitcode != 0
    work(tmp_path, 0, conversations, 0, 1)
    view = LedgerView(tmp_path)
    assert [record["id"] for record in view.records()] == [f"c{number:02d}" for number in range(conversations)]
    assert (view.shortened, view.failed) == ({}, {})
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) - len(set(asked)) <= kills
    written = [json.loads(line)["id"] for line in read_lines(tmp_path)]
    assert len(written) == len(set(written)) == conversations
