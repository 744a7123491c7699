"""The page of the formats says what the rules say, and what it says of real vLLM is what real vLLM is asked."""

import pytest
from support.served_drafters import SERVED

from draftsmith.models.base.registry import drafter_kinds
from draftsmith.models.formats.served import EXPORTERS, FORMATS, LOADED_IN_VLLM
from draftsmith.models.formats.table import CONDITIONS, table


def test_every_pair_has_a_cell() -> None:
    rows = [line.split(" | ") for line in table().splitlines() if line.startswith("| `")]
    cells = {row[0].strip("| `"): row[1:] for row in rows if len(row) == 1 + len(FORMATS)}
    assert set(cells) == set(drafter_kinds())
    assert all(cell.startswith(("as `", "yes;", "no: ")) for row in cells.values() for cell in row)


def test_what_is_said_of_real_vllm_is_tried() -> None:
    assert {(kind, to) for kind, to, _ in SERVED.values()} == LOADED_IN_VLLM
    loaded = {kind for kind, to in LOADED_IN_VLLM if to == "vllm"}
    assert {kind for kind, to in EXPORTERS if to == "vllm"} == {*loaded, "dspark"}  # which needs a GPU there


@pytest.mark.parametrize("condition", CONDITIONS, ids=[f"{kind}-{words}" for kind, _, _, words in CONDITIONS])
def test_every_condition_is_refused_somewhere(condition: tuple[str, str, dict[str, object], str]) -> None:
    kind, _, _, words = condition
    assert f"| `{kind}` | {words} | " in table()
