"""Training of a drafter, from tokens to a folder.

Read `stage`, then `trainer`; `interrupt` is Ctrl-C, `parity` the proof that training and decoding agree, `card` the
model card. May import `train.batches` and `train.features`.
"""
