"""Forwards of EAGLE and other published layouts with Llama layers, written from their tensors and the papers only.

No cache, no packed depths: every row has a list of the rows that it sees.

Shapes: R rows, E input width of the attention, D hidden, Dh head size.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter

HEADS, KV_HEADS, HEAD_SIZE, ROPE_THETA, EPS = 4, 2, 8, 10000.0, 1e-6


class LayoutReference:
    """Reference that reads `tensors` by the layout's names, and embedding and head of the target."""

    def __init__(self, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor) -> None:
        self.tensors, self.embedding, self.head = tensors, embedding, head

    @staticmethod
    def of(drafter: Drafter) -> "LayoutReference":
        """Build a reference from a drafter's tensors, whose names are those of the layouts."""
        tensors = {**dict(drafter.named_parameters()), **dict(drafter.named_buffers())}
        return LayoutReference(tensors, drafter.attached.embedding.weight, drafter.attached.lm_head.weight)

    def product(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        out = x @ self.tensors[f"{name}.weight"].T
        return out if bias is None else out + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()

    def layer(
        self, name: str, read_re: Tensor, residual_rd: Tensor, positions: list[int], sees: list[list[int]]
    ) -> Tensor:
        """Return [R, D]: attention over `read`, added to `residual`, then the MLP."""

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

    # ---- slot n: the target's features at n, and token n + 1 ----

    def eagle3_fused(self, features_rf: Tensor) -> Tensor:
        """Return [R, D], the fused features of three layers, with norms if the tensors have them."""
        if "input_norm.weight" in self.tensors:
            features_rf = self.norm("input_norm", features_rf)
        if "fc_norm.0.weight" in self.tensors:
            low, middle, high = features_rf.chunk(3, dim=-1)
            normed = self.norm("fc_norm.0", low), self.norm("fc_norm.1", middle), self.norm("fc_norm.2", high)
            features_rf = torch.cat(normed, dim=-1)
        return self.product("fc", features_rf)

    def eagle3_slots(self, tokens: list[int], g_rd: Tensor, normed_residual: bool = False) -> Tensor:
        """Return [R, D] before the final norm, for slots that see all earlier ones."""
        first = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        embedded = self.norm(f"{first}.input_layernorm", self.embedding[tokens])
        normed = self.norm(f"{first}.hidden_norm", g_rd)
        residual = normed if normed_residual else g_rd
        positions, sees = list(range(len(tokens))), [list(range(row + 1)) for row in range(len(tokens))]
        out = self.layer(first, torch.cat([embedded, normed], dim=-1), residual, positions, sees)
        further = 1
        while f"layers.{further}.input_layernorm.weight" in self.tensors:
            name = f"layers.{further}"
            out = self.layer(name, self.norm(f"{name}.input_layernorm", out), out, positions, sees)
            further += 1
        return out

    def eagle3_feedback(self, out: Tensor, norm_output: bool) -> Tensor:
        """Return the features that the next step reads in place of the fused ones."""
        return self.norm("norm", out) if norm_output else out

    def eagle3_logits(self, out: Tensor) -> Tensor:
        return self.norm("norm", out) @ self.tensors.get("lm_head.weight", self.head).T


def eagle_features(drafter: Drafter, inputs_rd: Tensor, positions: list[int], sees: list[list[int]]) -> Tensor:
    """Return EAGLE's predicted features [R, D] for a Llama target. `sees[r]`: the rows that row r attends to."""
    return LayoutReference.of(drafter).layer("layers.0", inputs_rd, inputs_rd, positions, sees)


def pairs(drafter: Drafter, target: PreTrainedModel, ids: list[int], features_rd: Tensor) -> Tensor:
    """Return the layer's inputs [R, D]: fc of [embedding; feature]."""
    embedded = target.get_input_embeddings().weight[ids].to(features_rd.dtype)
    return torch.cat([embedded, features_rd], dim=1) @ drafter.fc.weight.T


def rotary(positions: list[int], head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.tensor(positions, dtype=torch.float64).unsqueeze(1) * frequencies
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
