"""The target, the drafters and their attention."""
