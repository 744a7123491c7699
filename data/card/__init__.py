"""The data card of a run, `data/README.md`: sources, records left out, and lengths.

May import all of `data`.
"""
