"""Our own kernels: in C++ for CPUs, in Triton for CUDA.

Read `cpu_library` (built once on a machine), `cpu_kernels` (single operations in models), `cpu_layers` (all decoder
layers in one call), `cuda_attention`, and `attention`, which chooses. May import the root package.
"""
