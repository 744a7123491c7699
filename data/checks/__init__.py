"""What can be wrong with the data, found before training: `draftsmith doctor` shows it.

Read `finding`, then `dataset` (a source, a folder of tokens) and `rows` (one row). May import all of `data` but `card`.
"""
