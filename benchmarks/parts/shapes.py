"""Targets with random weights in the shapes of known models, for timings of which only the shape matters."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

# Hidden size, the MLP's, layers, heads, heads of keys and values, vocabulary, dtype: of Llama 3.1 8B, Llama 3.2 1B,
# SmolLM2-135M and the embedded target.
SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128_256, "bfloat16"),
    "1b": (2048, 8192, 16, 32, 8, 128_256, "bfloat16"),
    "135m": (576, 1536, 30, 9, 3, 49_152, "float32"),
    "embedded": (192, 512, 8, 3, 1, 4096, "float32"),
}


def random_target(shape: str, device: torch.device, dtype: str | None = None) -> PreTrainedModel:
    """Make a frozen Llama of that shape, on the device from the start, so that the host never holds it.

    Args:
        dtype: In place of the shape's.
    """
    hidden_size, intermediate_size, layers, heads, kv_heads, vocabulary, dtype_of_shape = SHAPES[shape]
    dtype = dtype or dtype_of_shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        dtype=dtype,
    )
    with torch.device(device):
        target = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    return target.eval().requires_grad_(False)
