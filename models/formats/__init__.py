"""Layouts that other programs load: ours to theirs, theirs to ours, and what their loaders ask for.

Read `layout` (what a layout is made of) and `loader_rules` (what a loader asks for), then `eagle3`, the richest of the
layouts; `eagle`, `dflash`, `heads` (Medusa and Hydra) and `causal_lm` are the others. Each of these files knows names,
shapes and config both ways, what it cannot express, and its `EXPORTERS`. `exporting` says which kind of drafter goes
where and how it is served there, writes a folder and checks it; `importing` makes a published one a drafter of ours.
Tensors and configs only: no forward is written here. May import all of `models`.
"""
