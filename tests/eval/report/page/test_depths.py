"""Marginal and conditional acceptance, of the same draft lengths counted twice."""

import pytest
from support.report_facts import TIMING

from draftsmith.eval.report.page.depths import MOST_DEPTHS, depths_of
from draftsmith.eval.report.summary import acceptance_by_depth


def test_marginal_is_counted_over_all_rounds() -> None:
    """Ten rounds that kept 0 (5 times), 1 (3) and 2 (2): 5 of 10 kept depth 1, 2 of 10 depth 2."""
    lengths = [0] * 5 + [1] * 3 + [2] * 2
    (found,) = depths_of([TIMING[0] | {"acceptance_by_depth": acceptance_by_depth(lengths)}])
    assert [(each.depth, each.marginal, each.conditional) for each in found.depths] == [
        (1, 0.5, 0.5),
        (2, pytest.approx(0.2), pytest.approx(0.4)),
    ]
    assert found.tau_without_bonus == pytest.approx(sum(lengths) / len(lengths))
    assert found.more == 0


def test_what_hardly_happens_is_counted_not_listed() -> None:
    row = TIMING[0] | {"acceptance_by_depth": [0.9] * (MOST_DEPTHS + 3)}
    (found,) = depths_of([row])
    assert (len(found.depths), found.more) == (MOST_DEPTHS, 3)
    (found,) = depths_of([row | {"acceptance_by_depth": [0.001, 0.5, 0.5]}])
    assert ([each.depth for each in found.depths], found.more) == ([1], 2)


def test_who_keeps_most_is_first_and_who_drafts_nothing_is_missing() -> None:
    rows = [
        TIMING[0] | {"method": "autoregressive", "acceptance_by_depth": []},
        TIMING[0] | {"method": "less", "acceptance_by_depth": [0.3]},
        TIMING[0] | {"method": "hot", "temperature": 1.0, "acceptance_by_depth": [0.9]},
        TIMING[0] | {"method": "more", "acceptance_by_depth": [0.6]},
    ]
    assert [each.method for each in depths_of(rows)] == ["more", "less", "hot"]
