"""Sentences of the report and of the terminal, and the terminal's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftsmith.eval.report.summary import (
    OVERALL,
    Row,
    best_row,
    by_temperature,
    drafted_rows,
    headline,
)
from draftsmith.eval.report.text import NOT_LOSSLESS, ends_in_brackets, identity, number, only_ties

EMBEDDED = "embedded"  # target.model of the model that ships

LENIENCE_WARNING = (
    f"Rows marked {NOT_LOSSLESS!r} were measured with lenience below 1 (arXiv 2211.17192, A.5): their answers do not "
    "have the target's distribution, and their speedup was bought with that."
)

SLOW_SHARE = 0.7  # below it the report warns that the speedup is partly due to a slow baseline
GIGABYTE = 1e9

WHY = (
    "A method is faster than the target alone if a round commits more tokens (tau, the target's own one included) "
    "than the target alone generates in the time that the round takes to draft and to check the draft"
)
EMBEDDED_MEANING = (
    "The embedded target has four million parameters, so that a draft costs about as much as a step: its figures show "
    "that everything works, not what your model will gain. In a model of 1B parameters and more a step waits for its "
    "weights: counted in bytes read, a parallel draft costs 0.05 to 0.3 of a step, and checking it "
    "little more than one"
)

FASTER, NO_GAIN, SLOWER, UNCLEAR = "faster", "no gain shown", "SLOWER", "too few questions"
# Classes of the page's style sheet.
TONES = {FASTER: "good", NO_GAIN: "even", SLOWER: "bad", UNCLEAR: "unknown"}


# ---- the verdicts at the top of the report ----


@dataclass(frozen=True)
class SpeedVerdict:
    """Judgement of the fastest method at one temperature.

    why: explanation by tau and costs; None without a round. row: the method's row of the summary, over all questions.
    """

    word: str
    sentence: str
    why: str | None
    row: Row

    @property
    def tone(self) -> str:
        return TONES[self.word]


def verdict_word(ends: list[float] | None) -> str:
    """Return the verdict in words for a 95 % interval of the speedup; None stands for too few questions."""
    if ends is None:
        return UNCLEAR
    if ends[0] > 1:
        return FASTER
    return SLOWER if ends[1] < 1 else NO_GAIN


def verdicts(summary: list[Row]) -> list[SpeedVerdict]:
    """Judge the fastest method at each temperature, lowest first; empty if only the baseline was measured."""
    return [_verdict(best_row(rows), len(rows)) for rows in by_temperature(drafted_rows(summary)).values()]


def _verdict(best: Row, count: int) -> SpeedVerdict:
    """Judge the fastest of `count` methods."""
    shown, tasks = headline(best), best.get("over_tasks")
    word = verdict_word(shown["speedup_interval"])
    name, times = best["method"], f"{shown['speedup_mean']:.2f} times the speed of the target alone"
    if tasks:
        times += f" in the mean over {tasks['tasks']} tasks"
    among = f", the fastest of {count} methods," if count > 1 else ""
    sentence = {
        FASTER: f"{name}{among} generates at {times}.",
        NO_GAIN: f"{name}{among} reaches {times}, but the interval includes 1: no gain is shown.",
        SLOWER: f"{name}{among} slows the target down, to {times}.",
        UNCLEAR: f"{name}{among} reached {times}, on too few questions{' of a task' * bool(tasks)} to say how surely.",
    }[word]
    why, costs = None, round_costs(best)
    if costs is not None:
        draft, check = costs
        why = (
            f"A round of {name} commits {shown['tau']:.2f} tokens and takes as long as {draft + check:.2f} steps of "
            f"the target alone: {draft:.2f} to draft, {check:.2f} to check the draft."
        )
    return SpeedVerdict(word, sentence, why, best)


def round_costs(row: Row) -> tuple[float, float] | None:
    """Return (time to draft, time to check the draft) of a round, in steps of the target alone; None without rounds."""
    if (timing := row["timing"]) is None:
        return None
    return timing["cost_ratio"], timing["t_verify_forward_s"] / timing["t_target_step_s"]


@dataclass(frozen=True)
class Lossless:
    """Judgement whether the answers equal the target's; tone: a class of the page's style sheet."""

    word: str
    tone: str
    sentence: str


def lossless(summary: list[Row], proof: dict[str, Any] | None, answers: int) -> Lossless:
    """Judge whether answers equal the target's; `answers` is the number per method, questions times runs."""
    rows = drafted_rows(summary)
    greedy = [row for row in rows if row["greedy_identical"] is not None]
    wrong = [row["method"] for row in greedy if not row["greedy_identical"] and not only_ties(row)]
    whose = "the changed target's" if any(row.get("target_change") for row in rows) else "the target's"
    if wrong:
        names = ", ".join(wrong)
        return Lossless("NOT LOSSLESS", "bad", f"Greedy answers of {names} differ from {whose}.")
    if proof is not None and not proof["holds"]:
        return Lossless("NOT PROVED", "bad", "`draftsmith prove` found answers that are not the target's.")
    if not greedy:
        if proof is not None:
            return Lossless("Lossless", "good", "Proved on greedy and on sampled answers.")
        return Lossless(
            "Lossless by construction",
            "unknown",
            "Sampled answers cannot be compared one by one; `draftsmith prove` tests their distribution.",
        )
    total, parted = answers * len(greedy), sum(row["different_answers"] for row in greedy)
    if parted:
        sentence = (
            f"{total - parted:,} of {total:,} greedy answers are {whose}, token for token. The other {parted} differ "
            "first where the two best tokens are equally likely within rounding; none differs otherwise."
        )
        return Lossless("Lossless, but for rounding", "good", sentence)
    return Lossless("Lossless", "good", f"All {total:,} greedy answers are {whose}, token for token.")


def baseline_sentences(baseline: list[Row]) -> list[str]:
    """Describe for each temperature how fast the baseline is, and what a slow one means for the speedup."""
    sentences = []
    for row in baseline:
        begins = f"At T = {row['temperature']:g} the" if len(baseline) > 1 else "The"
        speeds = (row[key] / GIGABYTE for key in ("step_bytes_per_s", "read_bytes_per_s"))
        step, read = (f"{speed:.1f}" if speed >= 1 else f"{speed:.3f}" for speed in speeds)
        sentence = f"{begins} baseline's step reads {step} of {read} GB/s ({100 * row['share']:.0f} %)."
        if row["share"] < SLOW_SHARE:
            sentence += (
                " Part of any speedup here is due to a slow baseline: compared with a step at the speed of a plain "
                "read the speedup would be smaller."
            )
        sentences.append(sentence)
    return sentences


# ---- other sentences, and the terminal's table ----


def proof_sentence(proof: dict[str, Any] | None) -> str | None:
    """Describe the result of `draftsmith prove` in one sentence, from its JSON; None without one."""
    if proof is None:
        return None
    greedy, sampled = proof["greedy"], proof["distribution"]
    left_out = proof.get("left_out", [])
    different = sum(len(row["divergences"]) for row in greedy)
    ties = sum(row["ties"] for row in greedy)
    lowest = min((row["p_value"] for row in sampled), default=1.0)
    impossible = sum(row["impossible"] for row in sampled)
    return (
        f"{'Proved' if proof['holds'] else 'NOT PROVED'}: {sum(row['tokens'] for row in greedy)} greedy tokens of "
        f"{len(greedy)} method(s), {different} different answer(s), of which {ties} at a numerical tie; "
        f"{sum(row['tokens'] for row in sampled)} sampled tokens, {impossible} impossible, smallest p-value "
        f"{lowest:.3f} (a test fails below {proof['significance']:.0e}); verifier by enumeration: error "
        f"{proof['enumeration_error']:.0e}." + (f" Not lossless, left out: {', '.join(left_out)}." if left_out else "")
    )


def result_table(summary: list[Row]) -> tuple[str, tuple[str, ...], list[list[str]]]:
    """Return title, headings and cells of the terminal's table, with one line per method, the fastest first.

    The baseline is left out, unless nothing else was measured.
    """
    rows = drafted_rows(summary) or [row for row in summary if row["category"] == OVERALL]
    over_tasks = next((row for row in rows if row.get("over_tasks")), None)
    over = "all questions" if over_tasks is None else f"mean over {tasks_and_questions(over_tasks)}"
    cells = []
    for row in sorted(rows, key=lambda row: (row["temperature"], -headline(row)["speedup_mean"])):
        shown, costs = headline(row), round_costs(row)
        name = f"{row['method']} T={row['temperature']:g}" if len(by_temperature(summary)) > 1 else row["method"]
        cells.append(
            [
                name if row["lossless"] else f"{name} ({NOT_LOSSLESS})",
                f"{shown['speedup_mean']:.2f}x{ends_in_brackets(shown['speedup_interval'])}",
                verdict_word(shown["speedup_interval"]),
                number(shown["tau"]),
                "-" if costs is None else f"{sum(costs):.2f}: {costs[0]:.2f} + {costs[1]:.2f}",
                identity(row),
            ]
        )
    headings = ("method", "speedup (95 %)", "", "tokens\na round", "steps a round:\ndraft + check", "same\ngreedy")
    return f"speedup over the target alone, {over}", headings, cells


def tasks_and_questions(row: Row) -> str:
    """List in words the tasks over which a row's mean is taken, with their numbers of questions."""
    counts = row["over_tasks"]["questions"]
    if len(set(counts.values())) == 1:
        number = next(iter(counts.values()))
        return f"{len(counts)} tasks ({number} question{'s' * (number > 1)} each: {', '.join(counts)})"
    listed = ", ".join(f"{task} {count}" for task, count in counts.items())
    return f"{len(counts)} tasks (questions: {listed})"
