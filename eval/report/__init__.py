"""From records to figures, tables, pictures and the report.

Read `summary`, then `report`; `baseline` says how good the baseline is, `theory` is Leviathan's section 3, shown
beside what was measured; `page/` writes `report.html`. May import `eval.bench` and what is before it.
"""
