"""Layouts that other programs load: ours to theirs, and theirs to ours.

Read `layout` (what a layout is made of), then `eagle`, the richest of the layouts; `dflash`, `heads` (Medusa and Hydra)
and `causal_lm` are the others. Each of these files knows names, shapes and config both ways, what it cannot express,
and its `EXPORTERS`. `exporting` says which kind of drafter goes where and how it is served there, writes a folder and
checks it; `importing` makes a published one a drafter of ours. Tensors and configs only: no forward is written here.
May import all of `models`.
"""
