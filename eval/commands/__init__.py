"""What the command line runs.

`cli` has every command with its options; a command of one call stands there, the longer ones have a file each. May
import everything.
"""
