"""The target session: a tree forward equals separate forwards, and the cache holds exactly the committed tokens."""

from typing import Any

import pytest
import torch
from support.half_right import GREEDY, SIZES, TINY
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.eval.decoding import session as session_module
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.method import Autoregressive
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.trees.verify import DraftTree, TreeShape

V = 97


def tiny(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TINY[name], attn_implementation=attention).to(dtype).eval()


@torch.inference_mode()
def forward_without_cache(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and features of a forward without a cache."""
    tokens = torch.tensor([ids])
    return model(tokens).logits[0], model.base_model(tokens).last_hidden_state[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_tree_equals_separate_sequences(name: str, attention: str) -> None:
    model = tiny(name, attention=attention)
    prompt = [5, 9, 3, 30]
    tree = DraftTree([7, 1, 2, 3, 4, 6], TreeShape.of((-1, 0, 0, 2, 2, 4)))
    with TargetSession(model, 40) as session:
        step = session.prefill(prompt)
        logits, features = forward_without_cache(model, prompt)
        torch.testing.assert_close(step.logits, logits[-1:])
        torch.testing.assert_close(step.features, features)
        step = session.forward_tree(tree)
        for node in range(len(tree)):
            sequence = prompt + [tree.tokens[step] for step in tree.shape.path_to(node)]
            logits, features = forward_without_cache(model, sequence)
            torch.testing.assert_close(step.logits[node], logits[-1], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(step.features[node], features[-1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_commit_keeps_only_the_path(name: str) -> None:
    """Several rounds with contiguous and scattered paths and the root alone; then the session is reused."""
    model = tiny(name)
    shape = TreeShape.of((-1, 0, 0, 1, 2, 4))
    with TargetSession(model, 40) as session:
        for prompt in ([5, 9, 3, 30], [8, 8]):
            session.prefill(prompt)
            committed = list(prompt)
            for number, path in enumerate([[0, 2, 4, 5], [0], [0, 1], [0, 1, 3], [0, 2]]):
                tree = DraftTree([(11 * number + 3 * node) % V for node in range(6)], shape)
                step = session.forward_tree(tree)
                last = committed + [tree.tokens[node] for node in shape.path_to(5)]
                torch.testing.assert_close(
                    step.logits[5], forward_without_cache(model, last)[0][-1], atol=1e-6, rtol=1e-5
                )
                session.commit(path)
                committed += [tree.tokens[node] for node in path]
                assert session.cache.length == len(committed)
            step = session.forward_tree(DraftTree([1], TreeShape.chain(0)))
            torch.testing.assert_close(
                step.logits[0], forward_without_cache(model, [*committed, 1])[0][-1], atol=1e-6, rtol=1e-5
            )


def test_too_long_sequences_are_refused() -> None:
    model = tiny("llama")
    with pytest.raises(UserError, match="129 tokens do not fit into the target's 128 positions"):
        TargetSession(model, 129)
    with TargetSession(model, 8) as session, pytest.raises(UserError, match="a prompt of 9 tokens does not fit"):
        session.prefill(list(range(9)))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_target_that_ignores_the_mask_is_refused(layers: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model would silently give wrong answers; the probe compares siblings with separate runs."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config).eval()
    forward = model.forward

    def ignore_mask(*args: Any, attention_mask: Any = None, **options: Any) -> Any:
        return forward(*args, attention_mask=None, **options)

    monkeypatch.setattr(model, "forward", ignore_mask)
    with pytest.raises(UserError, match=r"ignores 4-D attention masks or position ids.*=sdpa or eager"):
        TargetSession(model, 20)
    assert not model.base_model._forward_hooks


def test_probe_runs_once() -> None:
    model = tiny("llama")
    TargetSession(model, 20).close()
    assert model in session_module._probed
    assert not model.base_model._forward_hooks


def test_cudnn_attention_is_off_in_rounds() -> None:
    """cuDNN builds a plan for every new length, so in every round."""
    enabled, seen = torch.backends.cuda.cudnn_sdp_enabled, list[bool]()

    class Noting(Autoregressive):
        def propose(self) -> DraftTree:
            seen.append(enabled())
            return super().propose()

    with TargetSession(tiny("llama"), 40) as session:
        generate(session, Noting(), [5, 9, 33], GREEDY, 4)
    assert seen == [False] * 3
    assert enabled()
