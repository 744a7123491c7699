"""What commands leave in a run's folder for other commands, and read it back.

Read `measurement` (what the records were made with), then `proof`; `tuned_tree` and `drafter_card` are kept with the
drafter. May import `eval.report` and what is before it.
"""
