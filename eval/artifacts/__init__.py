"""What commands store in a run's folder, and how other commands read it back.

Read `measurement` (what the records were made with, and where it comes from), then `proof`; `drafter` has what is
stored with a drafter. May import `eval.report` and what is before it.
"""
