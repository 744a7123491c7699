"""What the scripts of `benchmarks/` are made of: servers that are simulated, and the parts of `gpu.py`.

For the second read `shapes` (a random target of some size), `suite` (one guarded measurement after the other, each part
in a process of its own) and `timing`; then, in the order in which they run, `cuda_tests`, `peaks`, `attention`,
`training`, `step_bound`, `target_steps`, `drafting` with `launches`; `picture` draws what came out. No part imports
another, but for `drafting`, which counts launches.
"""
