"""Fused projections: the linear layers that read one input are one product, on a GPU.

A layer of Llama's kind has seven products, of queries, keys and values, of the output, and three of the MLP. For a few
rows on a GPU each takes 3.5 us to start and finish however small it is, and 1.1 us pass between two kernels: 90 of the
210 products of SmolLM2 are saved. vLLM loads such weights as one tensor; here the layers' own parameters become views
of one, so that everything else, which reads, saves, trains and exports them by name, sees what it saw before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from draftsmith.models.kernels.cpu_layers import is_of_family


class FusedModule(nn.Module):
    """Base of modules that compute their linear layers of one input, named in `fused`, by one matrix product.

    Args:
        module: The module that this one replaces; it gives its attributes, parameters and submodules.
    """

    fused: tuple[str, ...]
    config: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(module.__dict__)
        self._join()

    def _join(self) -> None:
        """Make the layers' weights, and biases, views of one tensor each."""
        linears: list[Any] = [getattr(self, name) for name in self.fused]
        self._sizes = [linear.out_features for linear in linears]
        self._weight = _joined([linear.weight for linear in linears])
        self._bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the layers named in `fused` for their input x [..., D]."""
        weight, bias, linears = self._weight, self._bias, [getattr(self, name) for name in self.fused]
        if torch.is_grad_enabled() and linears[0].weight.requires_grad:  # of the layers' own parameters
            weight = torch.cat([linear.weight for linear in linears])
            bias = None if bias is None else torch.cat([linear.bias for linear in linears])
        return F.linear(x, weight, bias).split(self._sizes, dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # it moves or casts each parameter by itself
        self._join()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy, whose parameters are its own
        self._join()


class FusedAttention(FusedModule):
    """Attention of Llama's, Mistral's, Qwen 2's and Qwen 3's layers, by two matrix products in place of four."""

    fused = ("q_proj", "k_proj", "v_proj")
    head_dim: int
    q_norm: Any
    k_norm: Any
    o_proj: Any

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from hidden states [B, S, D], with RoPE's cos and sin [B, S, Dh]; return [B, S, D] and weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (part.view(shape) for part in self.product(hidden_states))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        is_mistral = self.config.model_type == "mistral"
        window = self.config.sliding_window if is_mistral else getattr(self, "sliding_window", None)
        out, weights = attend(
            self, query, key, value, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, sliding_window=window, **options,
        )  # fmt: skip
        return self.o_proj(out.reshape(*shape[:-2], -1).contiguous()), weights


class FusedMLP(FusedModule):
    """MLP of Llama's, Mistral's and Qwen's layers, by two matrix products in place of three."""

    fused = ("gate_proj", "up_proj")
    act_fn: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [..., D] to the MLP's output [..., D]."""
        gate, up = self.product(x)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


def fuse_projections(model: nn.Module) -> None:
    """Fuse the projections of all attention and MLP modules of Llama's, Mistral's and Qwen's kind, in place.

    Called before a forward is compiled. Quantised layers, adapters' and those of different dtypes are left as they are.
    No weight is kept twice.
    """
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            for kind, ending in ((FusedAttention, "Attention"), (FusedMLP, "MLP")):
                if is_of_family(module, ending) and _can_be_fused([getattr(module, each) for each in kind.fused]):
                    setattr(parent, name, kind(module))


def _can_be_fused(linears: list[Any]) -> bool:
    # Hooks, as those of Medusa-2's LoRA, would not be called.
    plain = all(type(each) is nn.Linear and not (each._forward_hooks or each._forward_pre_hooks) for each in linears)
    return plain and len({(each.weight.dtype, each.weight.device, each.bias is None) for each in linears}) == 1


@torch.inference_mode(False)
@torch.no_grad()
def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """Return the parameters as one tensor, of which they become views."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = view
    torch._dynamo.mark_static_address(whole)
    return whole
