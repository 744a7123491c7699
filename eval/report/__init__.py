"""From records to figures, tables, pictures and the report.

Read `summary` (every figure), then `report` (what is said of them); `charts` draws pictures, `page/` writes `report.md`
and `report.html`. May import `eval.bench` and what is before it.
"""
