"""How the command line speaks with people and with programs.

`options` are the options of all commands (`--json`, `--quiet`), `output` what they decide: what is written where;
`console` is what tables and sentences are printed with; `arguments` what every command with one recipe takes.
"""
