"""`python -m draftsmith.eval.report.papers [docs]`: write `docs/paper.md` from `docs/results/`."""

import sys
from pathlib import Path

from draftsmith.eval.report.papers.page import write_page

if __name__ == "__main__":
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    print(write_page(docs / "results", docs / "paper.md"))
