"""Token rows as batches: padded on the right (`collate`), or several conversations to a row (`packing`).

May import `data` and `models`.
"""
