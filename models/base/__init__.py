"""Parts of drafters: the base class, base classes of several kinds, and shared parts.

Read `drafter` (the base class, whose `forward` is a training step) and `draft_vocab` (tokens and LM heads), then
`group_wise` (layers of the target's kind, masks); `options` and `config` are the keys of `drafter.options` and of
`config.json`; `registry` finds a kind by its name, and a trained drafter in a folder or on the Hub. A kind of drafter
is a file in `models/drafters/`, not here. May import `models.decoding`, `models.groups` and `models.target`.
"""
