"""EAGLE's layer written out in plain torch: no cache, no streams, every row with its own list of rows that it sees.

Shapes: R rows, D hidden, H heads, Dh head size, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.models.base.drafter import Drafter


def eagle_features(drafter: Drafter, inputs_rd: Tensor, positions: list[int], sees: list[list[int]]) -> Tensor:
    """[R, D] predicted features of a Llama target's EAGLE. `sees[r]`: the rows that row r attends to."""
    weights, config = dict(drafter.named_parameters()), drafter.layers_config

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"layers.0.{name}.weight"].T

    def heads(name: str, count: int) -> Tensor:
        return linear(f"self_attn.{name}", inputs_rd).unflatten(-1, (count, config.head_dim)).transpose(0, 1)

    cos, sin = rotary(positions, config.head_dim, config.rope_parameters["rope_theta"], inputs_rd.dtype)
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    q_hrd = rotate(heads("q_proj", num_heads), cos, sin)
    k_hrd = rotate(heads("k_proj", num_kv_heads), cos, sin).repeat_interleave(num_heads // num_kv_heads, 0)
    v_hrd = heads("v_proj", num_kv_heads).repeat_interleave(num_heads // num_kv_heads, 0)
    rows = []
    for row, seen in enumerate(sees):
        scores_hr = (k_hrd[:, seen] @ q_hrd[:, row].unsqueeze(-1)).squeeze(-1) * config.head_dim**-0.5
        rows.append((scores_hr.softmax(-1).unsqueeze(-1) * v_hrd[:, seen]).sum(1).flatten())
    stream = inputs_rd + linear("self_attn.o_proj", torch.stack(rows))
    scale = (stream.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    normed = stream * scale * weights["layers.0.post_attention_layernorm.weight"]
    gated = torch.nn.functional.silu(linear("mlp.gate_proj", normed)) * linear("mlp.up_proj", normed)
    return stream + linear("mlp.down_proj", gated)


def pairs(drafter: Drafter, target: PreTrainedModel, ids: list[int], features_rd: Tensor) -> Tensor:
    """[R, D] inputs of the layer: fc of [embedding; feature]."""
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


def smooth_l1(predicted: Tensor, target: Tensor) -> Tensor:
    """d^2 / 2 below 1, |d| - 1/2 above, mean over all."""
    distance = (predicted - target).abs()
    return torch.where(distance < 1, distance.pow(2) / 2, distance - 0.5).mean()


def kl(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    p = teacher_logits.softmax(-1)
    return (p * (p.log() - logits.softmax(-1).log())).sum()
