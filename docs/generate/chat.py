"""The moving picture at the top of the README: an answer of `draftsmith serve` as it came, accepted drafts in colour.

    python -m generate.chat     # in docs/: asks the model of the demo, on a machine with nothing else to do
    make reference              # writes docs/pictures/chat-{light,dark}.svg, from docs/results/smollm2/chat.json

Each piece appears when it came. Where nothing moves (print, a preview) all of it is there.
"""

import json
import queue
import time
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
RESULT = DOCS / "results" / "smollm2" / "chat.json"
QUESTION = (
    "A baker sells 18 loaves in the morning and twice as many in the afternoon, at $3 each. How much does he earn?"
)
NEW_TOKENS = 110
COLUMNS, CHAR, LINE, MARGIN = 84, 8.43, 21, 20
PAUSE_S = 3.0  # after the answer, before it begins again
COLOURS = {
    "light": {"ground": "#ffffff", "text": "#1f2328", "faint": "#59636e", "drafted": "#1a7f37", "line": "#d1d9e0"},
    "dark": {"ground": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "drafted": "#3fb950", "line": "#3d444d"},
}


def record() -> dict[str, Any]:
    """Generate an answer and record its pieces: text, its drafted part, seconds since the question."""
    from draftsmith.data.sources.conversation import Turn
    from draftsmith.data.tokens.chat_tokens import prompt_token_ids
    from draftsmith.eval.commands.artifacts import with_tuned_trees
    from draftsmith.eval.commands.demo import shipped_recipe
    from draftsmith.eval.decoding.generate import AnswerRecord
    from draftsmith.eval.serving.worker import CompletedAnswer, Job, Worker
    from draftsmith.models.sampling import Sampling

    worker = Worker(with_tuned_trees(shipped_recipe()), 1)
    prompt_ids = prompt_token_ids(worker.tokenizer, [Turn("user", QUESTION)])

    def ask() -> tuple[list[list[Any]], AnswerRecord]:
        out: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        begin_s, pieces = time.perf_counter(), []
        job = Job(prompt_ids, NEW_TOKENS, Sampling(), 0, (), lambda piece: out.put((time.perf_counter(), piece)))
        worker.submit(job)
        while not isinstance((came := out.get())[1], CompletedAnswer):
            at_s, piece = came
            if piece.text:
                pieces.append([piece.text, len(piece.drafted), round(at_s - begin_s, 4)])
        return pieces, came[1].record

    pieces, answer = worker.answer(lambda: (ask(), ask())[1])  # the first to warm up
    decoded = len(answer.ids) - 1
    return {
        "question": QUESTION,
        "pieces": pieces,
        "tokens": len(answer.ids),
        "tau": decoded / answer.rounds,
        "tokens_per_s": decoded / sum(answer.round_s),
    }


def split_runs(pieces: list[list[Any]]) -> list[tuple[int, int, str, bool, float]]:
    """Break the text into lines at words. Returns runs (line, column, text, whether it was drafted, seconds)."""
    letters = []  # each with its piece
    for text, drafted, at_s in pieces:
        letters += [(letter, place < drafted, at_s) for place, letter in enumerate(text)]
    whole = "".join(letter for letter, _, _ in letters).rstrip()
    starts, begin = [], 0  # of the lines
    while begin < len(whole):
        cut = whole.find("\n", begin, begin + COLUMNS + 1)
        if cut < 0 and len(whole) - begin > COLUMNS:
            cut = whole.rfind(" ", begin, begin + COLUMNS + 1)
        end = len(whole) if cut < 0 else cut
        starts.append((begin, end))
        begin = end + 1
    runs: list[tuple[int, int, str, bool, float]] = []
    for number, (begin, end) in enumerate(starts):
        for place in range(begin, end):
            letter, drafted, at_s = letters[place]
            if runs and runs[-1][0] == number and runs[-1][3:] == (drafted, at_s):
                runs[-1] = (*runs[-1][:2], runs[-1][2] + letter, drafted, at_s)
            else:
                runs.append((number, place - begin, letter, drafted, at_s))
    return runs


def draw(figures: dict[str, Any], colours: dict[str, str]) -> str:
    """Return the SVG of one question and its answer."""
    question_runs = split_runs([[figures["question"], 0, 0.0]])
    runs = split_runs(figures["pieces"])
    first = question_runs[-1][0] + 2
    last = first + max(run[0] for run in runs)
    width, height = round(2 * MARGIN + COLUMNS * CHAR), 2 * MARGIN + (last + 3) * LINE
    whole_s = figures["pieces"][-1][2] + PAUSE_S
    caption = f"{figures['tokens_per_s']:.0f} tokens/s, {figures['tau']:.2f} tokens a round; in colour: accepted drafts"

    def text(line: int, column: int, words: str, colour: str, inner: str = "") -> str:
        x, y = MARGIN + column * CHAR, MARGIN + (line + 1) * LINE - 6
        return (
            f'<text x="{x:.1f}" y="{y}" fill="{colour}" textLength="{len(words) * CHAR:.1f}" '
            f'xml:space="preserve">{escape(words)}{inner}</text>'
        )

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
        f"<title>{escape('draftsmith, SmolLM2-135M-Instruct on two cores: ' + caption)}</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{colours["ground"]}" '
        f'stroke="{colours["line"]}"/>',
        '<rect width="0" height="0"><animate id="all" attributeName="x" from="0" to="0" '
        f'dur="{whole_s:.2f}s" begin="0s;all.end"/></rect>',
    ]
    lines += [text(line, column, words, colours["faint"]) for line, column, words, _, _ in question_runs]
    for line, column, words, drafted, at_s in runs:
        hidden = f'<set attributeName="visibility" to="hidden" begin="all.begin" dur="{at_s:.2f}s"/>'
        lines.append(text(first + line, column, words, colours["drafted" if drafted else "text"], hidden))
    return "\n".join([*lines, text(last + 2, 0, caption, colours["faint"]), "</svg>", ""])


def pictures() -> dict[Path, str]:
    """Return the content of each picture by its file."""
    figures = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]
    return {DOCS / "pictures" / f"chat-{name}.svg": draw(figures, colours) for name, colours in COLOURS.items()}


if __name__ == "__main__":
    from draftsmith.results import write_result

    write_result(RESULT, record())
