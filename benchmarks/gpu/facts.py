"""The machine: versions, bandwidth, matrix products, and the cost of a launch, a wait and a small copy."""

import importlib.metadata
import os
import platform
import shutil
from functools import partial
from typing import Any

import torch
from parts.shapes import SHAPES

from draftsmith.models.decoding.kv_cache import to_device
from gpu.step import Step, run_step

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "huggingface_hub", "accelerate", "datasets", "safetensors"),
    *("numpy", "pyarrow", "pydantic", "pytest", "pytest-xdist"),
)
LAUNCHES = 1000


def main(step: Step) -> None:
    step.add("versions", versions())
    step.add("host", {"cores": os.cpu_count(), "compiler": shutil.which("c++") or shutil.which("g++")})
    if step.on_gpu:
        step.add("device", device_facts(step.device))
    for measure in (copy, product, small_work):
        with step.part(measure.__name__):
            for key, value in measure(step).items():
                step.add(key, value)


def versions() -> dict[str, str | None]:
    """Return the versions of Python, CUDA and packages; None for a missing package."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def device_facts(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
    }


def copy(step: Step) -> dict[str, float]:
    """Measure the bandwidth of a large copy, which reads and writes, and of a sum, which only reads."""
    num_bytes = step.size(1 << 32, 1 << 24)
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=step.device)
    target = torch.empty_like(source)
    return {
        "copy_bytes_per_s": 2 * num_bytes / step.median_s(lambda: target.copy_(source), 9),
        "read_bytes_per_s": num_bytes / step.median_s(source.sum, 9),
    }


def product(step: Step) -> dict[str, float]:
    """Measure a large product in bf16, and the product of few rows with SmolLM2-135M's output head."""
    side = step.size(8192, 256)
    left, right = (torch.randn(side, side, device=step.device, dtype=torch.bfloat16) for _ in range(2))
    figures = {"bf16_flops_per_s": 2 * side**3 / step.median_s(lambda: left @ right, 10)}
    hidden_size, vocabulary = SHAPES["135m"][0], SHAPES["135m"][5]
    head = torch.randn(vocabulary, hidden_size, device=step.device, dtype=torch.bfloat16)
    for num_rows in (1, 8, 64):
        rows = torch.randn(num_rows, hidden_size, device=step.device, dtype=torch.bfloat16)
        figures[f"head_{num_rows}_rows_s"] = step.median_s(partial(torch.mm, rows, head.T), step.size(30, 1), 1)
    return figures


def small_work(step: Step) -> dict[str, float]:
    """Measure a launch, a launch with a wait, `.item()`, copies of small lists, and a kernel of a CUDA graph."""
    one, tokens = torch.zeros(1, device=step.device), [[1] * 8, [2] * 8]

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    figures = {
        "launch_s": step.median_s(launch_many, 5) / LAUNCHES,
        "launch_and_wait_s": step.median_s(lambda: one.add_(1), 200),
        "item_s": step.median_s(one.item, 200),
        "to_device_s": step.median_s(lambda: to_device(tokens, step.device), 200),
        "pageable_copy_s": step.median_s(lambda: torch.tensor(tokens, device=step.device), 200),
    }
    if step.on_gpu:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            launch_many()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            launch_many()
        figures["graph_kernel_s"] = step.median_s(graph.replay, 20) / LAUNCHES
    return figures


if __name__ == "__main__":
    run_step(main)
