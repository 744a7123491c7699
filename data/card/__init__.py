"""The data card of a run, `data/README.md`: what went in, what was left out, and the lengths that training sees.

May import all of `data`.
"""
