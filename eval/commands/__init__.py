"""What the command line runs.

`cli` has every command with its options, `console` what all of them print and tell with, `stages` what several of them
run, `artifacts` what they store for one another; what a command finds out has a file of its own (`evaluate`,
`in_engine`, `compare`, `doctor`, `tune`, `prove`, `push`). May import everything.
"""
