"""Additive attention masks that every kernel can read as they are.

CUDA's memory-efficient and cuDNN attention load 16 bytes at a time: in half precision the rows of a mask must begin at
multiples of 8 elements. Masks with any number of columns are therefore views of wider ones.
"""

import torch
from torch import Tensor

ALIGNMENT = 8  # elements


def aligned(columns: int) -> int:
    """The next multiple of the alignment."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


def open_mask(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [..., R, S], which hide nothing, with rows that begin aligned."""
    return torch.zeros(*shape[:-1], aligned(shape[-1]), dtype=dtype, device=device)[..., : shape[-1]]
