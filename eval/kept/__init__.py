"""What commands leave in a run's folder for other commands, and read it back.

Read `measurement` (what the records were made with), then `proof`; `tuned_tree` and `drafter_card` are kept with the
drafter; `origins` are what other stages left, for the report. May import `eval.report` and what is before it.
"""
