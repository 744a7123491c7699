"""Golden numbers of every kind of drafter: loss, counts, gradients and drafts of one fixed batch, in fp64.

Write those of new cases, and of a change that should change them, with

    PYTHONPATH=tests python -m support.goldens

Others stay, digit for digit: the last digits depend on the processor.

Weights are made of integers, and norms and RoPE are computed in fp64 in place of transformers' fp32, so the numbers are
equal on all processors up to the rounding of fp64.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafter_cases import BY_GROUPS, CASES, FREQUENT, TARGET_LAYERS, greedy_logits
from support.tiny_models import tiny_target
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from draftsmith.models.base.drafter import Drafter
from draftsmith.models.base.registry import load_drafter_class
from draftsmith.models.decoding.decoders import StepwiseDecoder
from draftsmith.models.groups.layout import Groups
from draftsmith.models.loss import has_teacher
from draftsmith.models.target.features import target_features
from draftsmith.train.drafter.rows import collate_right_padded, pack_documents

TOLERANCE = 1e-12  # relative, in fp64
FILE = Path(__file__).resolve().parents[1] / "models" / "goldens.json"
DOCUMENT_LENGTHS = (9, 14, 4, 1, 7)
WARM_UP_DONE = 10_000
# Tokens of all documents; LM heads make them likely, so that some labels are drafted.
TOKENS = (3, 9)
# In addition to the cases of all tests: dropped rows with row weights, and noise with a Markov head.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("parallel", {"keep_ratio": 0.7, "keep_ratio_min": 0.3, "until_first_error": True}),
    ("eagle3", {"until_first_error": True, "loss": "tv"}),
    ("dspark", {"markov_rank": 5, "until_first_error": True, "draft_vocab_size": 40}),
    ("medusa2", {"lora_rank": 2, "loss": "kl"}),
]
GOLDEN_CASES = [
    *CASES,
    *BY_GROUPS,
    *MORE,
]
NAMES = [f"{kind} {json.dumps(options, sort_keys=True)}" for kind, options in GOLDEN_CASES]


def get_goldens(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the golden numbers of one case, for padded and packed documents, and its drafts."""
    with _in_fp64():
        target = tiny_target(num_hidden_layers=TARGET_LAYERS).double()
        _fill(target, seed=1)
        drafter = load_drafter_class(kind).from_target(target, options).double()
        drafter.prepare_draft_vocab(FREQUENT)
        _fill(drafter, seed=2)
        drafter.training_step = WARM_UP_DONE
        rows = [
            {"input_ids": _integers(length, *TOKENS, place).tolist(), "loss_mask": _mask(length)}
            for place, length in enumerate(DOCUMENT_LENGTHS)
        ]
        packed = [pack_documents(rows[:3]), pack_documents(rows[3:])]
        return {
            "padded": _trained(drafter, target, collate_right_padded(rows), is_part=False),
            "packed": _trained(drafter, target, collate_right_padded(packed), is_part=True),
            "drafts": _drafts(drafter.freeze(), target, rows[1]["input_ids"]),
        }


def _trained(drafter: Drafter, target: Any, batch: dict[str, Tensor], is_part: bool) -> dict[str, Any]:
    """Return loss, counts by depth and fingerprints of gradients, per weight or, for a part of a batch, of all."""
    drafter.train().zero_grad()
    ids, mask, positions = batch["input_ids"], batch["loss_mask"], batch.get("position_ids")
    drafter.generator = torch.Generator().manual_seed(5)
    groups = drafter.groups(ids, mask, positions)
    counts = 2 * drafter.label_counts(groups)
    features, teacher = drafter.training_features(target, ids, positions)
    divisors = counts if is_part else _count_rows(drafter, groups)
    output = drafter(ids, features, mask, positions, teacher, divisors, groups)
    output.loss.backward()
    gradients = {name: weight.grad for name, weight in drafter.named_parameters() if weight.grad is not None}
    if is_part:
        gradients = {"all": torch.cat([gradient.flatten() for gradient in gradients.values()])}
    return {
        "loss": output.loss.item(),
        "label_counts": counts.flatten().tolist(),
        "nats": output.depth_loss_sum.tolist(),
        "correct": output.depth_correct.tolist(),
        "labels": output.depth_count.tolist(),
        "correct_groups": output.correct_bgs.flatten().nonzero().flatten().tolist(),
        "gradients": {name: _fingerprint(gradient) for name, gradient in gradients.items()},
    }


def _count_rows(drafter: Drafter, groups: Groups) -> Tensor:
    """Return `Drafter.label_counts` of the rows that are computed, also where others were dropped at random."""
    depth_m, label_m, _ = groups.labels(groups.labelled_m)
    is_read_m = (drafter.label_columns(label_m) >= 0) | has_teacher(drafter.config.loss)
    read_m = is_read_m.double()
    zeros_g = read_m.new_zeros(drafter.config.num_depths)
    return torch.stack([zeros_g.index_add(0, depth_m, counted_m) for counted_m in (torch.ones_like(read_m), read_m)])


def _drafts(drafter: Drafter, target: Any, ids: list[int]) -> list[list[float]]:
    """Return the tokens and probabilities of the most likely path by depth, for two rounds."""
    prompt, drafts = torch.tensor(ids), list[list[float]]()
    features = target_features(target, prompt[None], None, None, drafter.feature_layers)[0]
    decoder: Any = drafter.decoder(len(ids) + 16)
    decoder.start(prompt[:4], features[:4])
    for first, last in ((4, 5), (5, 8)):
        decoder.observe(prompt[first:last], features[first - 1 : last - 1])
        for row in greedy_logits(decoder, 3 if isinstance(decoder, StepwiseDecoder) else drafter.config.num_depths):
            column = int(row.argmax())
            drafts.append([decoder.columns.tokens([column])[0], float(row.softmax(-1)[column])])
    return drafts


def _fingerprint(gradient: Tensor) -> list[float]:
    """Return the norm, and the product with a fixed vector."""
    fixed = _integers(gradient.numel(), -500, 501, 9).double() / 500
    return [float(gradient.double().norm()), float(gradient.double().flatten() @ fixed)]


def _integers(count: int, low: int, high: int, seed: int) -> Tensor:
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(seed))


def _mask(length: int) -> list[int]:
    """Return a loss mask whose answer starts with the document, so leaks between documents would show."""
    return [int(token % 7 != 2) for token in range(length)]


@torch.no_grad()
def _fill(model: nn.Module, seed: int) -> None:
    """Fill all weights except the drafter's borrowed ones with multiples of 1/1000, around 1 in norms."""
    for number, (name, weight) in enumerate(model.named_parameters()):
        values = _integers(weight.numel(), -1000, 1001, 100 * seed + number).double().view(weight.shape) / 1000
        weight.copy_(1 + 0.2 * values if "norm" in name and weight.dim() == 1 else 0.35 * values)
        if "lm_head" in name and weight.dim() == 2:
            weight[slice(*TOKENS)] *= 4


@contextmanager
def _in_fp64() -> Iterator[None]:
    """Make transformers' norms and RoPE compute in fp64."""

    def normed(self: Any, hidden: Tensor) -> Tensor:
        variance = hidden.double().pow(2).mean(-1, keepdim=True)
        return (self.weight * (hidden.double() * torch.rsqrt(variance + self.variance_epsilon))).to(hidden.dtype)

    def rotary(self: Any, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        size = 2 * len(self.inv_freq)
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = (position_ids.double()[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)

    with pytest.MonkeyPatch.context() as patch:
        for norm in (LlamaRMSNorm, Qwen3RMSNorm):
            patch.setattr(norm, "forward", normed)
        for embedding in (LlamaRotaryEmbedding, Qwen3RotaryEmbedding):
            patch.setattr(embedding, "forward", rotary)
        yield


def check_goldens(result: dict[str, Any], golden: dict[str, Any]) -> None:
    """Check one case's numbers against the golden ones, up to rounding."""
    for batch in ("padded", "packed"):
        _check_training(result[batch], golden[batch])
    assert [token for token, _ in result["drafts"]] == [token for token, _ in golden["drafts"]]
    # Decoders return fp32 logits.
    probabilities = [probability for _, probability in golden["drafts"]]
    assert [probability for _, probability in result["drafts"]] == pytest.approx(probabilities, rel=1e-5)


def _check_training(result: dict[str, Any], golden: dict[str, Any]) -> None:
    """Check counts exactly, sums relatively, and gradient sums that may cancel relative to the gradient's norm."""
    for key in ("label_counts", "correct", "labels", "correct_groups"):
        assert result[key] == golden[key], key
    assert result["loss"] == pytest.approx(golden["loss"], rel=TOLERANCE)
    assert result["nats"] == pytest.approx(golden["nats"], rel=TOLERANCE)
    assert result["gradients"].keys() == golden["gradients"].keys()
    for name, (length, product) in golden["gradients"].items():
        assert result["gradients"][name][0] == pytest.approx(length, rel=TOLERANCE), name
        assert result["gradients"][name][1] == pytest.approx(product, rel=TOLERANCE, abs=100 * TOLERANCE * length), name


def main() -> None:
    """Write the file, one line for each case; a stored case that differs by rounding only is kept."""
    stored, lines = json.loads(FILE.read_text(encoding="utf-8")), []
    for name, case in zip(NAMES, GOLDEN_CASES, strict=True):
        golden = get_goldens(*case)
        with suppress(KeyError, AssertionError):
            check_goldens(golden, stored[name])
            golden = stored[name]
        lines.append(f"{json.dumps(name)}: {json.dumps(golden)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
