"""Token rows as batches: padded on the right (`collate`), or several conversations to a row (`packing`), as many for
every process (`even`); and those that are kept out (`heldout`).

May import `data` and `models`.
"""
