"""Targets with sliding windows: trees, shared forwards and distilled rows respect them."""

import itertools
from typing import Any

import pytest
import torch
from support.openai_setup import run
from support.table_decoder import leaf_paths
from support.tiny_models import HYBRIDS, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.data.engines.engine import GenerationSettings, Request
from draftsmith.data.engines.transformers_engine import TransformersEngine
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape, root_only
from draftsmith.models.decoding.forward import Compiler
from draftsmith.models.kernels.attention import use_own_attention
from draftsmith.models.target.loading import longest_sequence_tokens
from draftsmith.models.target.text_model import name_base_model
from draftsmith.models.target.windows import (
    Window,
    get_max_positions,
    get_windows,
    has_recurrent_layers,
    takes_masks,
    tokens_within_windows,
)

WINDOW = 6
MIXED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# All layers of one kind, mixed ones, soft caps, sinks, chunks.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", {**MIXED, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 8}),
    "olmo3": ("olmo3", MIXED),
    "cohere2": ("cohere2", MIXED),
    "gpt_oss": ("gpt_oss", {**MIXED, **EXPERTS}),
    "llama4": (
        "llama4_text",
        {
            **EXPERTS, "num_hidden_layers": 4, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
}  # fmt: skip
every_target = pytest.mark.parametrize("name", TARGETS)
# A chain and a wide tree whose path is not in order, both crossing the end of some windows.
TREES = [
    (DraftTree([7, 3, 20, 21], TreeShape.of((-1, 0, 1, 2))), [0, 1, 2]),
    (DraftTree([9, 4, 5, 6, 8, 11], TreeShape.of((-1, 0, 0, 2, 3, 4))), [0, 2, 3, 4]),
    (root_only(12), [0]),
    (DraftTree([9, 4, 5, 6, 8, 10, 11, 13, 14], TreeShape.of((-1, 0, 0, 2, 3, 4, 5, 6, 7))), [0, 2, 3, 4, 5, 6, 7]),
    (DraftTree([19, 4], TreeShape.of((-1, 0))), [0]),
]


def build_windowed_target(name: str, **changes: Any) -> PreTrainedModel:
    """Build a target with the attention that loading would select."""
    model_type, values = TARGETS[name]
    target = tiny_target(model_type, **{**values, "attn_implementation": "eager", **changes})
    name_base_model(target)
    if name not in ("gemma2", "gpt_oss"):
        target.set_attn_implementation("sdpa")
        use_own_attention(target)
    return target


@torch.inference_mode()
def recompute(target: Any, ids: list[int]) -> Tensor:
    logits: Tensor = target(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


def check_step(step: Any, tree: DraftTree, target: Any, said: list[int]) -> None:
    """Check that every node of a tree has the logits of its path without a tree."""
    for path in leaf_paths(tree):
        own = [tree.tokens[node] for node in path]
        assert_same(step.logits[path], recompute(target, said + own)[len(said) :])


def check_trees(session: Any, target: Any, prompt: list[int]) -> None:
    said = list(prompt)
    assert_same(session.prefill(prompt).logits[0], recompute(target, said)[-1])
    for tree, path in TREES:
        check_step(session.forward_tree(tree), tree, target, said)
        session.commit(path)
        said += [tree.tokens[place] for place in path]


@every_target
@pytest.mark.parametrize("length", [3, 17])
def test_trees_within_and_beyond_the_window(name: str, length: int) -> None:
    target = build_windowed_target(name)
    assert (get_max_positions(target), tokens_within_windows(target)) == (128, WINDOW)
    assert takes_masks(target)
    assert longest_sequence_tokens(target) == 128
    with TargetSession(target, 64) as session:
        check_trees(session, target, list(range(3, 3 + length)))


@pytest.mark.slow
def test_compiled_session_continues_beyond_the_window() -> None:
    target = build_windowed_target("gemma3")
    with TargetSession(target, 64, compiler=Compiler("eager")) as session:
        check_trees(session, target, [3, 4])


@every_target
def test_distillation_is_not_limited_by_the_window(name: str) -> None:
    """Greedy answers of rows of several lengths equal plain recomputation far beyond the window."""
    target = build_windowed_target(name)
    assert TransformersEngine(target, 3, 200, ()).max_length_tokens == 128
    engine = TransformersEngine(target, 3, 60, ())
    prompts = [[5, 9, 30], list(range(3, 25)), [8], [11, 12, 13, 14, 15, 16, 17]]
    settings = GenerationSettings(max_new_tokens=14)
    outcomes: dict[str, Any] = run(engine, [Request(str(key), each, settings, key) for key, each in enumerate(prompts)])
    for key, prompt in enumerate(prompts):
        answer = outcomes[str(key)].token_ids
        assert len(answer) == 14
        assert recompute(target, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_windows_of_configs() -> None:
    assert get_windows(build_windowed_target("gemma3")).sentence() == "some layers see a window of 6 tokens"
    assert get_windows(build_windowed_target("mistral")).sentence() == "all layers see a window of 6 tokens"
    assert get_windows(build_windowed_target("llama4")).sentence() == "some layers see chunks of 6 tokens"
    assert get_windows(tiny_target("llama")).sentence() == "all layers see the whole text"
    unused = tiny_target("qwen2", sliding_window=WINDOW, use_sliding_window=False)
    assert get_windows(unused).smallest is None
    ignored = tiny_target("llama", sliding_window=WINDOW)
    assert (get_windows(ignored).smallest, ignored.config.sliding_window) == (None, WINDOW)
    assert longest_sequence_tokens(ignored) == 128


def test_window_by_hand() -> None:
    query_n, key_s = torch.tensor([4, 5]), torch.arange(6)
    assert Window(2).hides(query_n, key_s).int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert Window(4, chunked=True).hides(query_n, key_s).int().tolist() == [[1, 1, 1, 1, 0, 0]] * 2


def test_window_that_masks_cannot_express_limits_the_session() -> None:
    target = tiny_target(
        "gpt_neo", num_layers=2, num_heads=4, window_size=WINDOW, attention_types=[[["global", "local"], 1]],
        num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    assert not takes_masks(target)
    assert longest_sequence_tokens(target) == WINDOW


def test_unknown_target_ends_where_its_window_does() -> None:
    """Its class may ignore the window, or our masks: within it both are the same."""
    target = build_windowed_target("gemma3")
    target.config.__class__ = type("OwnConfig", (type(target.config),), {"__module__": "transformers_modules.own"})
    assert longest_sequence_tokens(target) == WINDOW
    assert get_windows(target).sentence() == "some layers see a window of 6 tokens"


def test_hybrids_are_known_by_target_and_by_config() -> None:
    for target in map(tiny_target, HYBRIDS):
        assert has_recurrent_layers(target)
        assert has_recurrent_layers(target.config)
    for target in itertools.chain([tiny_target()], map(build_windowed_target, TARGETS)):
        assert not has_recurrent_layers(target)
        assert not has_recurrent_layers(target.config)
