"""Targets that scale or cap their logits: teachers and drafters have the target's distribution."""

from typing import Any

import pytest
import torch
from support.tiny_models import VOCABULARY, capped_target, random_batch, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.errors import UserError
from draftsmith.eval.decoding.generate import generate
from draftsmith.eval.decoding.session import TargetSession
from draftsmith.eval.methods.drafter import build_tree_drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.formats.exporting import EXPORTERS, refusal
from draftsmith.models.sampling import Sampling
from draftsmith.models.target.architectures import logit_shape
from draftsmith.models.target.checks import check_logits
from draftsmith.models.target.features import target_features
from draftsmith.models.target_logits import PLAIN, LogitShape
from draftsmith.recipes.schema import MethodConfig

SCALED = [
    ("cohere2", {"logit_scale": 0.25}, LogitShape(0.25)),
    ("cohere2", {"logit_scale": 0.25, "logits_scaling": 8.0}, LogitShape(0.25)),
    ("granite", {"logits_scaling": 8.0}, LogitShape(0.125)),
    ("hyperclovax", {"logits_scaling": 8.0}, LogitShape(8.0)),
    ("gemma2", {"final_logit_softcapping": 30.0}, LogitShape(1.0, 30.0)),
    ("recurrent_gemma", {"logits_soft_cap": 20.0}, LogitShape(1.0, 20.0)),
    ("llama", {}, PLAIN),
    ("llama", {"logit_scale": 0.5}, PLAIN),  # a key that this class ignores
]
# Kinds that cover all uses of the target's head.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("parallel", {"num_masks": 2}),
    ("parallel", {"num_masks": 2, "draft_vocab_size": 40, "markov_rank": 5}),
    ("eagle3", {"feature_layers": [0, 1]}),
    ("eagle3", {"feature_layers": [0, 1], "draft_vocab_size": 40}),
    ("medusa", {"loss": "kl", "num_heads": 2}),
    ("medusa", {"loss": "kl", "num_heads": 2, "lm_heads": "shared"}),
    ("dflash", {"block_size": 3, "feature_layers": [0, 1], "loss": "kl", "sample_from_anchor": True}),
]


@pytest.mark.parametrize(("model_type", "keys", "expected"), SCALED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logit_scale_and_cap_are_the_targets(
    model_type: str, keys: dict[str, Any], expected: LogitShape, dtype: torch.dtype
) -> None:
    target = tiny_target(model_type, **keys).to(dtype)
    assert logit_shape(target) == expected == check_logits(target)
    ids = torch.randint(3, VOCABULARY, (1, 9))
    product = target.get_output_embeddings()(target_features(target, ids))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(expected(product), target(input_ids=ids).logits, rtol=tolerance, atol=tolerance)


def test_other_functions_of_logits_are_refused() -> None:
    target = tiny_target()

    forward = type(target).forward

    class Strange(type(target)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output.logits = output.logits.sqrt().nan_to_num()
            return output

    target.__class__ = Strange
    with pytest.raises(UserError, match="logits of Strange are not its LM head's, scaled or capped by the keys"):
        check_logits(target)
    with pytest.raises(UserError, match="logits of ModernBertDecoderForCausalLM are not its LM head's"):
        load_drafter_class("parallel").from_target(tiny_target("modernbert-decoder"), {})


@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_unknown_target_is_read_by_its_keys_and_compared(scale: float) -> None:
    """Here a class with its own code that ignores the key."""
    target = tiny_target()
    target.config.__class__ = type("OwnConfig", (type(target.config),), {"__module__": "transformers_modules.own"})
    target.config.logit_scale = scale
    assert logit_shape(target) == LogitShape(scale)
    if scale == 1.0:
        assert check_logits(target) == PLAIN
    else:
        with pytest.raises(UserError, match="largest difference"):
            check_logits(target)


def build_twins() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build two equal functions: in one the head is divided by 8 and its product multiplied by 8."""
    one = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 8**-0.5}
    plain, scaled = (
        tiny_target("granite", tie_word_embeddings=False, logits_scaling=scale, **one).double()
        for scale in (1.0, 0.125)
    )
    scaled.lm_head.weight.mul_(0.125)
    return plain, scaled


MORE_KINDS: list[tuple[str, dict[str, Any]]] = [
    *KINDS,
    ("dflash2", {"block_size": 3, "feature_layers": [0, 1], "selector_top_k": 4}),
    ("eagle", {}),
    ("draft_model", {"num_layers": 1}),
]


@pytest.mark.parametrize(("kind", "options"), MORE_KINDS, ids=str)
def test_scaled_target_trains_and_drafts_like_its_unscaled_twin(kind: str, options: dict[str, Any]) -> None:
    losses, grads, answers = list[Tensor](), list[list[Tensor]](), list[Any]()
    for target in build_twins():
        torch.manual_seed(11)
        drafter = load_drafter_class(kind).from_target(target, options).double()
        drafter.attach(target)
        loss = drafter(**random_batch(target, drafter=drafter)).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append([p.grad for p in drafter.parameters() if p.grad is not None])
        decoder, sampling = drafter.freeze().decoder(64), Sampling(1.0)
        generator = torch.Generator().manual_seed(3)
        method = build_tree_drafter(MethodConfig(name="x"), decoder, sampling, generator)
        with TargetSession(target, 64, drafter.feature_layers) as session:
            record = generate(session, method, [5, 9, 20, 33], sampling, 12, frozenset(), generator)
        answers.append((record.ids, record.accept_lengths))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("kind", "options", "to", "refused"),
    [
        ("eagle3", {"feature_layers": [1, 2, 3]}, "vllm", False),
        ("eagle3", {"feature_layers": [1, 2, 3]}, "sglang", True),
        ("eagle3", {"feature_layers": [1, 2, 3], "draft_vocab_size": 40}, "sglang", False),
        ("dflash", {}, "vllm", True),
        ("medusa", {}, "vllm", False),
        ("draft_model", {}, "vllm", True),
        ("eagle3", {"feature_layers": [1, 2, 3]}, "gguf", True),
    ],
    ids=str,
)
def test_export_is_refused_if_the_reader_has_other_logits(
    kind: str, options: dict[str, Any], to: str, refused: bool
) -> None:
    target = tiny_target("cohere", num_hidden_layers=4, logit_scale=0.25)
    drafter = load_drafter_class(kind).from_target(target, options)
    why = refusal(drafter.config, to)
    assert (why is not None) == refused, why
    if why is not None:
        assert "are scaled by 0.25, and the reader's are not: train with drafter.kind=eagle3" in why
    elif kind == "eagle3":
        written = EXPORTERS[kind, to].write(drafter).config
        assert written.get("logit_scale") == (None if "draft_vocab_size" in options else 0.25)


def test_capped_head_is_not_exported() -> None:
    config = load_drafter_class("eagle3").from_target(capped_target(), {"feature_layers": [0, 1]}).config
    assert config.target_logits == LogitShape(1.0, 2.0)
    assert not EXPORTERS["eagle3", "vllm"].logits_fit(config)
