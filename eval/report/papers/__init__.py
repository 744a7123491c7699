"""The papers' tables and figures from measured results, beside what the papers have: one page, two kinds of picture.

Read `quoted.py` (a figure and the link to where it was measured), `parallel_spec.py` and `leviathan.py` (which figures
stand in which table), `pictures.py`, then `page.py`.
"""
