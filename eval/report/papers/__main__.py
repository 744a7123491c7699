"""`python -m draftsmith.eval.report.papers [docs [a run's eval/traced.json]]`: write `docs/paper.md` from its results.

With the second, the picture of an answer too: of the first question that was traced.
"""

import sys
from pathlib import Path

from draftsmith.eval.bench.traced import TracedAnswer, by_question
from draftsmith.eval.report.papers.page import ANSWER, PICTURES, write_page
from draftsmith.eval.report.papers.pictures import draw_answer
from draftsmith.recipes.run_folder import read_json

if __name__ == "__main__":
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    if len(sys.argv) > 2:
        traced = read_json(Path(sys.argv[2]), dict[str, list[TracedAnswer]], "measure the run again")
        print(draw_answer(by_question(traced["answers"])[0], docs / PICTURES / ANSWER))
    print(write_page(docs / "results", docs / "paper.md"))
