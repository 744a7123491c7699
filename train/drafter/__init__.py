"""Training of a drafter, from tokens to a folder.

Read `stage`, then `trainer`; `start` is another drafter's weights to begin with, `interrupt` Ctrl-C, `report` what
training did, `evaluation` what rows say that were kept out, `card` the model card, `parity` the proof that training and
decoding agree. May import `train.batches`, `train.features`, `train.processes` and `train.monitoring`.
"""
