"""Block drafters: the published forward block by block, the computed rows, and the loss by hand."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor

from draftsmith.models.drafters.dflash import DFlashDrafter
from draftsmith.models.groups.layout import Groups

TARGET = tiny_target(num_hidden_layers=4)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * weight


def rotate(x_hrd: Tensor, positions: Tensor) -> Tensor:
    """Apply the tiny target's RoPE, base 10,000."""
    half = x_hrd.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (torch.arange(half) / half)
    first, second = x_hrd.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def convolution_inputs(x: Tensor, layer: dict[str, Tensor], name: str) -> tuple[Tensor, list[Tensor]]:
    """Return rows [R, D] as a sublayer reads them, and the kernels [R, taps, D] of both sides."""
    base = layer[f"{name}.base_kernel"]
    delta = (x @ layer[f"{name}.kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    kernels = [base[side] + delta[:, side].repeat_interleave(16, dim=-1) for side in (0, 1)]
    return convolve(x, kernels[0]), kernels


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Convolve row by row and tap by tap, reading nothing before the block."""
    taps = range(kernel.shape[1])
    return torch.stack(
        [sum((kernel[i, tap] * x[i - tap] for tap in taps if tap <= i), 0 * x[i]) for i in range(len(x))]
    )


def published_forward(drafter: DFlashDrafter, newest: int, features_sf: Tensor, at: int) -> Tensor:
    """Run one block, with the context's keys and values before its own, as in z-lab/dflash: [block_size, D]."""
    state, config = drafter.state_dict(), drafter.config
    context = rms(features_sf[:at] @ state["fc.weight"].T, state["hidden_norm.weight"])
    ids = torch.tensor([newest] + [config.mask_token_id] * (config.block_size - 1))
    x = TARGET.get_input_embeddings()(ids)
    own, all_places = torch.arange(at, at + len(ids)), torch.arange(at + len(ids))
    kernels, is_convolved = None, "conv_kernel_size" in config.to_dict()
    for i in range(config.num_layers):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in state.items()}

        def heads(name: str, rows: Tensor, layer: dict[str, Tensor] = layer) -> Tensor:
            return (rows @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)).transpose(0, 1)

        read = rms(x, layer["input_layernorm.weight"])
        if is_convolved:
            read, kernels = convolution_inputs(read, layer, "attention_conv")
        q = rotate(rms(heads("q", read), layer["self_attn.q_norm.weight"]), own)
        k, v = (torch.cat([heads(name, context), heads(name, read)], dim=1) for name in "kv")
        k = rotate(rms(k, layer["self_attn.k_norm.weight"]), all_places)
        scores = q @ k.repeat_interleave(2, dim=0).mT / 8**0.5
        if config.causal:
            scores = scores.masked_fill(all_places > own[:, None], -torch.inf)
        if config.sliding_window:
            scores = scores.masked_fill(own[:, None] - all_places >= config.sliding_window, -torch.inf)
        out = (scores.softmax(-1) @ v.repeat_interleave(2, dim=0)).transpose(0, 1).flatten(1)
        out = out @ layer["self_attn.o_proj.weight"].T
        x = x + (convolve(out, kernels[1]) if kernels else out)
        read = rms(x, layer["post_attention_layernorm.weight"])
        if is_convolved:
            read, kernels = convolution_inputs(read, layer, "mlp_conv")
        gate, up = (read @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        out = (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        x = x + (convolve(out, kernels[1]) if kernels else out)
    return rms(x, state["norm.weight"])


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])  # without convolutions and with them
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 5)])
def test_forward_equals_the_published_one(kind: str, anchor: bool, causal: bool, window: int | None) -> None:
    """Row k of a block predicts the token at its own position, anchor + k; with `anchor` the one after it."""
    options = {"sample_from_anchor": anchor, "causal": causal, "sliding_window": window}
    drafter = tiny_drafter_of(kind, TARGET, **options, block_size=4, num_layers=2)
    batch = random_batch(TARGET, drafter=drafter)
    ids, features = batch["input_ids"], batch["features"]
    with torch.no_grad():
        logits = DFlashDrafter.group_logits(drafter, ids, features)  # before a selector re-ranks them
    assert logits.shape[1] == 3 + anchor
    for b, t in itertools.product(range(2), range(1, LENGTH)):
        rows = published_forward(drafter, int(ids[b, t]), features[b], t)
        wanted = rows[0 if anchor else 1 :] @ TARGET.get_output_embeddings().weight.T
        torch.testing.assert_close(logits[b, :, t], wanted, atol=1e-4, rtol=1e-4)


def test_blocks_are_computed_whole_or_not_at_all() -> None:
    """One label is enough; the context ends where the last block begins; first tokens have neither."""
    drafter = tiny_drafter_of("dflash", TARGET, block_size=4, sample_from_anchor=True)
    labels = torch.full((2, 4, 6), -100)
    labels[0, 0, 3], labels[0, :2, 1], labels[1, 0, 0], labels[1, 0, 2] = 1, 1, 1, 1
    ids = torch.ones(2, 6, dtype=torch.long)
    groups = Groups.of(ids, labels, drafter.active_rows(labels), first_token=False)
    context = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    blocks = [(0, 1), (0, 3), (1, 2)]
    parts = groups.token_n // 6, groups.row_n, groups.token_n % 6
    found = list(zip(*(part.tolist() for part in parts), strict=True))
    assert sorted(found) == sorted(
        [(b, 0, t) for b, t in context] + [(b, k, t) for b, t in blocks for k in (1, 2, 3, 4)]
    )
    assert len(groups.labelled_m) == 4
    assert groups.shape == (2, 5, 6)


def test_anchor_ratio_drops_whole_blocks() -> None:
    drafter = tiny_drafter_of("dflash", TARGET, block_size=4, anchor_ratio=0.3)
    labels = torch.zeros(20, 3, 500, dtype=torch.long)
    blocks = drafter.train().active_rows(labels)[:, 1:]
    assert torch.equal(blocks, blocks[:, :1].expand_as(blocks))
    assert blocks[:, 0].float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert drafter.eval().active_rows(labels).all()
    ids, mask = torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.long)
    groups = drafter.groups(ids, mask)
    everything = drafter.label_counts(groups)
    torch.testing.assert_close(drafter.train().label_counts(groups), 0.3 * everything)
