"""What the command line runs.

`cli` has every command with its options but those of `export_commands` (push, export, import), `options` and `console`
what all of them take and print with, `stages` what several of them run; what a command finds out has a file of its own
(`evaluate`, `compare`, `search`, `doctor`, `tune`, `prove`, `push`). May import everything.
"""
