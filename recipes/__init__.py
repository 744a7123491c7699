"""The recipe: one YAML file that drives every stage.

Read `schema` (every key), `loading` (a file and its overrides), `run_folder` (where the stages write), `settings` (what
a folder was begun with), `first_stage` (the recipe that another starts from), `cache` (where lies what is fetched
once), `results` (measured figures, with the `machine`), `hub` (what the Hub refuses). A shipped recipe is one more file
here. Imports nothing else of draftsmith.
"""
