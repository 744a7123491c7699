"""Both forms of the report: `report.md`, and `report.html`, one file without any other, for people to forward.

Read `page` (what is on them, in order); `methods` and `curves` have the facts of sections, by subject. May
import `eval.report` and what is before it.
"""
