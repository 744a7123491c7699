"""How the embedded target was made, and is made again by `make target`.

Read `run`, then `build`; `clock` ends the training on time, `card` measures what came out. May import `data.stdlib` and
`train.drafter`.
"""
