"""What the command line runs.

`cli` has every command with its options, `stages` what several of them run; what a command finds out has a file of its
own (`evaluate`, `compare`, `search`, `doctor`, `tune`, `prove`), and so has what leaves the house (`push`). What stays
of it lies beside: `measurement` says what records were made with, `tuned_tree`, `proof` and `drafter_card` what tune,
prove and the model card keep. May import everything.
"""
