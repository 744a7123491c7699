"""Write `docs/paper.md` from `docs/results/`: `cd docs && python -m generate.papers`."""

from pathlib import Path

from generate.papers.page import write_page

DOCS = Path(__file__).parents[2]

if __name__ == "__main__":
    print(write_page(DOCS / "results", DOCS / "paper.md"))
