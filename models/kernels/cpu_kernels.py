"""How models use the operations of `cpu_kernels.cpp`: attention, frozen linear layers and norms, and choices of tokens.

Without the operations (`cpu_library.py`) all of it runs on torch's own.
"""

import heapq
import itertools
import math

import torch
from torch import Tensor, nn

from draftsmith.models.kernels.cpu_library import has_kernels, vector_lanes

DTYPES = (torch.float32, torch.bfloat16)
MOST_VECTORS = 16  # of a head; MOST_PARTS in the source
MOST_PACKED_ROWS = 512  # rows of one product; with more of them torch's own kernel is as fast
MOST_ROWS = 64  # rows of one attention; with more of them, as in a prompt, torch's own kernel is as fast


def can_attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True if our kernel supports query [B, H, R, D], with an additive mask [1, 1, R, S] or None for one row.

    Keys and values must have the query's dtype and head size (DeepSeek's values, for one, have another), and be
    contiguous in the latter.
    """
    batch, _, rows, head_size = query.shape
    return (
        batch == 1
        and query.device.type == "cpu"
        and query.dtype in DTYPES
        and query.stride(3) == 1
        and all(
            part.dtype == query.dtype and part.shape[3] == head_size and part.stride(3) == 1 for part in (key, value)
        )
        and (
            rows == 1 if mask is None else rows <= MOST_ROWS and mask.dtype == query.dtype and mask.shape[:2] == (1, 1)
        )
        and not torch.is_grad_enabled()
        and has_kernels()
        and head_size % vector_lanes() == 0
        and head_size <= MOST_VECTORS * vector_lanes()
    )


class PackedLinear(nn.Linear):
    """A frozen linear layer with a second, packed copy of its weight; a plain one where the copy cannot be used.

    For a few rows torch reads a weight at a third to a half of the memory's speed, and `cpu_kernels.cpp` reads a packed
    copy at full speed: all rows of a draft tree cost as much as one, until arithmetic takes longer than reading.
    The copy takes memory: `packable_bytes`.

    `pack_linears` changes a layer's class in place, so that drafters that borrow the layer use the packed one.
    """

    packed: Tensor | None = None
    packed_bias: Tensor | None = None  # in fp32
    _packed_of: tuple[object, ...] = ()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name
        trains = torch.is_grad_enabled() and (input.requires_grad or _trains(self))
        rows = input.numel() // self.in_features
        if trains or input.dtype != self.weight.dtype or rows > MOST_PACKED_ROWS or not _can_be_packed(self):
            return super().forward(input)
        if not torch.compiler.is_compiling():  # compiled code was called before
            self.pack()
        return torch.ops.draftsmith.linear(input, self.packed, self.out_features, self.packed_bias)

    def pack(self) -> None:
        """Pack the weight again if it was changed in place (by merging an adapter, for one) or replaced."""
        weight, bias = self.weight, self.bias
        of = (weight.data_ptr(), weight._version, weight.dtype, bias is not None and (bias.data_ptr(), bias._version))
        if self._packed_of != of:
            self.packed, self._packed_of = torch.ops.draftsmith.pack(weight.detach()), of
            self.packed_bias = None if bias is None else bias.detach().float()


class FastNorm(nn.RMSNorm):
    """A frozen norm that runs few rows in one operation; torch's takes 60 us for a row. See `pack_linears`."""

    def forward(self, x: Tensor) -> Tensor:
        trains = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        if trains or x.dtype != self.weight.dtype or x.numel() > MOST_PACKED_ROWS * self.weight.numel():
            return super().forward(x)
        return torch.ops.draftsmith.norm(x, self.weight, self.eps, False)


def _is_read_here(logits: Tensor) -> bool:
    """Return True if the operations on fp32 logits [R, V] can read these."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1 and has_kernels()


def most_likely(logits: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Return the `count` most likely columns of each row of logits [R, V], and their log probabilities, as lists.

    A row of fewer than `count` columns gives all of them.
    """
    count = min(count, logits.shape[-1])
    if _is_read_here(logits):
        columns, log_q = torch.ops.draftsmith.most_likely(logits, count).tolist()
    else:
        top = logits.topk(count, dim=-1)
        # Columns are exact in double precision: one copy for both.
        if logits.device.type == "cuda":  # two kernels; `logsumexp` is eight
            log_q = logits.log_softmax(-1).gather(-1, top.indices)
        else:
            log_q = top.values - logits.logsumexp(-1, keepdim=True)
        columns, log_q = torch.stack([top.indices.double(), log_q.double()]).tolist()
    return [[int(column) for column in row] for row in columns], log_q


def best_first(logits: Tensor, branch: int, nodes: int) -> tuple[list[int], list[int], list[float]]:
    """Return the `nodes` most likely paths of tokens from logits [G, V] of G depths, found in order with a heap.

    A path is at most as likely as its parent path and as the one with the better rank in its last place, so that the
    next one is the best candidate; it adds its next sibling and its first child to these.

    Args:
        branch: Number of the most likely tokens of a depth that paths are made of.

    Returns:
        Of the paths' last nodes: columns, parents (0 is the root), and the log probabilities of the paths.
    """
    branch = min(branch, logits.shape[-1])
    if _is_read_here(logits):
        return torch.ops.draftsmith.best_first(logits, branch, nodes)
    candidates, log_q = most_likely(logits, branch)
    columns, parents, log_confidence = list[int](), list[int](), list[float]()
    # Entries: (-log probability of the path, order of arrival, parent node, depth from 0, rank).
    heap = [(-log_q[0][0], 0, 0, 0, 0)]
    arrivals = itertools.count(1)
    while heap and len(columns) < nodes:
        cost, _, parent, depth, rank = heapq.heappop(heap)
        columns.append(candidates[depth][rank])
        parents.append(parent)
        log_confidence.append(-cost)
        # A drafter may leave tokens without any probability.
        if rank + 1 < branch and log_q[depth][rank + 1] > -math.inf:
            sibling_cost = cost + log_q[depth][rank] - log_q[depth][rank + 1]
            heapq.heappush(heap, (sibling_cost, next(arrivals), parent, depth, rank + 1))
        if depth + 1 < len(log_q):
            heapq.heappush(heap, (cost - log_q[depth + 1][0], next(arrivals), len(columns), depth + 1, 0))
    return columns, parents, log_confidence


def largest(logits: Tensor) -> Tensor:
    """Return the first argmax of logits [..., V]. On a CPU `max` takes half of `argmax`'s time, in bf16 a fifth."""
    known = logits.device.type == "cpu" and logits.dtype in DTYPES
    if known and logits.dim() == 2 and logits.stride(-1) == 1 and has_kernels():
        return torch.ops.draftsmith.largest(logits)
    return logits.max(-1).indices


def pack_linears(model: nn.Module) -> None:
    """Pack the frozen linear layers in place, each when it is first called; frozen `nn.RMSNorm`s become `FastNorm`.

    Does nothing for other dtypes than fp32 and bf16, on other devices than a CPU, or without a C++ compiler.
    """
    for module in model.modules():
        if type(module) is nn.Linear and not _trains(module) and _can_be_packed(module) and has_kernels():
            module.__class__ = PackedLinear
        elif type(module) is nn.RMSNorm and _is_plain_norm(module) and has_kernels():
            module.__class__ = FastNorm


def packable_bytes(model: nn.Module) -> int:
    """Return an upper bound of the bytes that packed copies of all frozen fp32 and bf16 linear layers take."""
    weights = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and module.weight.dtype in DTYPES
    }
    return sum(weight.element_size() * weight.numel() for weight in weights.values())


def _trains(linear: nn.Linear) -> bool:
    return linear.weight.requires_grad or (linear.bias is not None and linear.bias.requires_grad)


def _is_plain_norm(norm: nn.RMSNorm) -> bool:
    weight = norm.weight
    is_known = weight is not None and weight.dim() == 1 and norm.eps is not None
    return is_known and weight.device.type == "cpu" and weight.dtype in DTYPES


def _can_be_packed(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype in DTYPES
