"""Masks aligned for CUDA's kernels, and the enabled kernels, checked on a CPU in every forward of a round."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.half_right import GREEDY, tree_method
from support.tiny_models import tiny_drafter_of, tiny_target
from torch import Tensor
from torch.overrides import TorchFunctionMode

from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree


class SeenMasks(TorchFunctionMode):
    """Record every mask passed to attention."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = args[3] if len(args) > 3 else options.get("attn_mask")
            if mask is not None:
                self.masks.append(mask)
        return func(*args, **options)


@contextmanager
def masks_are_aligned(at_least: int) -> Iterator[None]:
    """Assert that every row of every mask starts at a multiple of 8 elements, 16 bytes in half precision."""
    with SeenMasks() as seen:
        yield
    assert len(seen.masks) >= at_least
    for mask in seen.masks:
        steps = [step for step, size in zip(mask.stride()[:-1], mask.shape[:-1], strict=True) if size > 1]
        places = (tuple(mask.shape), mask.storage_offset(), mask.stride())
        assert mask.storage_offset() % 8 == 0, places
        assert all(step % 8 == 0 for step in steps), places


@pytest.mark.parametrize(
    ("kind", "tree"),
    [("parallel", "best_first"), ("eagle", "best_first"), ("hydra", "best_first"), ("dflash", "chain")],
)
def test_masks_of_target_and_drafter_are_aligned(kind: str, tree: str) -> None:
    target = tiny_target(num_hidden_layers=4)
    drafter = tiny_drafter_of(kind, target)
    with (
        TargetSession(target, 61, drafter.feature_layers) as session,
        masks_are_aligned(at_least=20),
    ):
        generate(session, tree_method(drafter.decoder(61), tree), [5, 9, 33], GREEDY, 30)


def test_cudnn_attention_is_off_in_rounds() -> None:
    """cuDNN builds a plan for every new length, so in every round."""
    enabled, seen = torch.backends.cuda.cudnn_sdp_enabled, list[bool]()

    class Noting(Autoregressive):
        def propose(self) -> DraftTree:
            seen.append(enabled())
            return super().propose()

    with TargetSession(tiny_target(), 40) as session:
        generate(session, Noting(), [5, 9, 33], GREEDY, 4)
    assert seen == [False] * 3
    assert enabled()
