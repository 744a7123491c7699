"""benchmarks/drafters/confidence.py: its rows are those of decoding, and its scores those of the definitions."""

import math
from typing import Any

import pytest
import torch
from support.benchmark_scripts import benchmark
from support.tiny_models import VOCABULARY, tiny_drafter_of, tiny_target

from draftsmith.models.target.features import target_features

script = benchmark("drafters/confidence")


def test_scores_of_known_rows() -> None:
    """Two rows of two tokens: q is right on average, and c says nothing."""
    q, right = torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([[True, False], [False, True]])
    sure = torch.tensor([0.5, 0.9])
    found = script.figures_of(q, right, sure)
    assert found["log_loss"]["q"] == pytest.approx(-(2 * math.log(0.8) + 2 * math.log(0.2)) / 4, abs=1e-5)
    said = [(0.4, 1), (0.1, 0), (0.72, 0), (0.18, 1)]
    expected = -sum(math.log(p if is_right else 1 - p) for p, is_right in said) / 4
    assert found["log_loss"]["q_times_c"] == pytest.approx(expected, abs=1e-5)
    # Half of all are right, whatever q says.
    assert found["log_loss"]["fitted_to_q"] == pytest.approx(math.log(2), abs=1e-4)
    assert [(part["rows"], part["first_right"], part["others_right"]) for part in found["by_confidence"]] == [
        (1, 1.0, 0.0),
        (1, 0.0, 1.0),
    ]


def test_rows_are_those_that_decoding_drafts() -> None:
    target = tiny_target()
    drafter: Any = tiny_drafter_of("dspark", target, block_size=3, markov_rank=4)
    ids = torch.randint(0, VOCABULARY, (1, 9))
    q, right, sure = script.candidates(drafter, target, ids, 5)
    # Of depths 1 to 3 those rows whose token is one of the answer's four: s from 4, 3 and 2 on.
    assert len(sure) == 3 * 4
    features = target_features(target, ids, layers=drafter.feature_layers)
    decoder = drafter.decoder(16)
    decoder.start(ids[0, :5], features[0, :5])
    first = decoder.begin().softmax(-1)[0]
    torch.testing.assert_close(q[0], first.topk(script.BRANCH).values)
    assert right[0].tolist() == (first.topk(script.BRANCH).indices == ids[0, 5]).tolist()
    second = decoder.expand([int(ids[0, 5])], [0]).softmax(-1)[0]
    torch.testing.assert_close(q[4 + 1], second.topk(script.BRANCH).values)
