"""The drafters, one file a kind; the file's name is `drafter.kind` in a recipe.

Begin with `parallel` (ParallelSpec). A new one is one more file here with an attribute `DRAFTER`, and a recipe; tests
hold it to the invariants by its existence. May import all of `models`.
"""
