"""What drafters are made of: the base class, those that several kinds begin with, and the parts that they share.

Read `drafter` (the base class and the options of all kinds), `draft_head` (what logits and losses are read off), then
`group_wise` (layers of the target's kind, masks); `registry` finds a kind by its name, and a trained drafter in a
folder or on the Hub. A kind of drafter is a file in `models/drafters/`, not here. May import `models.decoding`,
`models.groups` and `models.target`.
"""
