"""The recipe: one YAML file that drives every stage.

Read `schema` (every key), `loading` (a file, its overrides, and the recipe that another starts from), `run_folder`
(where the stages write and on what machine, who may, and what a folder was begun with), `results` (measured
figures), `errors` (what users are told), `hub` (what the Hub refuses). A shipped recipe is one more file here; what
several of them share is a file of `base/`, which they extend.
Imports nothing else of draftsmith.
"""
