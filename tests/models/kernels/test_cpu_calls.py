"""Decoder layers in one call, in sessions and in drafters: the results of unpacked layers, in the calls expected."""

from typing import Any

import pytest
import torch
from support.half_right import GREEDY, PATHS_IN_TREES, run_trees
from support.tiny_models import VOCABULARY, random_batch, tiny_drafter_of, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import tree_builder
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.decoding import cached_layers, forward
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.kernels.cpu_kernels import pack_linears
from draftsmith.models.kernels.cpu_layers import CpuLayers
from draftsmith.models.kernels.cpu_library import has_kernels
from draftsmith.models.target.features import FINAL_FEATURES
from draftsmith.recipes.schema import MethodConfig

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

# ---- in sessions ----

# Prompt and rounds reach beyond the windows; the last target has different layers, so it runs unchanged.
SESSION_TARGETS: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": ({}, True),
    "qwen3": ({"num_attention_heads": 9, "num_key_value_heads": 3}, True),
    "qwen2": ({}, True),
    "mistral": ({"sliding_window": 4}, True),
    "mistral, a wider window": ({"sliding_window": 20}, True),
    "qwen2, windows in some layers": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 2},
        False,
    ),
}
PROMPT = [5, 9, 33, 12, 40, 7]


def session_target(name: str, packed: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    target = tiny_target(name.split(",")[0], **{"head_dim": 32, **SESSION_TARGETS[name][0]}).to(dtype)
    if packed:
        pack_linears(target)
    return target


def count_calls(layers: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every forward in one call adds its number of rows; none, without such layers."""
    calls: list[int] = []
    if layers is not None:
        plain = layers.forward
        monkeypatch.setattr(layers, "forward", lambda rows, *a, **o: (calls.append(len(rows)), plain(rows, *a, **o))[1])
    return calls


@pytest.mark.parametrize("name", SESSION_TARGETS)
def test_session_equals_the_unpacked_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, chains, trees of up to 75 nodes and single tokens, with features of several layers."""
    in_one_call = SESSION_TARGETS[name][1]
    wide = DraftTree(list(range(3, 58)) + list(range(3, 23)), TreeShape.of((-1, *[0] * 74)))
    rounds = [*PATHS_IN_TREES, (wide, [0, 50]), *PATHS_IN_TREES]
    outputs = []
    for packed in (False, True):
        with TargetSession(session_target(name, packed), 64, (0, 1, FINAL_FEATURES)) as session:
            assert (session.forward.cpu_target is not None) == packed
            calls = count_calls(session.forward.cpu_target, monkeypatch)
            outputs.append(run_trees(session, PROMPT, rounds))
            if packed:
                assert calls == ([len(PROMPT), 4, 5, 1, 75, 4, 5, 1] if in_one_call else [1, 1][: len(calls)])
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@EVERY_DTYPE
def test_prompt_has_the_bits_of_its_tokens_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in one call and in several."""
    target = session_target("llama", packed=True, dtype=dtype)
    prompt = [(7 * place) % VOCABULARY for place in range(77)]
    singles = [(root_only(token), [0]) for token in prompt[1:]]
    with TargetSession(target, 128, (1, FINAL_FEATURES)) as session:
        outputs = run_trees(session, prompt[:1], singles)
    logits, features = outputs[-2], torch.cat(outputs[1::2])
    for most_rows in (forward.MOST_CALL_ROWS, 64, 9):
        monkeypatch.setattr(forward, "MOST_CALL_ROWS", most_rows)
        with TargetSession(target, 128, (1, FINAL_FEATURES)) as session:
            calls = count_calls(session.forward.cpu_target, monkeypatch)
            step = session.prefill(prompt)
        assert len(calls) == -(-len(prompt) // most_rows)
        assert torch.equal(step.logits, logits)
        assert torch.equal(step.features, features)


# ---- in drafters ----

DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in drafter_kinds()),
    ("dflash", {"sample_from_anchor": True, "causal": True, "loss": "kl", "block_size": 4, "markov_rank": 5}),
    ("dflash", {"block_size": 4, "sliding_window": 6, "feature_layers": [0, 3]}),
    ("draft_model", {"num_layers": 3, "init": "random", "layers": "qwen3", "sliding_window": 20}),
    ("eagle", {"fc_bias": True, "first_token": False, "layers": "qwen3"}),
    ("eagle3", {"feature_layers": [0, 3], "norm_before_fc": True, "norm_before_residual": True}),
    ("eagle3", {"fc_norm": True, "norm_output": True, "layers": "qwen3", "sliding_window": 9}),
    ("eagle_parallel", {"markov_rank": 5, "mask_residual": True}),
    ("hydra", {"prefix_attention": True}),
    ("parallel", {"num_layers": 2, "mask_residual": True, "layers": "qwen3", "sliding_window": 20}),
    ("peagle", {"num_layers": 2, "first_token": False, "fc_norm": True}),
]
# Kinds whose rows only run through their layers, the final norm and the LM head, in this order.
IN_ONE_CALL = {"dflash", "draft_model", "dspark", "eagle", "eagle3", "eagle_parallel", "parallel", "peagle"}


def find_cpu_layers(decoder: Any) -> CpuLayers | None:
    """Return the decoder's layers in one call, or those of the decoder it wraps."""
    while not hasattr(decoder, "_cpu_layers") and hasattr(decoder, "_decoder"):
        decoder = decoder._decoder
    return getattr(decoder, "_cpu_layers", None)


def draft_all(decoder: Any, ids: Tensor, features: Tensor, prompt: int) -> tuple[list[Tensor], list[DraftTree]]:
    """Return logits after a prompt and after chunks of tokens, and the trees drafted there.

    For a decoder that reads its draft tokens these are the logits of the root and of two levels below.
    """
    logits, trees, end = [], [], prompt
    decoder.start(ids[:prompt], features[:prompt])
    recipe = MethodConfig.model_validate({"name": "x", "tree": "best_first", "nodes": 9, "branch": 3})
    build = tree_builder(recipe).grow if isinstance(decoder, StepwiseDecoder) else tree_builder(recipe).draft
    for size in (1, 3, 2, 5):
        for again in range(2):
            decoder.observe(ids[end : end + size], features[end - 1 : end + size - 1])
            end += size
            if again:
                trees.append(build(int(ids[end - 1]), decoder, GREEDY, None))
            elif isinstance(decoder, StepwiseDecoder):
                logits += [decoder.begin(), decoder.expand([5, 9], [0, 0]), decoder.expand([7, 8, 11], [1, 2, 2])]
            else:
                logits.append(decoder.draft())
    return logits, trees


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        *((*drafter, torch.float32) for drafter in DRAFTERS),
        *((*drafter, torch.bfloat16) for drafter in DRAFTERS if drafter[0] in IN_ONE_CALL and not drafter[1]),
    ],
)
def test_drafts_equal_those_of_unpacked_layers(
    kind: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a short prompt, and after one that is read in two calls."""
    monkeypatch.setattr(cached_layers, "MOST_CALL_ROWS", 64)
    target = tiny_target(num_hidden_layers=4, head_dim=32).to(dtype)
    drafter = tiny_drafter_of(kind, target, **options).to(dtype).freeze()
    batch = random_batch(target, 1, 100, drafter)
    ids, features = batch["input_ids"][0], batch["features"][0].detach()
    with torch.inference_mode():
        theirs = [draft_all(drafter.decoder(128), ids, features, prompt) for prompt in (3, 70)]
        pack_linears(target)
        pack_linears(drafter)
        decoder = drafter.decoder(128)
        rows = count_calls(find_cpu_layers(decoder), monkeypatch)
        ours = [draft_all(decoder, ids, features, prompt) for prompt in (3, 70)]
        assert (len(rows) >= 15) == (kind in IN_ONE_CALL)
    for (our_logits, our_trees), (their_logits, their_trees) in zip(ours, theirs, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(our_logits, their_logits, **CLOSE)
            for our_tree, their_tree in zip(our_trees, their_trees, strict=True):
                assert (our_tree.tokens, our_tree.parents) == (their_tree.tokens, their_tree.parents)
        else:
            scale = max(float(part[part.isfinite()].abs().max()) for part in their_logits)
            torch.testing.assert_close(our_logits, their_logits, rtol=2**-5, atol=scale * 2**-5)


@pytest.mark.parametrize("options", [{}, {"inputs": "hidden", "feature_layers": [0, 3]}, {"mask_residual": False}])
@EVERY_DTYPE
def test_fused_inputs_change_no_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Inputs computed within the call give the logits of inputs passed to it."""
    target = tiny_target(num_hidden_layers=4, head_dim=32).to(dtype)
    options = {"inputs": "both", "mask_residual": True, **options}
    drafter = tiny_drafter_of("parallel", target, **options).to(dtype).freeze()
    pack_linears(target)
    pack_linears(drafter)
    batch = random_batch(target, 1, 40, drafter)
    ids, features = batch["input_ids"][0], batch["features"][0].detach()
    fused, given = drafter.decoder(64), drafter.decoder(64)
    layers = find_cpu_layers(given)
    assert layers is not None
    assert layers.fuses(features)
    layers._fusion = None
    for ours, theirs in zip(draft_all(fused, ids, features, 3)[0], draft_all(given, ids, features, 3)[0], strict=True):
        assert torch.equal(ours, theirs)
