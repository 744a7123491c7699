"""The trainer and its entry scripts."""
