"""Invented inputs of a report: records, a summary, and facts of every section of the page."""

from dataclasses import replace
from typing import Any

from draftsmith.data.card.card import CardSource, DataCard
from draftsmith.eval.bench.records import MethodResult, QuestionRecord
from draftsmith.eval.decoding.generate import AnswerRecord
from draftsmith.eval.report.summary import summarize
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.report import TrainReport


def row(method: str, category: str, temperature: float = 0.0, **changes: Any) -> dict[str, Any]:
    values = {
        "method": method,
        "temperature": temperature,
        "category": category,
        "tau": 2.5,
        "tau_interval": [2.31, 2.74],
        "tau_by_question": 2.61,
        "tau_without_bonus": 1.5,
        "speedup_mean": 1.8,
        "speedup_interval": None,
        "speedup_std": 0.05,
        "speedup_by_question_mean": 1.73,
        "runs": 3,
        "tokens": 1234,
        "lossless": True,
        "tokens_per_s": 432.1,
        "greedy_identical": True if temperature == 0 else None,
        "different_answers": 0 if temperature == 0 else None,
        "numerical_ties": 0 if temperature == 0 else None,
        "timing": None,
    }
    return values | changes


BUG = row("bad", "overall", greedy_identical=False, different_answers=3, numerical_ties=2)
TIES = row("rounded", "overall", greedy_identical=False, different_answers=3, numerical_ties=3)
CATEGORIES = ("writing", "math", "overall")
TIMING = {
    "t_target_step_s": 0.004,
    "t_draft_s": 0.001,
    "t_verify_forward_s": 0.0045,
    "t_choose_s": 0.0002,
    "t_commit_s": 0.000123,
    "cost_ratio": 0.25,
    "speedup_predicted": 1.9,
    "speedup_decoding": 1.8,
    "loop_efficiency": 0.95,
    "acceptance_by_depth": [0.5, 0.4],
}
SUMMARY = [
    *(row("autoregressive", name, tau=1.0, tau_without_bonus=0.0, speedup_mean=1.0) for name in CATEGORIES),
    *(row("chain", name) for name in CATEGORIES),
    *(row("tree", name, speedup_mean=2.01, speedup_std=0.1, timing=TIMING) for name in CATEGORIES),
]
BASELINE = [{"temperature": 0.0, "step_bytes_per_s": 2e9, "read_bytes_per_s": 4e9, "share": 0.5}]


def facts(summary: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"platform": "Linux", "processor": "x86_64", "cpu_count": 2, "omp_num_threads": "2"}
    return {
        "summary": summary,
        "recipe": Recipe(name="demo"),
        "provenance": {
            "machine": machine,
            "versions": {"torch": "2.13.0"},
            "commit": "abc",
            "time_utc": "2026-01-01T00:00:00Z",
        },
        "questions": 80,
        "left_out": 1,
        "tasks_left_out": ["rag"],
        "turns_left_out": 2,
        "device": "",
        "drafter_kinds": ["parallel"],
        "command": "draftsmith run runs/demo/recipe.yaml",
        "baseline": [],
        "records": [],
        "served": [],
        "trained": {},
        "inputs_sha256": {},
        **dict.fromkeys(("target_change", "proof", "data_card")),
    }


def made_up(run: int, seconds: float, baseline_seconds: float, same: bool = True) -> QuestionRecord:
    """10 tokens in 3 rounds of 3 after a first token; the baseline takes 9 rounds."""

    def answered(method: str, wall: float, accepted: list[int], ids: list[int]) -> MethodResult:
        settings = {
            "target": "12ab",
            "dtype": "float32",
            "prompts": "34cd",
            "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
            "max_new_tokens": 10,
        }
        answer = AnswerRecord(
            ids=ids,
            text="x",
            accept_lengths=accepted,
            draft_lengths=[length - 1 for length in accepted],
            draft_depths=[2 * (method == "chain")] * len(accepted),
            tried=sum(length - 1 for length in accepted),
            round_s=[0.37] * len(accepted),
            wall_time_s=wall,
            prefill_s=0.0,
            draft_s=0.1 * len(accepted),
            verify_s=0.2 * len(accepted),
            choose_s=0.03 * len(accepted),
            commit_s=0.04 * len(accepted),
        )
        return MethodResult(method, 0.0, 1.0, "p", settings, [answer], 0)

    answers = {
        "autoregressive@0": answered("autoregressive", baseline_seconds, [1] * 9, [1] * 10),
        "chain@0": answered("chain", seconds, [3] * 3, [1] * 10 if same else [2] * 10),
    }
    return QuestionRecord(run, 1, "math", 0.0, answers)


def records_of(methods: dict[str, float], temperatures: tuple[float, ...] = (0.0,)) -> list[QuestionRecord]:
    """Build two questions of each of four categories, of three tasks; `methods` has seconds, the baseline takes 2 s."""
    records = []
    for number in range(8):
        record = made_up(0, 1.0, 2.0)
        record.question_id, record.category = number, ("writing", "math", "translation", "rag")[number % 4]
        chain, plain = record.answers["chain@0"], record.answers["autoregressive@0"]
        record.answers = {}
        for temperature in temperatures:
            record.answers[f"autoregressive@{temperature:g}"] = replace(plain, temperature=temperature)
            for name, seconds in methods.items():
                taken = seconds * (1 + 0.1 * (number % 3))
                turns = [replace(turn, wall_time_s=taken) for turn in chain.turns]
                answer = replace(chain, method=name, temperature=temperature, turns=turns)
                record.answers[f"{name}@{temperature:g}"] = answer
        records.append(record)
    return records


def all_facts(methods: dict[str, float], temperatures: tuple[float, ...] = (0.0,)) -> dict[str, Any]:
    """Return the facts of a run with every section of the page."""
    records = records_of(methods, temperatures)
    summary = [row | {"target_change": None} for row in summarize(records)]
    history = [
        {"step": 10.0 * step, "loss": 3 / step, "loss_depth1": 2 / step, "loss_depth2": 3 / step,
         "accuracy_depth1": 0.1 * step, "accuracy_depth2": 0.05 * step}
        for step in range(1, 6)
    ]  # fmt: skip
    history.append(
        {"step": 50.0, "eval_loss": 1.0, "eval_accuracy_depth1": 0.5, "eval_accuracy_depth2": 0.25,
         "eval_tau_depth1": 1.5, "eval_tau_depth2": 1.62}
    )  # fmt: skip
    source = CardSource(read=120, kept=100, distilled=98, without_answer=2, duplicates=7, invalid={"not JSON": 3})
    lengths = {"total": 9000.0, "mean": 90.0, "median": 80.0, "95 %": 200.0, "longest": 300.0}
    recipe = Recipe.model_validate(
        {
            "name": "demo",
            "target": {"model": "/home/somebody/models/llama-tiny"},
            "eval": {
                "questions": "/home/somebody/questions.jsonl",
                "methods": [{"name": name, "drafter": "/home/somebody/runs/other/drafter"} for name in methods],
            },
        }
    )
    return facts(summary) | {
        "questions": len(records),
        "recipe": recipe,
        "records": records,
        "trained": {"other": TrainReport(steps=50, history=history, tokens=12345, wall_time_s=60.0, batch_size=4)},
        "data_card": DataCard(
            {"stdlib": source}, {"prompt": lengths, "answer": lengths}, {"engine": "transformers", "temperature": 0.0}
        ),
        "inputs_sha256": {"questions": "ab" * 32, "/home/somebody/runs/other/drafter": "cd" * 32},
        "command": "draftsmith run /home/somebody/runs/demo/recipe.yaml",
    }
