"""From prompts to the tokens that drafters are trained on.

Read `sources` (what comes in), `engines` (who answers), `distill` (how every answer is got and none is lost), `tokens`
(ids and loss masks); `card` tells what went into the result; `embedded` holds what ships of both.
Imports `recipes` and nothing else of draftsmith.
"""
