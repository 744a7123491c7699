"""Loss, gradients and drafts of every kind of drafter equal the golden numbers; `support/goldens.py` remakes them."""

import json
from typing import Any

import pytest
from support.goldens import FILE, GOLDEN_CASES, NAMES, get_goldens

TOLERANCE = 1e-12  # relative, in fp64
GOLDENS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_case_has_goldens() -> None:
    assert list(GOLDENS) == NAMES


@pytest.mark.parametrize(("name", "case"), [*zip(NAMES, GOLDEN_CASES, strict=True)], ids=NAMES)
def test_goldens(name: str, case: tuple[str, dict[str, Any]]) -> None:
    result, golden = get_goldens(*case), GOLDENS[name]
    for batch in ("padded", "packed"):
        check_training(result[batch], golden[batch])
    assert [token for token, _ in result["drafts"]] == [token for token, _ in golden["drafts"]]
    # Decoders return fp32 logits.
    probabilities = [probability for _, probability in golden["drafts"]]
    assert [probability for _, probability in result["drafts"]] == pytest.approx(probabilities, rel=1e-5)


def check_training(result: dict[str, Any], golden: dict[str, Any]) -> None:
    """Check counts exactly, sums relatively, and gradient sums that may cancel relative to the gradient's norm."""
    for key in ("label_counts", "correct", "labels", "correct_groups"):
        assert result[key] == golden[key], key
    assert result["loss"] == pytest.approx(golden["loss"], rel=TOLERANCE)
    assert result["nats"] == pytest.approx(golden["nats"], rel=TOLERANCE)
    assert result["gradients"].keys() == golden["gradients"].keys()
    for name, (length, product) in golden["gradients"].items():
        assert result["gradients"][name][0] == pytest.approx(length, rel=TOLERANCE), name
        assert result["gradients"][name][1] == pytest.approx(product, rel=TOLERANCE, abs=100 * TOLERANCE * length), name
