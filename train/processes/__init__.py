"""Training in several processes: DDP, with the frozen target.

Read `launch` (checks of the launch), then `frozen_target`.
"""
