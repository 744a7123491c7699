"""Questions in every published format, several sets side by side, and one sentence for a file of no format."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from support.places import MATERIAL

from draftsmith.data.sources.question_sets import GITHUB
from draftsmith.data.sources.questions import Question, load_questions
from draftsmith.errors import UserError
from draftsmith.files import file_sha256

SPEC_BENCH = MATERIAL / "spec_bench" / "question.jsonl"
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
# Two rows of each format, with the columns of the published files.
HUMANEVAL = [
    {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "entry_point": f"f{n}", "canonical_solution": "",
     "test": ""}
    for n in range(2)
]  # fmt: skip
MBPP = [
    {"text": f"Write {n}.", "code": "", "task_id": n, "test_setup_code": "", "test_list": ["assert 1"],
     "challenge_test_list": []}
    for n in (11, 12)
]  # fmt: skip
SANITIZED = [
    {"source_file": "a.ipynb", "task_id": n, "prompt": f"Write {n}.", "code": "", "test_imports": [],
     "test_list": ["assert 1"]}
    for n in (2, 3)
]  # fmt: skip
GSM8K = [{"question": f"How many, {n}?", "answer": f"<<1+1=2>>2 sheep.\n#### {n}"} for n in range(2)]
MATH_500 = [
    {"problem": f"Find ${n}$.", "solution": "", "answer": "1", "subject": subject, "level": 2,
     "unique_id": f"test/{n}.json"}
    for n, subject in enumerate(("Algebra", "Precalculus"))
]  # fmt: skip
SPEED_BENCH = [
    {"question_id": f"q{n}", "category": category, "sub_category": "s", "turns": [f"Ask {n}.", "More."][: n + 1],
     "source": "x", "src_id": "1", "difficulty": "easy", "multiturn": bool(n)}
    for n, category in enumerate(("math", "rag"))
]  # fmt: skip


def written(file: Path, rows: list[dict[str, Any]]) -> str:
    """Write the rows as the file's suffixes say; return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return str(file)


@pytest.mark.parametrize(
    ("name", "rows", "questions"),
    [
        ("HumanEval.jsonl.gz", HUMANEVAL, [("HumanEval/0", "humaneval", ("def f0():\n",), "humaneval")]),
        ("mbpp.jsonl", MBPP, [(11, "mbpp", ("Write 11.",), "mbpp")]),
        ("sanitized-mbpp.json", SANITIZED, [(2, "mbpp", ("Write 2.",), "mbpp"), (3, "mbpp", ("Write 3.",), "mbpp")]),
        ("test.jsonl", GSM8K, [(1, "gsm8k", ("How many, 0?",), "gsm8k"), (2, "gsm8k", ("How many, 1?",), "gsm8k")]),
        ("test.jsonl", MATH_500, [("test/0.json", "Algebra", ("Find $0$.",), "math_500")]),
        (
            "test.parquet",
            SPEED_BENCH,
            [("q0", "math", ("Ask 0.",), "math"), ("q1", "rag", ("Ask 1.", "More."), "rag")],
        ),
    ],
)
def test_published_formats(
    tmp_path: Path, name: str, rows: list[dict[str, Any]], questions: list[tuple[Any, ...]]
) -> None:
    """A question's text is the published one, whole; the set is one task, or of SPEED-Bench's each category."""
    loaded = load_questions(written(tmp_path / name, rows))
    assert len(loaded) == len(rows)
    found = [(each.question_id, each.category, each.turns, each.task_name) for each in loaded]
    assert found[: len(questions)] == questions


def test_several_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ids and categories of different sets stay apart, and each set that is one task stays one."""
    mt_bench = [
        {"question_id": "q0", "category": name, "turns": ["a"], "reference": ["b"]} for name in ("math", "stem")
    ]
    mt_bench[1]["question_id"] = 82
    sets = [
        written(tmp_path / "speed" / "qualitative" / "test.parquet", SPEED_BENCH),
        written(tmp_path / "speed" / "throughput_1k" / "test.parquet", SPEED_BENCH[:1]),
        written(tmp_path / "gsm.jsonl", GSM8K[:1]),
        written(tmp_path / "mt.jsonl", mt_bench),
        written(tmp_path / "math.jsonl", MATH_500[:1]),
    ]
    monkeypatch.setitem(GITHUB, "mt_bench", ("", file_sha256(Path(sets[3]))))
    assert load_questions(sets) == [
        Question("qualitative/q0", "qualitative/math", ("Ask 0.",), "qualitative/math"),
        Question("qualitative/q1", "qualitative/rag", ("Ask 1.", "More."), "qualitative/rag"),
        Question("throughput_1k/q0", "throughput_1k/math", ("Ask 0.",), "throughput_1k/math"),
        Question("gsm/1", "gsm8k", ("How many, 0?",), "gsm8k"),
        Question("mt/q0", "mt/math", ("a",), "mt_bench"),
        Question("mt/82", "mt/stem", ("a",), "mt_bench"),
        Question("math/test/0.json", "math/Algebra", ("Find $0$.",), "math_500"),
    ]
    kept = [each.question_id for each in load_questions(sets, limit_per_task=1)]
    assert kept == ["qualitative/q0", "qualitative/q1", "throughput_1k/q0", "gsm/1", "mt/q0", "math/test/0.json"]
    assert [each.question_id for each in load_questions(sets[:1])] == ["q0", "q1"]  # alone they keep their names


FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"
FILL_IN = "in place of its text: fill it in with `python3 prepare_data.py --dataset speed` of examples/specdec_bench"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # Rows of a format.
        ([{"prompt": "a", "id": 3}], "line 1 has no `task_id`: rows of HumanEval's format have `task_id`, `prompt`"),
        ([HUMANEVAL[0] | SANITIZED[0]], "line 1 has the columns of HumanEval and of sanitized MBPP: leave out those"),
        ([HUMANEVAL[0], GSM8K[0]], "line 2 has no `task_id`: rows of HumanEval's format"),
        (
            [{"question_id": 1, "turns": ["a"]}],
            "line 1 has no `category`: rows of Spec-Bench's format have `question_id`, `category`, `turns` (other",
        ),
        ([{"question": "a", "answer": "42"}], "line 1: `answer` has no `####`, which every row of GSM8K has: other"),
        ([MATH_500[0] | {"subject": None}], "line 1: subject must be text other than `overall`, of one line, not null"),
        ([SPEED_BENCH[0] | {"category": "overall"}], "line 1: category must be text other than `overall`"),
        ([MBPP[0] | {"text": " "}], "line 1: text must be non-empty text"),
        ([SPEED_BENCH[0] | {"turns": []}], "line 1: turns must be a list of one or more non-empty texts"),
        ([MBPP[0] | {"task_id": None}], "line 1: task_id must be a number or text of one line, not null"),
        (MBPP[:1] * 2, "line 2: task_id 11 is already used on line 1"),
        (
            [SPEED_BENCH[0], SPEED_BENCH[1] | {"turns": [FETCHED]}],
            f"line 2: a turn holds the placeholder `{FETCHED[:37]}` {FILL_IN}",
        ),
        (
            [SPEED_BENCH[0] | {"turns": ["b", "Sum it up.\n\n{article}\n"]}],
            f"line 1: a turn holds the placeholder `{{article}}` {FILL_IN}",
        ),
        # No rows.
        (b"", "holds no question"),
        (b"[]", "holds no question"),
        (b"{", "line 1: not JSON"),
        (b"[1]", "record 1 is not a JSON object"),
        (b'{"question_id": %s, "category": "a", "turns": ["a"]}' % (b"9" * 5000), "text of one line, not inf"),
        (b"[" * 100_000, "record 1 is nested too deeply"),
        (b"\xe4", "line 1: not UTF-8 text (byte 0xe4 at position 1)"),
    ],
)
def test_bad_questions(tmp_path: Path, content: list[dict[str, Any]] | bytes, message: str) -> None:
    file = tmp_path / "q.jsonl"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        written(file, content)
    with pytest.raises(UserError) as caught:
        load_questions(str(file))
    assert message in str(caught.value)


def test_questions(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    file.write_text('{"question_id": 1, "category": "a", "turns": ["a\\ud800b {article}"]}')
    assert load_questions(str(file))[0].turns == ("a?b {article}",)
    with pytest.raises(
        UserError, match=r"nowhere\.jsonl does not exist: set eval.questions .* to a file, or to one of embedded"
    ):
        load_questions("nowhere.jsonl")
    questions = load_questions("embedded")
    categories = {question.category for question in questions}
    assert len(questions) >= 80
    assert len(categories) >= 5
    assert len(load_questions("embedded", limit_per_category=2)) == 2 * len(categories)
    if SPEC_BENCH.is_file():
        questions = load_questions(str(SPEC_BENCH))
        assert Counter(question.task_name for question in questions) == dict.fromkeys(TASKS, 80)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task is cut evenly over its categories; the order is the file's. Only in Spec-Bench's file they share one."""
    file = tmp_path / "question.jsonl"
    categories = ["writing"] * 4 + ["math"] * 4 + ["coding"] + ["qa"] * 4
    lines = ({"question_id": n, "category": category, "turns": ["a"]} for n, category in enumerate(categories))
    file.write_text("\n".join(json.dumps(line) for line in lines))

    def kept(*limits: int | None) -> list[Any]:
        return [question.question_id for question in load_questions(str(file), *limits)]

    assert kept() == list(range(13))
    assert kept(2) == [0, 1, 4, 5, 8, 9, 10]
    assert kept(None, 1) == [0, 4, 8, 9]
    monkeypatch.setitem(GITHUB, "spec_bench", ("", file_sha256(file)))
    assert kept(None, 4) == [0, 1, 4, 8, 9, 10, 11, 12]
    assert kept(None, 1) == [0, 9]
    assert kept(None, 5) == [0, 1, 4, 5, 8, 9, 10, 11, 12]  # coding has one only
