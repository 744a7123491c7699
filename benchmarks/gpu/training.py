"""A training step of `parallel` at SmolLM2-135M's shape in bf16, alone: tokens/s, and its parts' seconds."""

import torch
import training_step
from parts.shapes import random_target

from draftsmith.models.cpu_kernels import use_grouped_sdpa
from draftsmith.models.cuda_attention import without_cudnn_attention
from gpu.step import Step, run_step

NUM_MASKS = 4


def main(step: Step) -> None:
    training_step.DEVICE = step.device
    torch.manual_seed(0)
    target = random_target(step.size("135m", "embedded"), step.device, "bfloat16")
    use_grouped_sdpa(target)
    length, turns = step.size(2048, 64), step.size(7, 1)
    with without_cudnn_attention():
        step.add("folded", training_step.step_beside_its_parts(target, "folded", length, NUM_MASKS, turns))


if __name__ == "__main__":
    run_step(main)
