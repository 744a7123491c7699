"""Token rows as batches: padded on the right (`collate`), or several conversations to a row (`packing`); and
those that are kept out (`heldout`).

May import `data` and `models`.
"""
