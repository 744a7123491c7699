"""The recipe: one YAML file that drives every stage.

Read `schema` (every key; those of `data.conversations` are in `conversations`, what sections share in `section`),
`loading` (a file, its overrides, and the recipe that another starts from), `run_folder` (where the stages write,
which process may write, and with which settings a folder was started). A shipped recipe is one more file here; what
several recipes share is a file of `base/`, which they extend.
Imports the root package (`core/`) and nothing else of draftsmith.
"""
