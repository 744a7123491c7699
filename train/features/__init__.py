"""The target's hidden states that drafters read: from disk, written before training, or from servers during training.

`write` is the stage `draftsmith features`, `stored` reads and writes the files; `served` requests hidden states from
vLLM servers, and `serving` has the command that starts them. May import `train.processes`.
"""
