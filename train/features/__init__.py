"""What drafters read of the target, written to disk before training, or given by servers of the target during it.

`write` is the stage, `cache` the format and what the trainer reads; `served` reads from servers, whose command is in
`serving`, and `kept` writes what they give. May import `train.processes`.
"""
