"""What a drafter is worth and what it takes: scripts that train, or read trainings, hours where others take minutes.

`data_scaling.py` asks how much data, `ideas.py` what each idea of the block drafters adds, `learning_curves.py` who
learns what how fast.
"""
