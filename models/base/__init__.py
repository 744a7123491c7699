"""What drafters are made of: the base class, those that several kinds begin with, and the parts that they share.

Read `drafter`, then `draft_vocabulary` (which LM head, and which of its rows), then `group_wise` (layers of the
target's kind) with `masks` (and their `markov_head`), or `heads`; `options` has the types of their options, `registry`
finds a kind by its name, `published` a drafter on the Hub.
A kind of drafter is a file in `models/drafters/`, not here. May import `models.decoding`, `models.groups` and
`models.target`.
"""
