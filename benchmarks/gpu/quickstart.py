"""The quickstart's drafter on the embedded target, measured as `draftsmith eval` does: answers and tau.

In fp32 the answers and every tau must be a CPU's, without and with CUDA graphs; a second process makes them on this
machine's CPU. In bf16 a method's answers may differ from the baseline's at numerical ties only, which are counted. The
drafter is that of a finished `make quickstart`, or is trained here for a few steps, on the conversations' own answers.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from draftsmith.cli.stages import run_distill
from draftsmith.data.sources.questions import load_questions
from draftsmith.eval.bench.divergence import find_divergences
from draftsmith.eval.bench.measured_methods import load_models, measured_methods
from draftsmith.eval.bench.records import QuestionRecord, RecordLog
from draftsmith.eval.bench.spec_bench import SpecBench
from draftsmith.recipes.loading import load_recipe
from draftsmith.recipes.run_folder import TRAINING_FILE, RunFolder
from draftsmith.recipes.schema import Recipe
from draftsmith.train.drafter.stage import train_drafter
from gpu.step import Step, run_step

CPU_STEP = "quickstart_cpu"  # the process with the expected answers


def main(step: Step) -> None:
    if step.name == CPU_STEP:
        measure(step, "cpu", "float32", Path(str(step.part_name)), device="cpu")
        return
    drafter = trained_drafter(step)
    step.add("drafter", str(drafter))
    with expected_answers(step, drafter) as process:
        with step.part("fp32"):
            measured = measure(step, "fp32", "float32", drafter)
            process.wait(timeout=max(1.0, step.left_s))
            expected = {record.question_id: record for record in RecordLog(records_file(step, "cpu"))}
            step.add("fp32", compared(measured, expected))
        with step.part("bf16"):
            step.add("bf16", compared(measure(step, "bf16", "bfloat16", drafter)))
        if step.on_gpu and step.has_time("fp32, compiled", 40):
            with step.part("fp32, compiled"):
                measured = measure(step, "compiled", "float32", drafter, is_compiled=True)
                step.add("fp32, compiled", compared(measured, expected))
        process.kill()  # if it is late


def recipe_for(step: Step, name: str, *overrides: str) -> Recipe:
    """Return the quickstart's recipe with a run in the folder of results."""
    sizes = step.size([], ["eval.limit_per_category=1", "eval.max_new_tokens=16"])
    where = [f"runs_dir={step.folder / 'runs'}", f"name={name}", f"target.device={step.device}"]
    return load_recipe("quickstart", [*where, *sizes, *overrides])


def trained_drafter(step: Step) -> Path:
    """Return the folder of the quickstart's drafter; train one if `make quickstart` has not."""
    finished = RunFolder(load_recipe("quickstart")).drafter
    if (finished / TRAINING_FILE).is_file():
        return finished.absolute()
    conversations, steps = step.size((800, 200), (24, 4))
    limits = [f"data.conversations.limit={conversations}", f"train.max_steps={steps}", "train.warmup_steps=2"]
    recipe = recipe_for(step, "quickstart", "data.distill.engine=none", "train.save_strategy='no'", *limits)
    run_distill(recipe)
    report = train_drafter(recipe)
    step.add("training", {"steps": report.steps, "tokens": report.tokens, "wall_time_s": report.wall_time_s})
    return RunFolder(recipe).drafter.absolute()


def expected_answers(step: Step, drafter: Path) -> subprocess.Popen[bytes]:
    """Start the measurement on this machine's CPU, in fp32, with torch's own operations."""
    records_file(step, "cpu").unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpu.quickstart", CPU_STEP, str(drafter), "--device", str(step.device)]
    # Without a compiler there are no CPU kernels to build, which would take half a minute.
    return subprocess.Popen([*command, "--out", str(step.folder)], env={**os.environ, "CXX": "/nonexistent"})


def records_file(step: Step, name: str) -> Path:
    return step.folder / f"quickstart_{name}.jsonl"


def measure(
    step: Step, name: str, dtype: str, drafter: Path, is_compiled: bool = False, device: str | None = None
) -> tuple[list[QuestionRecord], int]:
    """Answer all questions with all methods.

    Returns:
        The records, and the number of answers that differ from the baseline's at a numerical tie.
    """
    overrides = [f"target.dtype={dtype}", f"eval.compile={str(is_compiled).lower()}"]
    overrides += [f"target.device={device or step.device}"]
    recipe = recipe_for(step, f"quickstart-{name}", *overrides)
    for method in recipe.eval.methods:
        method.drafter = str(drafter)
    questions = load_questions(recipe.eval.question_sets, recipe.eval.limit_per_category)
    target, tokenizer, drafters = load_models(recipe)
    bench = SpecBench(target, tokenizer, questions, recipe.eval.max_new_tokens, recipe.seed, (), is_compiled)
    arms = measured_methods(recipe, drafters, target, tokenizer, bench.session.max_length_tokens)
    file = records_file(step, name)
    file.unlink(missing_ok=True)
    log = RecordLog(file)
    bench.run(arms, log, runs=1, warmup_questions=1)
    records = list(log)
    ties = sum(each.is_tie for each in find_divergences(bench, records, []))
    bench.session.close()
    return records, ties


def compared(
    measured: tuple[list[QuestionRecord], int], expected: dict[int | str, QuestionRecord] | None = None
) -> dict[str, Any]:
    """Return for every method the number of answers, of those equal to the baseline's and to the CPU's, tau and speed.

    Args:
        expected: Records of the CPU by question id.
    """
    records, ties = measured
    rows: dict[str, Any] = {}
    for key in records[0].answers:
        turns = [turn for record in records for turn in record.answers[key].turns]
        baseline = [turn for record in records for turn in record.with_baseline(key)[1].turns]
        row: dict[str, Any] = {
            "answers": len(turns),
            "as_baseline": sum(one.ids == other.ids for one, other in zip(turns, baseline, strict=True)),
            "tau": tau(turns),
            "tokens_per_s": sum(len(turn.ids) for turn in turns) / sum(turn.wall_time_s for turn in turns),
        }
        if expected is not None:
            others = [turn for record in records for turn in expected[record.question_id].answers[key].turns]
            row["as_on_cpu"] = sum(one.ids == other.ids for one, other in zip(turns, others, strict=True))
            row["is_as_on_cpu"] = row["as_on_cpu"] == row["answers"]
            row["cpu_tau"] = tau(others)
        rows[key] = row
    different = sum(row["answers"] - row["as_baseline"] for row in rows.values())
    return {"methods": rows, "different": different, "ties": ties}


def tau(turns: list[Any]) -> float:
    """Return tokens per round."""
    return sum(sum(turn.accept_lengths) for turn in turns) / max(1, sum(turn.rounds for turn in turns))


if __name__ == "__main__":
    run_step(main)
