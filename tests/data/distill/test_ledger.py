"""The ledger: no result is lost, counted twice or requested twice, whenever a process is killed."""

import errno
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.distill.ledger import CLAIMS, SHARDS, Ledger, LedgerView
from draftsmith.data.sources.conversation import Conversation, Turn
from draftsmith.errors import UserError

IDS = [f"c{number:02d}" for number in range(6)]


def finished(key: str, text: str = "said") -> Conversation:
    return Conversation(key, (Turn("assistant", text + key),))


def read_lines(folder: Path, kind: str = "shards") -> list[str]:
    return [line for file in sorted((folder / kind).glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_states_and_reasons_are_stored(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        assert list(ledger.claim(IDS[:4]).claimed) == IDS[:4]
        cut = Conversation(IDS[1], (), shortened="answer cut short")
        ledger.commit([], [finished(IDS[0]), cut], {IDS[2]: "HTTP 500"})
        assert list(ledger.claim(IDS).claimed) == IDS[3:]
        assert [key for key in IDS if ledger.is_finished(key)] == IDS[:3]
        assert LedgerView(tmp_path).failed == {"HTTP 500": 1}
    with Ledger(tmp_path) as ledger:
        assert ledger.retry_failed(final=["HTTP 500", "other"]) == 0
        assert ledger.retry_failed(final=["other"]) == 1
        assert [key for key in IDS if ledger.is_finished(key)] == IDS[:2]
        assert list(ledger.claim(IDS).claimed) == IDS[2:]
        ledger.commit([], [finished(IDS[2])])
    view = LedgerView(tmp_path)
    assert (len(view), view.shortened, view.failed) == (3, {"answer cut short": 1}, {})
    assert [record["id"] for record in view.records()] == IDS[:3]
    assert [record["reason"] for record in view.records()] == [None, "answer cut short", None]


def test_answers_of_unfinished_conversations_survive_a_killed_process(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.claim(IDS[:3])
        ledger.commit([(IDS[0], 0, {"text": "first", "token_ids": None})], [])
        ledger.commit(
            [(IDS[0], 1, {"text": "second", "token_ids": None}), (IDS[1], 0, {"text": "other", "token_ids": None})],
            [finished(IDS[1])],
        )
        ledger.commit([(IDS[2], 0, {"text": "said", "token_ids": None})], [], {IDS[2]: "HTTP 500"})
    with Ledger(tmp_path) as ledger:
        assert ledger.retry_failed() == 1
        assert ledger.claim(IDS[:3]).claimed == {
            IDS[0]: [{"text": "first", "token_ids": None}, {"text": "second", "token_ids": None}],
            IDS[2]: [{"text": "said", "token_ids": None}],
        }


def test_records_do_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    for name, order in (("one", IDS), ("other", IDS[::-1])):
        for key in order:
            with Ledger(tmp_path / name) as ledger:  # one file each
                ledger.commit([], [finished(key)])
    one, other = LedgerView(tmp_path / "one"), LedgerView(tmp_path / "other")
    assert len(one.files()) == len(IDS)
    assert one.fingerprint() == other.fingerprint()
    assert list(one.records()) == list(other.records())
    with Ledger(tmp_path / "one") as ledger:
        ledger.commit([], [finished("d")])
    assert LedgerView(tmp_path / "one").fingerprint() != other.fingerprint()


def test_new_files_are_on_disk_in_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure may lose a file whose lines are on disk."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    with Ledger(tmp_path / "data") as ledger:
        ledger.commit([], [finished(IDS[0])])
        ledger.commit([], [finished(IDS[1])])
    data, shards = str(tmp_path / "data"), str(tmp_path / "data" / SHARDS)
    assert synced == [shards, data, *[f"{shards}/00001.jsonl"] * 2]


def test_torn_line_is_ignored(tmp_path: Path) -> None:
    """A kill leaves the first bytes of a line: the conversation is claimed again and written to another file."""
    with Ledger(tmp_path) as ledger:
        ledger.commit([], [finished(IDS[0])])
    with LedgerView(tmp_path).files()[0].open("a") as stream:
        stream.write(json.dumps({"id": IDS[1], "reason": None, "messages": []})[:-5])
    with Ledger(tmp_path) as ledger:
        assert list(ledger.claim(IDS[:2]).claimed) == [IDS[1]]
        ledger.commit([], [finished(IDS[1])])
    assert [record["messages"][0]["content"] for record in LedgerView(tmp_path).records()] == ["saidc00", "saidc01"]


def test_first_record_of_a_conversation_counts(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with Ledger(tmp_path) as ledger:
            ledger.commit([], [finished("x", text)])
    assert [record["messages"][0]["content"] for record in LedgerView(tmp_path).records()] == ["firstx"]


def test_damaged_line_is_located_in_the_error(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.commit([], [finished(IDS[0]), finished(IDS[1])])
    view = LedgerView(tmp_path)
    file = view.files()[0]
    begin = len(file.read_bytes().splitlines(keepends=True)[0])
    file.write_text(file.read_text().replace('{"id": "c01"', '{"jd": "c01"'))
    for reader in (lambda: list(view.records()), lambda: LedgerView(tmp_path)):
        with pytest.raises(UserError, match=rf"00001\.jsonl was changed or damaged at byte {begin}: restore it"):
            reader()


def test_full_disk_keeps_earlier_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial line is truncated, and the error names the file."""
    with Ledger(tmp_path) as ledger:
        ledger.commit([], [finished(IDS[0])])
        before = read_lines(tmp_path)

        def raise_disk_full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", raise_disk_full)
            for answers, kept in (
                ([(IDS[1], 0, {"text": "a", "token_ids": None})], []),
                ([], [finished(IDS[2])]),
            ):
                with pytest.raises(OSError, match=r"No space left on device: .*00001\.jsonl"):
                    ledger.commit(answers, kept)
        assert read_lines(tmp_path) == before
        assert read_lines(tmp_path, "unfinished") == []
        ledger.commit([], [finished(IDS[2])])
    assert [record["id"] for record in LedgerView(tmp_path).records()] == [IDS[0], IDS[2]]


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with Ledger(tmp_path) as ledger, pytest.raises(UserError, match=rf"{CLAIMS} cannot be locked \(No locks available"):
        ledger.claim(IDS)


# --- several processes ------------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def work(folder: Path, steps: int, conversations: int) -> None:
    """Work on conversations of three turns, three at a time; kill this process at a step, by SIGKILL."""
    ids, done = [f"c{number:02d}" for number in range(conversations)], 0
    with Ledger(folder) as ledger:
        while True:
            left = [key for key in ids if not ledger.is_finished(key)]
            claim = ledger.claim(left[:3])
            if not left or claim.held:
                return
            for key, answers in claim.claimed.items():
                for turn in range(len(answers), 3):
                    with (folder / "asked").open("a") as asked:
                        asked.write(f"{key} {turn}\n")
                    done += 1
                    if done == steps:
                        os.kill(os.getpid(), signal.SIGKILL)
                    ledger.commit([(key, turn, {"text": f"{key}{turn}", "token_ids": None})])
                ledger.commit([], [Conversation(key, (Turn("user", key),) * 50)])


def claim_and_finish_one(folder: Path, connection: Any) -> None:
    with Ledger(folder) as ledger:
        connection.send(list(ledger.claim(IDS[:3]).claimed))
        ledger.commit([], [finished(connection.recv())])
        connection.send("written")
        connection.recv()


def test_conversation_is_claimed_by_one_process_until_it_is_killed(tmp_path: Path) -> None:
    """Conversations that the killed process finished are not requested again."""
    here, there = FORK.Pipe()
    # Not a daemon, it would be waited for after a failure.
    other = FORK.Process(target=claim_and_finish_one, args=(tmp_path, there), daemon=True)
    other.start()
    assert here.recv() == IDS[:3]
    with Ledger(tmp_path) as ledger:
        claim = ledger.claim(IDS[:4])
        assert (list(claim.claimed), claim.held) == ([IDS[3]], IDS[:3])
        here.send(IDS[0])
        assert here.recv() == "written"
        claim = ledger.claim(IDS[:3])
        assert (list(claim.claimed), claim.held) == ([], IDS[1:3])
        assert [key for key in IDS if ledger.is_finished(key)] == IDS[:1]
        other.kill()
        other.join()
        assert list(ledger.claim(IDS[:3]).claimed) == IDS[1:3]


def test_repeated_kills_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    """Two processes at a time kill themselves after some turns.

    Every conversation is in the ledger exactly once, and each killed process costs at most one answer, the one in
    flight, generated twice.
    """
    conversations, chance, kills = 20, random.Random(0), 0
    while kills < 5:
        pair = [FORK.Process(target=work, args=(tmp_path, chance.randrange(2, 12), conversations)) for _ in range(2)]
        for process in pair:
            process.start()
        for process in pair:
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
            kills += process.exitcode != 0
    work(tmp_path, 0, conversations)
    view = LedgerView(tmp_path)
    assert [record["id"] for record in view.records()] == [f"c{number:02d}" for number in range(conversations)]
    assert (view.shortened, view.failed) == ({}, {})
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) - len(set(asked)) <= kills
    written = [json.loads(line)["id"] for line in read_lines(tmp_path)]
    assert len(written) == len(set(written)) == conversations
