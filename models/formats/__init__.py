"""Layouts that other programs load: ours to theirs, theirs to ours, and what their loaders do.

Read `loader_rules` (what a loader asks for, as data), then `eagle3`, the richest of the layouts; every layout is one
file that knows names, shapes and config both ways. `served` says which kind of drafter goes where, how it is served
there, or why it cannot be; `export` writes a folder and checks it, `reading` makes a published one a drafter of ours;
`of_run` does both for a run. Tensors and configs only: no forward is written here. May import all of `models`.
"""
