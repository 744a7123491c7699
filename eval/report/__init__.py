"""From records to figures, tables and the report.

Read `summary` (computes the figures), then `sentences` (describes them); `page` writes `report.html`.
May import `eval.bench` and the folders before it.
"""
