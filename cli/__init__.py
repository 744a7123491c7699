"""The commands of the command line.

`app` is the group of commands, `app` and `main` define these with their options, `console` prints and writes `--json`,
`stages` runs stages that several commands share, `artifacts` reads and writes the files that commands store for one
another. The longer commands have a separate file each (`init`, `evaluate`, `engine_bench` with `agreement`, `doctor`
with `data_checks`, `tune`, `prove`, `push`; `chat` and `demo` in the terminal).
May import everything.
"""
