"""Training of a drafter, from tokens to a folder.

Read `stage`, then `trainer`; `interrupt` is Ctrl-C, `report` what training did, `card` the model card, `parity` the
proof that training and decoding agree. May import `train.batches` and `train.features`.
"""
