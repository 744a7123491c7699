"""EAGLE-3's layer written a second time, row by row and from its tensors alone (Llama kind), for tests to compare with.

Shapes: D hidden, Dh head size, N rows that are attended to.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.models.base.drafter import Drafter

HEADS, KV_HEADS, HEAD_SIZE, ROPE_THETA, EPS = 4, 2, 8, 10000.0, 1e-6


@dataclass
class Memory:
    """Keys and values [KV_HEADS, Dh] of earlier rows, for each layer."""

    keys: list[list[Tensor]] = field(default_factory=lambda: [[], []])
    values: list[list[Tensor]] = field(default_factory=lambda: [[], []])

    def copy(self) -> "Memory":
        return Memory([list(rows) for rows in self.keys], [list(rows) for rows in self.values])


class Reference:
    """Runs one row at a time through a drafter's tensors."""

    def __init__(self, drafter: Drafter) -> None:
        self.tensors = {**dict(drafter.named_parameters()), **dict(drafter.named_buffers())}
        self.embedding = drafter.attached.embedding.weight
        self.target_head = drafter.attached.lm_head.weight
        self.norm_output = getattr(drafter.config, "norm_output", False)
        self.num_layers = len({name.split(".")[1] for name in self.tensors if name.startswith("layers.")})

    def fuse(self, features_f: Tensor) -> Tensor:
        """[D] of all layers' features, normed together, each for itself, or not at all."""
        if "input_norm.weight" in self.tensors:
            features_f = rms_norm(features_f, self.tensors["input_norm.weight"])
        elif "fc_norm.0.weight" in self.tensors:
            size = len(self.tensors["fc_norm.0.weight"])
            features_f = torch.cat(
                [
                    rms_norm(part, self.tensors[f"fc_norm.{number}.weight"])
                    for number, part in enumerate(features_f.split(size))
                ]
            )
        return self.tensors["fc.weight"] @ features_f

    def row(self, token: int, g_d: Tensor, position: int, memory: Memory) -> Tensor:
        """[D] before the final norm, of a row that sees all of `memory` and is added to it."""
        stream = g_d
        for layer in range(self.num_layers):
            name = f"layers.{layer}."
            normed = rms_norm(stream, self.tensors[name + ("input_layernorm" if layer else "hidden_norm") + ".weight"])
            if layer == 0:
                embedded = rms_norm(self.embedding[token], self.tensors[name + "input_layernorm.weight"])
                normed = torch.cat([embedded, normed])
            q, k, v = (
                (self.tensors[f"{name}self_attn.{part}_proj.weight"] @ normed).view(-1, HEAD_SIZE) for part in "qkv"
            )
            memory.keys[layer].append(rotated(k, position))
            memory.values[layer].append(v)
            heads = []
            for head, query in enumerate(rotated(q, position)):
                of_head = head * KV_HEADS // HEADS
                keys = torch.stack([row[of_head] for row in memory.keys[layer]])
                values = torch.stack([row[of_head] for row in memory.values[layer]])
                heads.append((keys @ query * HEAD_SIZE**-0.5).softmax(0) @ values)
            stream = stream + self.tensors[name + "self_attn.o_proj.weight"] @ torch.cat(heads)
            normed = rms_norm(stream, self.tensors[name + "post_attention_layernorm.weight"])
            gate, up = (self.tensors[f"{name}mlp.{part}_proj.weight"] @ normed for part in ("gate", "up"))
            stream = stream + self.tensors[name + "mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        return stream

    def feedback(self, out_d: Tensor) -> Tensor:
        """[D] what the next step reads in place of g."""
        return rms_norm(out_d, self.tensors["norm.weight"]) if self.norm_output else out_d

    def logits(self, out_d: Tensor) -> Tensor:
        """[V], or [V'] of a reduced vocabulary."""
        head = self.tensors.get("lm_head.weight", self.target_head)
        return head @ rms_norm(out_d, self.tensors["norm.weight"])


def rms_norm(x_d: Tensor, weight_d: Tensor) -> Tensor:
    return weight_d * x_d / (x_d.square().mean() + EPS).sqrt()


def rotated(rows_hd: Tensor, position: int) -> Tensor:
    """RoPE with the halves as pairs."""
    half = HEAD_SIZE // 2
    angles = position * ROPE_THETA ** (-torch.arange(half, dtype=rows_hd.dtype) / half)
    first, second = rows_hd[:, :half], rows_hd[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=1
    )
