"""The data card: its counts add up, hashes are those of the files, the Hub can read it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard
from support import tiny_tokenizers as templates
from support.tiny_tokenizers import tiny_tokenizer

from draftsmith.data.card.card import write_data_card
from draftsmith.data.distill.ledger import Ledger, LedgerView
from draftsmith.data.distill.token_dataset import build_token_dataset
from draftsmith.data.sources.conversation import Turn
from draftsmith.data.sources.mixture import SourceCounts, load_conversations
from draftsmith.data.tokens.chat_tokens import prompt_token_ids
from draftsmith.files import file_sha256
from draftsmith.recipes.run_folder import RunFolder
from draftsmith.recipes.schema import Recipe

TOKENIZER = tiny_tokenizer(templates.CHATML)
ANSWER = "So ```it``` is\n---\n" + "very " * 200


def write_card(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Distil two sources and write the data card; return its text and its JSON.

    Of twelve prompts one is a duplicate and one an evaluation question; one answer fails, two are cut short.
    """
    prompts = {"a": [f"question {n}" for n in range(8)], "b": ["Question 0", "is this the question?", "x", "y"]}
    for name, texts in prompts.items():
        more = {"a": {}, "b": {"m|n": 1}}[name]
        lines = (json.dumps({"prompt": text, **more}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "q.jsonl").write_text('{"question_id": 7, "category": "x", "turns": ["Is this the question?"]}\n')
    mixture = [{"source": str(tmp_path / "a.jsonl"), "weight": 2}, {"source": str(tmp_path / "b.jsonl")}]
    data = {"conversations": {"mixture": mixture, "decontaminate": [str(tmp_path / "q.jsonl")]}}
    data |= {"distill": {"temperature": 0.7}}
    recipe = Recipe.model_validate({"name": "mine", "runs_dir": str(tmp_path / "runs"), "data": data})
    counts, run = SourceCounts(), RunFolder(recipe)
    failed, *answered = load_conversations(recipe, counts)
    ended = [
        replace(c, turns=(*c.turns, Turn("assistant", ANSWER)), shortened="cut short" if n < 2 else None)
        for n, c in enumerate(answered)
    ]
    Ledger(run.data).commit([], ended, {failed.id: "a | b\nc"})
    build_token_dataset(recipe, TOKENIZER, run)
    file = write_data_card(recipe, counts, TOKENIZER, "abc")
    return file.read_text(encoding="utf-8"), json.loads((run.data / "card.json").read_text())


def test_every_record_is_accounted_for(tmp_path: Path) -> None:
    text, values = write_card(tmp_path)
    a, b = values["sources"]["a"], values["sources"]["b"]
    assert (a["read"], a["kept"], a["distilled"], a["without_answer"]) == (8, 8, 7, 1)
    assert (b["read"], b["duplicates"], b["contaminated"], b["kept"]) == (4, 1, {"is a question": 1}, 2)
    for row in (a, b):
        out = sum(row[name] if isinstance(row[name], int) else sum(row[name].values())
                  for name in ("invalid", "duplicates", "other_split", "contaminated"))  # fmt: skip
        assert row["read"] == out + row["kept"]
        assert row["kept"] == row["distilled"] + row["without_answer"]
    assert values["failed"] == {"a | b\nc": 1}
    assert sum(a["shortened"].values()) + sum(b["shortened"].values()) == 2
    assert list(values["contaminated_ids"].values()) == ["q.jsonl:7"]
    assert values["engine"]["temperature"] == 0.7
    assert values["engine"]["weights"] == "abc"
    assert "| a | 8 | 0 | 0 | 0 | 0 | 8 | 7 | " in text
    assert "| b | 4 | 0 | 1 | 0 | 1 | 2 | 2 | " in text
    assert "| contaminated | b | is a question | 1 |" in text
    assert b["unread_keys"] == {"m|n": 4}
    assert "| key not read | b | m\\|n | 4 |" in text
    assert "written by `embedded` itself" in text
    assert "| failed | all | a \\| b c | 1 |" in text


def test_card_counts_the_tokens_that_training_reads(tmp_path: Path) -> None:
    _, values = write_card(tmp_path)
    report = json.loads((tmp_path / "runs" / "mine" / "data" / "tokens" / "token_report.json").read_text())
    assert values["tokens"]["answer"]["total"] == report["loss_tokens"]
    assert values["tokens"]["prompt"]["total"] == report["tokens"] - report["loss_tokens"]
    asked = prompt_token_ids(TOKENIZER, [Turn("user", "question 1")])
    answer = TOKENIZER(f"{ANSWER}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert values["tokens"]["answer"]["longest"] == len(answer)
    assert values["tokens"]["prompt"]["longest"] == len(asked)


def test_card_holds_the_hashes_of_shards(tmp_path: Path) -> None:
    text, values = write_card(tmp_path)
    hashes, data = values["hashes"], tmp_path / "runs" / "mine" / "data"
    assert hashes["sources"]["a"] == f"a.jsonl, SHA-256 {file_sha256(tmp_path / 'a.jsonl')}"
    assert hashes["data_files"] == {"shards/00001.jsonl": file_sha256(data / "shards" / "00001.jsonl")}
    assert values["questions"] == {"q": file_sha256(tmp_path / "q.jsonl")}
    assert hashes["records"] == LedgerView(data).fingerprint()
    assert str(tmp_path) not in text


def test_hub_reads_the_card(tmp_path: Path) -> None:
    text, _ = write_card(tmp_path)
    card = DatasetCard(text)
    assert card.data.to_dict()["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": ["shards/*.jsonl"]}]}
    ]
