"""From prompts to the tokens that drafters are trained on.

Read `sources` (reading conversations), `engines` (generating answers), `distill` (answering all conversations without
losing any), `tokens` (token ids and loss masks); `card` describes the resulting data; `embedded` holds the shipped
questions and conversations. Imports the root package, `recipes` and `models`, nothing of `train` or `eval`.
"""
