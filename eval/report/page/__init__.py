"""Both forms of the report: `report.md`, and `report.html`, one file without any other, for people to forward.

Read `forms` (what writes them), `page` (what is on the page, in order), then `verdict` (what it says first). Every
other file is one section's facts, worked out before a template sees them; `plot` is where figures become places in a
picture. May import `eval.report` and what is before it.
"""
