"""Token rows become batches (`collate`), and some of them are kept out of training (`heldout`).

May import `data` and `models`.
"""
