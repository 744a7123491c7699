"""From records to figures, tables and the report.

Read `summary` (every figure), then `sentences` (about them); `page/` writes `report.md` and
`report.html`. May import `eval.bench` and the folders before it.
"""
