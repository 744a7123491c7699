"""Training of a drafter, from tokens to a folder.

Read `stage`, then `trainer`; `rows` is what is trained on and what is kept out, `training_arguments` the recipe's
`train:` section, `start` another drafter's weights to begin with, `checkpoints` what training goes on from, `trackers`
what `train.report_to` needs beside transformers' callbacks, `report` what training did, `card` the model card, `parity`
the proof that training and decoding agree. May import `train.features` and `train.processes`.
"""
