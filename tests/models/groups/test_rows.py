"""Training computes only the rows that matter, and nothing about the result changes by it."""

import pytest
import torch
from support.tiny_models import MASKS, random_batch, tiny_parallel, tiny_target

from draftsmith.models.groups.alignment import depth_labels
from draftsmith.models.groups.rows import GroupRows


def test_the_rows_by_hand() -> None:
    """x = 10..16, assistant tokens at 2, 3 and 5: groups 1, 2 and 4 have a label at depth 1, group 1 at depth 2 too."""
    labels = depth_labels(torch.arange(10, 17)[None], torch.tensor([[0, 0, 1, 1, 0, 1, 0]]), 3)
    rows = GroupRows.that_matter(labels)
    found = list(zip(rows.stream_n.tolist(), rows.position_n.tolist(), strict=True))
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]


def test_packing_is_lossless() -> None:
    """The hidden state of every present row is the one that the full grid gives."""
    target = tiny_target()
    drafter = tiny_parallel(target, num_layers=2)
    batch = random_batch(target)
    labels = depth_labels(batch["input_ids"], batch["loss_mask"], MASKS + 1)
    rows = GroupRows.that_matter(labels)
    assert len(rows.index_n) < labels.numel() / 2
    with torch.no_grad():
        packed = drafter.rows_hidden(rows, batch["input_ids"], batch["features"])
        full = drafter.stream_hidden(batch["input_ids"], batch["features"]).flatten(0, 2)
    torch.testing.assert_close(packed, full[rows.index_n])


@pytest.mark.parametrize(
    ("least", "expected"), [(0.0, [1.0, 0.7, 0.49, 0.343]), (0.4, [1.0, 0.7, 0.49, 0.4]), (0.8, [1.0, 0.8, 0.8, 0.8])]
)
def test_conditional_drop(least: float, expected: list[float]) -> None:
    """[MASK]_j stays with probability ratio**j, only where [MASK]_{j-1} stays; real tokens always stay."""
    torch.manual_seed(0)
    labels = torch.ones(8, 4, 500, dtype=torch.long)
    rows = GroupRows.that_matter(labels, keep_ratio=0.7, keep_ratio_min=least)
    present = torch.zeros(labels.numel(), dtype=torch.bool)
    present[rows.index_n] = True
    present = present.view(labels.shape)
    assert present[:, 0].all()
    assert not (present[:, 2:] & ~present[:, 1:-1]).any()
    shares = present.float().mean((0, 2))
    torch.testing.assert_close(shares, torch.tensor(expected), atol=0.03, rtol=0)


def test_drop_only_in_training() -> None:
    target = tiny_target()
    drafter = tiny_parallel(target, keep_ratio=0.5)
    batch = random_batch(target)
    everything = tiny_parallel(target)(**batch)
    assert torch.equal(drafter.eval()(**batch).depth_count, everything.depth_count)
    drafter.train()
    torch.manual_seed(0)
    dropped = drafter(**batch)
    assert dropped.depth_count[0] == everything.depth_count[0]
    assert dropped.depth_count[1:].sum() < everything.depth_count[1:].sum()
    assert torch.isfinite(dropped.loss)


def test_documents_by_hand() -> None:
    """Two streams of a row of 5: documents x_0 x_1 x_2 and x_3 x_4, the second without its first token's mask."""
    index = torch.tensor([0, 1, 2, 3, 4, 5, 6, 9])  # stream 0, then masks at 0, 1 and 4
    rows = GroupRows((1, 2, 5), index)
    packed = rows.in_documents(torch.tensor([[0, 1, 2, 0, 1]]))
    found = [(places.tolist(), document.shape, document.index_n.tolist()) for places, document in packed.documents]
    assert found == [([0, 1, 2, 5, 6], (1, 2, 3), [0, 1, 2, 3, 4]), ([3, 4, 7], (1, 2, 2), [0, 1, 3])]
    values = torch.arange(8.0).view(1, 1, 8, 1)
    grids = packed.to_grids(values)
    assert [grid.flatten().tolist() for grid in grids] == [[0, 1, 2, 5, 6, 0], [3, 4, 0, 7]]
    assert torch.equal(packed.from_grids(grids), values.transpose(1, 2))
    assert rows.in_documents(torch.arange(7, 12)[None]) is rows  # one document, whatever its first position
