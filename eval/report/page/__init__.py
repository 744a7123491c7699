"""Both forms of the report: `report.md`, and `report.html`, a single self-contained file.

Read `page` (their content, in order); `comparisons` (of methods) computes the values of sections.
May import `eval.report` and the folders before it.
"""
