"""Records go to the file and come back as they were; those of earlier versions too, or the reason why not."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support.records import made_up

from draftsmith.eval.bench.record_log import RecordLog
from draftsmith.eval.bench.records import QuestionRecord
from draftsmith.recipes.errors import UserError


def two_turns() -> QuestionRecord:
    """In the second one the chain takes a round more and drafts nothing."""
    record = made_up(3, 2.0, 4.0)
    for answer in record.answers.values():
        (turn,) = answer.turns
        answer.turns.append(replace(turn, text="ü\n", accept_lengths=[3, 3, 2, 1], draft_lengths=[2, 2, 1, 0], tried=7))
        answer.turns[1].round_s, answer.turns[1].draft_depths = [0.1, 0.2, 0.3, 0.4], [2, 2, 2, 0]
    return record


def by_figures(answer: dict[str, Any]) -> dict[str, Any]:
    """An arm's answers as earlier versions wrote them: a list over turns for each figure, or over all turns' rounds."""
    turns = answer.pop("turns")
    of_turns = {"turns": "text", "token_ids": "ids", "wall_time": "wall_time_s"}
    of_turns |= {
        key: key for key in ["first_token_s", "prefill_s", "draft_s", "verify_s", "choose_s", "commit_s", "tried"]
    }
    lists = {key: [turn[name] for turn in turns] for key, name in of_turns.items()}
    lists["decoding_steps"] = [len(turn["accept_lengths"]) for turn in turns]
    lists["new_tokens"] = [len(turn["ids"]) for turn in turns]
    for key in ("accept_lengths", "draft_lengths", "draft_depths", "round_s"):
        lists[key] = list(chain.from_iterable(turn[key] for turn in turns))
    return answer | lists


def test_what_is_appended_comes_back(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "records.jsonl")
    records = [made_up(0, 2.0, 4.0), two_turns()]
    records[0].weights_bytes, records[0].weights_read_s = 2_000_000, 0.0005
    for record in records:
        log.append(record)
    assert list(RecordLog(log.file)) == records
    assert len(log.file.read_text().splitlines()) == 2


def test_records_of_an_earlier_version_still_load() -> None:
    record = two_turns()
    values = record.to_json()
    values["answers"] = {key: by_figures(answer) for key, answer in values["answers"].items()}
    assert QuestionRecord.from_json(values) == record
    for answer in values["answers"].values():
        del answer["lenience"]  # always 1 before there was lenience
    assert QuestionRecord.from_json(values) == record
    values = record.to_json()
    for answer in values["answers"].values():
        for turn in answer["turns"]:
            del turn["outside_tokens"], turn["ended_outside"]  # nothing was noted of draft vocabularies
            del turn["phases_s"]
    del values["weights_bytes"], values["weights_read_s"]
    assert QuestionRecord.from_json(values) == record


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("key", ["settings", "round_s", "choose_s"])
def test_records_that_lack_a_figure_are_refused(key: str, earlier: bool) -> None:
    values = two_turns().to_json()
    answer = values["answers"]["chain@0"]
    if earlier:
        answer = values["answers"]["chain@0"] = by_figures(answer)
    for place in [answer] if earlier or key in answer else answer["turns"]:
        del place[key]
    with pytest.raises(UserError, match=rf"run 3 of question 1 .* earlier version of draftsmith \(no {key}\): delete"):
        QuestionRecord.from_json(values)


@pytest.mark.parametrize("line", ["{", "[]", "7", "{}", '{"run": 0}', '{"run": 0, "answers": []}'])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "records.jsonl")
    log.append(made_up(0, 2.0, 4.0))
    with log.file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(
        UserError, match=r"records\.jsonl line 2 is no record, so the file was damaged: delete that line"
    ):
        list(log)


def test_a_method_whose_name_leads_out_of_the_folder_is_no_record(tmp_path: Path) -> None:
    """Files of answers are called by it, and a run's folder may be somebody else's."""
    log = RecordLog(tmp_path / "records.jsonl")
    record = made_up(0, 2.0, 4.0)
    record.answers["chain@0"].method = "../../chain"
    log.append(record)
    with pytest.raises(UserError, match=r"records\.jsonl line 1 is no record"):
        list(log)
