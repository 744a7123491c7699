"""Decoding with drafts, and its honest measurement.

Read `trees` (what is drafted, how it is verified), `decoding` (the one loop), `methods` (ways of drafting), `bench`
(how it is measured), `report` (what is said of it), `artifacts` (what is stored of it in a run's folder), `serving`
(drafters in real engines); `commands` is what the command line runs. Imports all the others.
"""
