"""Try every architecture of transformers as a target, tiny and random: the table of `docs/reference/targets.md`.

    python docs/generate/targets.py                 # all of them, some minutes: writes docs/generate/targets.json
    python docs/generate/targets.py llama gemma2    # print these rows

A row says what a target of this kind can do here: its logits from the final features, its attention and windows, draft
trees beyond the window against plain recomputation, and an EAGLE-3 drafter on its inner layers, in training and in
decoding. A cell is a word or the sentence that a user would be given; anything else that comes out is a defect, which
`tests/models/target/test_architectures.py` fails on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RESULT = Path(__file__).with_suffix(".json")
COLUMNS = ("logits", "attention", "trees", "drafter")
VOCABULARY, WINDOW, NEW_TOKENS = 96, 8, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
# Sizes for the architectures that have scales, windows, experts or latent attention.
MORE: dict[str, Any] = {
    "logit_scale": 0.25, "logits_scaling": 4.0, "sliding_window": WINDOW, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 16, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "query_pre_attn_scalar": 8,
    "rotary_dim": 4, "n_positions": 128, "max_seq_len": 128, "full_attn_idxs": [1, 3],
}  # fmt: skip
# And for some with recurrent layers, whose types do not follow from the number of layers.
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_heads": 4, "linear_head_dim": 8,
        "q_lora_rank": None,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
}  # fmt: skip
WITHOUT_HEADS = ("num_key_value_heads", "head_dim", "intermediate_size")
MOST_PARAMETERS = 4_000_000
PROMPT = [5, 9, 33, 12, 40, 7, 5, 9, 33, 12, 41]
# Tolerance for rounding, relative to the logits' size.
ROUNDING_FRAC = 1e-4


@dataclass
class Row:
    """Features of a target of one `model_type`. defects: failures without a message for the user."""

    model_type: str
    cells: dict[str, str] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)


def architectures() -> list[str]:
    """Name the `model_type` of everything that transformers calls a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tried(model_type: str) -> Row | None:
    """Try one architecture; None if no tiny model of it can be made here."""
    from draftsmith.models.target.text_model import running_sentence

    row, target = Row(model_type), built(model_type)
    if target is None:
        return None
    row.cells["attention"] = running_sentence(target).removeprefix("attention by ")
    _try(row, "logits", lambda: _logits(target))
    _try(row, "trees", lambda: _trees(target))
    _try(row, "drafter", lambda: _drafter(target))
    return row


def built(model_type: str) -> PreTrainedModel | None:
    """Make a tiny random model of this kind, run as `load_target` would run it; None if it is no decoder."""
    from draftsmith.models.target.text_model import (
        choose_attention,
        is_bidirectional,
        name_base_model,
        text_alone,
        use_configured_time_steps,
        use_exact_attention,
    )

    without_heads = {key: value for key, value in SIZES.items() if key not in WITHOUT_HEADS}
    alike = {**SIZES, **MORE, "num_key_value_heads": SIZES["num_attention_heads"]}
    for values in ({**SIZES, **MORE}, alike, SIZES, {**without_heads, **MORE}, without_heads):
        try:
            torch.manual_seed(0)
            config: PreTrainedConfig = AutoConfig.for_model(model_type, **{**values, **HYBRIDS.get(model_type, {})})
            if config.is_encoder_decoder or is_bidirectional(config):
                return None
            attention = choose_attention(config, "sdpa")
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
            if sum(parameter.numel() for parameter in empty.parameters()) > MOST_PARAMETERS:
                continue
            target = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
            target = text_alone(target.requires_grad_(False), model_type)
            name_base_model(target)
            use_exact_attention(target)
            use_configured_time_steps(target)
            target(input_ids=torch.tensor([PROMPT]), use_cache=False)
        except Exception:  # of any type: a class may reject sizes that it does not know
            continue
        return target
    return None


def _try(row: Row, column: str, look: Callable[[], str]) -> None:
    from draftsmith.errors import UserError

    try:
        row.cells[column] = look()
    except UserError as error:
        row.cells[column] = str(error)
    except Exception as error:
        row.defects.append(f"{column}: {type(error).__name__}: {error}")


@torch.no_grad()
def _logits(target: PreTrainedModel) -> str:
    """Compare the shaped product of head and features with the target's logits of a text."""
    from draftsmith.models.target.architectures import logit_shape
    from draftsmith.models.target.features import target_features

    ids, shape = torch.tensor([PROMPT]), logit_shape(target)
    logits = shape(target.get_output_embeddings()(target_features(target, ids)))
    _check_close(logits, target(input_ids=ids, use_cache=False).logits, "logits")
    return str(shape)


@torch.no_grad()
def _trees(target: PreTrainedModel) -> str:
    """Compare greedy answers of lookups with a recomputation without a cache, beyond every window; and then a tree."""
    from draftsmith.eval.decoding.generate import generate
    from draftsmith.eval.decoding.session import TargetSession
    from draftsmith.eval.methods.prompt_lookup import PromptLookup
    from draftsmith.eval.trees.verify import DraftTree, TreeShape
    from draftsmith.models.sampling import Sampling
    from draftsmith.models.target.loading import session_tokens
    from draftsmith.models.target.windows import has_recurrent_layers

    length = session_tokens(target, 64)
    if length < len(PROMPT) + NEW_TOKENS:
        return f"within {length} tokens"
    ids = list(PROMPT)
    for _ in range(NEW_TOKENS):
        ids.append(int(target(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    expected = ids[len(PROMPT) :]
    with TargetSession(target, length) as session:
        lookup = PromptLookup("lookup", max_ngram=3, num_tokens=6, match="latest", partial=True)
        generator = torch.Generator().manual_seed(0)
        answer = generate(session, lookup, PROMPT, Sampling(), NEW_TOKENS, frozenset(), generator).ids
        # A tree with siblings, if they are possible, where the text is longer than the window.
        session.prefill(ids[:-1])
        tree, path = DraftTree([ids[-1], 20, 30, 40, 50], TreeShape.of((-1, 0, 0, 1, 3))), [1, 3, 4]
        if is_recurrent := has_recurrent_layers(target):
            tree, path = DraftTree([ids[-1], 20, 40, 50], TreeShape.chain(3)), [1, 2, 3]
        nodes = session.forward_tree(tree).logits
    alone = target(input_ids=torch.tensor([[*ids, 20, 40, 50]]), use_cache=False).logits[0, -3:]
    _check_close(nodes[path], alone, "tree")
    if answer != expected:
        raise ValueError(f"lookups give {answer}, single steps {expected}")
    return "chains only" if is_recurrent else "yes"


def _drafter(target: PreTrainedModel) -> str:
    """Check train = decode of an EAGLE-3 drafter, and that its RoPE is the target's."""
    from draftsmith.data.tokens.loss_mask import TokenizedConversation
    from draftsmith.models.base.registry import check_drafter, load_drafter_class
    from draftsmith.models.formats.exporting import refusal
    from draftsmith.train.drafter.parity import TOLERANCE, check_parity

    options = {"feature_layers": [1, 2, 3]}
    drafter_class = load_drafter_class("eagle3")
    check_drafter("eagle3", target.config, options)
    config = drafter_class.from_target(target, options).config
    rows = [TokenizedConversation((PROMPT * 3)[:32], [0] * 8 + [1] * 24)]
    parity = check_parity("eagle3", options, target, rows)
    if not parity.worst.size <= TOLERANCE:
        raise ValueError(f"training and decoding differ by {parity.worst.size}")
    refused = refusal(config, "vllm")
    layers = f"{config.layers_of['model_type']} layers"
    return f"{layers}; vLLM" if refused is None else f"{layers}; no export: {refused}"


def _check_close(actual: Tensor, expected: Tensor, what: str) -> None:
    difference = float((actual - expected).abs().amax())
    if not difference <= ROUNDING_FRAC * float(expected.abs().amax()):
        raise ValueError(f"{what} differ by {difference:.3g}")


def sweep(model_types: list[str]) -> tuple[list[Row], list[str]]:
    """Try these architectures; returns their rows, and those of which no tiny model can be made."""
    rows = {name: tried(name) for name in model_types}
    return [row for row in rows.values() if row is not None], [name for name, row in rows.items() if row is None]


def main() -> None:
    """Write the result, or print the rows of the architectures that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architectures", nargs="*", help="print these rows; by default all are written to targets.json")
    named = parser.parse_args().architectures
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows, not_built = sweep(named or architectures())
    for row in rows:
        for defect in row.defects:
            sys.stderr.write(f"{row.model_type}: {defect}\n")
    result = {"transformers": transformers.__version__, "not_built": not_built}
    result["targets"] = {row.model_type: row.cells for row in rows}
    text = json.dumps(result, indent=1) + "\n"
    if named:
        sys.stdout.write(text)
    else:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
