"""What the scripts share: `shapes.py` makes random targets and drafters, `timing.py` measures seconds, bytes and
launches, `suite.py` notes down what fails. `decoding.py` and `training.py` are the parts of `gpu.py`, `llamacpp.py` is
one side of `against_others.py`."""
