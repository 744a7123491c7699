"""What the command line runs.

`cli` has every command with its options, `stages` what several of them run; what one command finds out has a file of
its own (`evaluate`, `compare`, `doctor`, `tune`, `prove`). May import everything.
"""
