"""The papers' tables and figures from measured results, beside what the papers have: one page, two kinds of picture.

Read `tables` (which figures stand in which table), `pictures`, then
`page`.
"""
