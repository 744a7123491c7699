"""Forwards of published layouts, from their tensors and the papers alone, for Llama layers: no cache, no streams.

Every row has its own list of the rows that it sees.

Shapes: R rows, E input width of the attention, D hidden, Dh head size.
"""

from collections.abc import Mapping

import torch
from support.eagle_reference import rotary, rotate
from torch import Tensor

HEADS, KV_HEADS, HEAD_SIZE, ROPE_THETA, EPS = 4, 2, 8, 10000.0, 1e-6


class LayoutReference:
    """Reads `tensors` by the names of the layout, embedding and head from the target."""

    def __init__(self, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        self.tensors, self.embedding, self.head = tensors, embedding, head

    def product(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        out = x @ self.tensors[f"{name}.weight"].T
        return out if bias is None else out + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()

    def layer(
        self, name: str, read_re: Tensor, residual_rd: Tensor, positions: list[int], sees: list[list[int]]
    ) -> Tensor:
        """[R, D]: attention over `read`, added to `residual`, then the MLP."""

        def heads(part: str, count: int) -> Tensor:
            return self.product(f"{name}.self_attn.{part}", read_re).unflatten(-1, (count, HEAD_SIZE)).transpose(0, 1)

        cos, sin = rotary(positions, HEAD_SIZE, ROPE_THETA, read_re.dtype)
        q_hrd = rotate(heads("q_proj", HEADS), cos, sin)
        k_hrd = rotate(heads("k_proj", KV_HEADS), cos, sin).repeat_interleave(HEADS // KV_HEADS, 0)
        v_hrd = heads("v_proj", KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 0)
        rows = []
        for row, seen in enumerate(sees):
            weights = (k_hrd[:, seen] @ q_hrd[:, row].unsqueeze(-1) * HEAD_SIZE**-0.5).squeeze(-1).softmax(-1)
            rows.append((weights.unsqueeze(-1) * v_hrd[:, seen]).sum(1).flatten())
        stream = residual_rd + self.product(f"{name}.self_attn.o_proj", torch.stack(rows))
        normed = self.norm(f"{name}.post_attention_layernorm", stream)
        gated = torch.nn.functional.silu(self.product(f"{name}.mlp.gate_proj", normed))
        return stream + self.product(f"{name}.mlp.down_proj", gated * self.product(f"{name}.mlp.up_proj", normed))

    # ---- slot n: what the target knew at n, and token n + 1 ----

    def eagle_slots(self, tokens: list[int], features_rd: Tensor, positions: list[int]) -> Tensor:
        """[R, D] of slots that each see all before them."""
        fused = self.product("fc", torch.cat([self.embedding[tokens], features_rd], dim=-1))
        return self.layer("layers.0", fused, fused, positions, causal(len(tokens)))

    def eagle3_fused(self, features_rf: Tensor) -> Tensor:
        """[R, D] of the features of three layers, normed as the tensors say."""
        if "input_norm.weight" in self.tensors:
            features_rf = self.norm("input_norm", features_rf)
        if "fc_norm.0.weight" in self.tensors:
            low, middle, high = features_rf.chunk(3, dim=-1)
            normed = self.norm("fc_norm.0", low), self.norm("fc_norm.1", middle), self.norm("fc_norm.2", high)
            features_rf = torch.cat(normed, dim=-1)
        return self.product("fc", features_rf)

    def eagle3_slots(self, tokens: list[int], g_rd: Tensor, positions: list[int], normed_residual: bool) -> Tensor:
        """[R, D] before the final norm."""
        first = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        embedded = self.norm(f"{first}.input_layernorm", self.embedding[tokens])
        normed = self.norm(f"{first}.hidden_norm", g_rd)
        residual = normed if normed_residual else g_rd
        return self.layer(first, torch.cat([embedded, normed], dim=-1), residual, positions, causal(len(tokens)))

    def eagle3_logits(self, out: Tensor) -> Tensor:
        return self.norm("norm", out) @ self.tensors.get("lm_head.weight", self.head).T


def causal(count: int) -> list[list[int]]:
    return [list(range(row + 1)) for row in range(count)]
