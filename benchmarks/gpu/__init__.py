"""First look at a GPU: correctness and costs in about six minutes, see `__main__.py`."""
