"""Our own kernels: in C++ for CPUs, in Triton for CUDA.

Read `cpu_library` (built once on a machine), `cpu_kernels` (single operations in models) and `cpu_layers` (all decoder
layers in one call); `cuda_attention` is separate. May import the root package.
"""
