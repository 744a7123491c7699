"""The commands of the command line.

`app` has the group of commands; `app` and `main` define the commands and their options; `console` prints, and writes
`--json`; `stages` runs stages that several commands share; `artifacts` reads and writes files that commands store for
each other. The longer commands have a separate file each (`init`, `evaluate`, `engine_bench` with `agreement`, `doctor`
with `data_checks`, `tune`, `prove`, `push`, `chat`, `demo`).
May import everything.
"""
