"""Both forms of the report: `report.md`, and `report.html`, a single self-contained file.

Read `page` (writes both, section by section), then `comparisons` (computes the values of sections). May import
`eval.report` and the folders before it.
"""
