"""Counters of drafting, read off the page where vLLM shows them."""

import pytest

from draftsmith.eval.serving.endpoint import DraftCounts

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 13.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="1"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="m"} 1.05e+02
vllm:num_requests_running{engine="0",model_name="m"} 3.0
"""


def test_from_a_servers_page() -> None:
    counts = DraftCounts.of_page(PAGE)
    assert counts == DraftCounts(10, 30, 13, (8, 4, 1), 105)
    assert counts.tau == pytest.approx(2.3)
    assert counts.acceptance_by_depth == [0.8, 0.4, 0.1]
    assert counts.acceptance_conditional == [0.8, 0.5, 0.25]


def test_engines_behind_one_page_are_added() -> None:
    counts = DraftCounts.of_page(PAGE + PAGE.replace('engine="0"', 'engine="1"'))
    assert counts == DraftCounts(20, 60, 26, (16, 8, 2), 210)


def test_a_page_of_another_program() -> None:
    assert DraftCounts.of_page('sglang:num_running_reqs{model="m"} 1.0\n') is None
    without_drafts = DraftCounts.of_page('vllm:generation_tokens_total{engine="0"} 7.0\n')
    assert without_drafts == DraftCounts(generated_tokens=7)
    assert without_drafts.tau is None
    assert without_drafts.acceptance_by_depth == without_drafts.acceptance_conditional == []


def test_what_lay_between() -> None:
    """The first reading may be from before the first draft, when no depth is known yet."""
    first, last = DraftCounts(generated_tokens=2), DraftCounts(10, 30, 13, (8, 4, 1), 105)
    assert last - first == DraftCounts(10, 30, 13, (8, 4, 1), 103)
    assert last - last == DraftCounts(0, 0, 0, (0, 0, 0), 0)


def test_after_a_depth_that_nothing_reached() -> None:
    assert DraftCounts(2, 6, 0, (0, 0, 0)).acceptance_conditional == [0.0, None, None]


def test_of_our_own_rounds() -> None:
    """Rounds of depth 3, 3, 3 and 1 that kept 3, 0, 1 and 1."""
    counts = DraftCounts.of_rounds([3, 0, 1, 1], [3, 3, 3, 1])
    assert counts == DraftCounts(4, 10, 5, (3, 1, 1))
