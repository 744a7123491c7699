"""Write `docs/paper.md` from `docs/results/`: `cd docs && python -m generate.papers [../runs/NAME/eval/traced.json]`.

With a run's traced answers the picture of an answer is drawn too, of the first question that was traced.
"""

import sys
from pathlib import Path

from generate.papers.page import ANSWER, PICTURES, write_page
from generate.papers.pictures import draw_answer

from draftsmith.eval.bench.traced import TracedAnswer, by_question
from draftsmith.files import read_json

DOCS = Path(__file__).parents[2]

if __name__ == "__main__":
    if len(sys.argv) > 1:
        traced = read_json(Path(sys.argv[1]), dict[str, list[TracedAnswer]], "measure the run again")
        print(draw_answer(by_question(traced["answers"])[0], DOCS / PICTURES / ANSWER))
    print(write_page(DOCS / "results", DOCS / "paper.md"))
