"""What the scripts of `benchmarks/` are made of: servers that are simulated, llama.cpp's, and the parts of `gpu.py`.

For the last read `shapes` (a random target of some size), `suite` (one guarded measurement after the other, each part
in a process of its own) and `timing`; then, in the order in which they run, `peaks`, `cuda_tests`, `attention`,
`target_steps`, `training`, `drafting`, `step_bound`; `launches` counts for the last two, `picture` draws what came out.
"""
