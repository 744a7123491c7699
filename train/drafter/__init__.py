"""Training of a drafter, from tokens to a folder.

Read `stage`, then `trainer`. `rows` splits examples into training and held-out ones, `training_arguments` reads the
recipe's `train:` section, `optimizer` adds Muon to AdamW, `start` loads another drafter's weights (`drafter.init`),
`checkpoints` chooses the checkpoint to resume from, `shown` displays the progress, `report` summarises a training,
`model_card` writes the model card, `parity` proves that training and decoding agree. May import `train.features` and
`train.processes`.
"""
