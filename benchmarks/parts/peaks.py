"""What the device can do at most: products of large matrices, and reading memory."""

import torch

from draftsmith.train.plan.plan import matmul_flops_per_s
from parts.suite import Suite
from parts.timing import in_turns

COPIED_BYTES = {"cuda": 4 << 30, "cpu": 1 << 26}


def run(suite: Suite) -> None:
    dtypes = [torch.bfloat16, torch.float32] if suite.device.type == "cuda" else [torch.float32]
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        suite.measure(f"matmul_{name}_flops_per_s", matmul_flops_per_s, suite.device, dtype)
    suite.measure("memory_bytes_per_s", memory_bytes_per_s, suite.device)


def memory_bytes_per_s(device: torch.device) -> float:
    """Of a copy: each byte is read and written."""
    source = torch.zeros(COPIED_BYTES[device.type] // 2, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    best_s = min(in_turns({"copy": lambda: copy.copy_(source)}, device, 10)["copy"])
    return 2 * len(source) / best_s
