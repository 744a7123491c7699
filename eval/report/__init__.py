"""From records to figures, tables, pictures and the report.

Read `summary` (every figure), then `report` (the sentences about them); `charts` draws pictures, `page/` writes
`report.md` and `report.html`. May import `eval.bench` and the folders before it.
"""
