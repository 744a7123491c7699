"""Training of a drafter, from tokens to a folder.

Read `stage`, then `trainer`; `training_arguments` is the recipe's `train:` section, `start` another drafter's weights
to begin with, `checkpoints` what training goes on from, `interrupt` Ctrl-C, `trackers` what `train.report_to` needs
beside transformers' callbacks, `report` what training did, `card` the model card, `parity` the proof that training and
decoding agree. May import `train.batches`, `train.features` and `train.processes`.
"""
