"""Tables of the papers' page (`docs/paper.md`), made from measured results.

Read `tables` (which figures stand in which table), then `page`.
"""
