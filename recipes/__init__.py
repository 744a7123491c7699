"""The recipe: one YAML file that drives every stage."""
