"""Labels of groups by hand; training computes only the active rows, which does not change the result."""

from typing import Any

import pytest
import torch
from support.tiny_models import LENGTH, random_batch, tiny_drafter_of, tiny_parallel, tiny_target

from draftsmith.models.base.group_wise import MaskOptions
from draftsmith.models.groups.layout import Groups, active, depth_labels

WITHOUT = {"first_token": False}


def test_labels_and_rows_by_hand() -> None:
    """x = 10..16, assistant tokens at 2, 3 and 5: groups 1, 2 and 4 have a label at depth 1, group 1 at depth 2 too."""
    labels = depth_labels(torch.arange(10, 17)[None], torch.tensor([[0, 0, 1, 1, 0, 1, 0]]), 3)
    expected = [[-100, 12, 13, -100, 15, -100, -100], [-100, 13, -100, -100, -100, -100, -100], [-100] * 7]
    assert labels[0].tolist() == expected
    groups = Groups.of(torch.arange(10, 17)[None], labels, active(labels))
    found = list(zip(groups.row_n.tolist(), groups.token_n.tolist(), strict=True))
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]
    assert groups.position_n.tolist() == [0, 1, 2, 3, 4, 2]
    # Depth, label and previous token of groups 1, 2 and 4, and of group 1 at depth 2.
    assert [part.tolist() for part in groups.labels(groups.labelled_m)] == [
        [0, 0, 0, 1],
        [12, 13, 15, 13],
        [1, 2, 4, 2],
    ]


@pytest.mark.parametrize(
    ("least", "expected"), [(0.0, [1.0, 0.7, 0.49, 0.343]), (0.4, [1.0, 0.7, 0.49, 0.4]), (0.8, [1.0, 0.8, 0.8, 0.8])]
)
def test_conditional_mask_drop(least: float, expected: list[float]) -> None:
    """[MASK]_j stays with probability ratio**j, only if [MASK]_{j-1} stays; real tokens always stay."""
    torch.manual_seed(0)
    labels = torch.ones(8, 4, 500, dtype=torch.long)
    options = MaskOptions(num_masks=3, keep_ratio=0.7, keep_ratio_min=least)
    kept = active(labels, options.kept_shares)
    assert kept[:, 0].all()
    assert not (kept[:, 2:] & ~kept[:, 1:-1]).any()
    shares = kept.float().mean((0, 2))
    torch.testing.assert_close(shares, torch.tensor(expected), atol=0.03, rtol=0)


def test_one_document_per_row_is_not_packed() -> None:
    """The rows stay unchanged for any first position."""
    labels = torch.full((1, 2, 5), 7)
    ids = labels[:, 0]
    groups = Groups.of(ids, labels, active(labels), torch.arange(7, 12)[None])
    assert (groups.documents, groups.core_shape, groups.is_full) == (None, (1, 2, 5), True)
    assert torch.equal(groups.core_index_n, torch.arange(10))
    without = Groups.of(ids, labels, active(labels), first_token=False)
    assert (without.core_shape, without.is_full, without.index_n.tolist()) == (
        (1, 2, 4), True, [1, 2, 3, 4, 6, 7, 8, 9],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dflash", {}), ("dflash2", {}), ("dspark", {}), ("eagle3", WITHOUT), ("peagle", WITHOUT)],
)
@pytest.mark.parametrize("documents", [1, 2])
def test_documents_of_one_token_have_no_loss(kind: str, options: dict[str, Any], documents: int) -> None:
    """Alone and packed, their only token is never predicted, whatever the loss mask says."""
    target = tiny_target(num_hidden_layers=4)
    drafter, ids = tiny_drafter_of(kind, target, **options).train(), torch.full((1, documents), 7)
    features, teacher = drafter.training_features(target, ids)
    output = drafter(ids, features, torch.ones_like(ids), torch.zeros_like(ids), teacher)
    output.loss.backward()
    assert (output.loss.item(), output.depth_count.sum().item()) == (0.0, 0)


def test_no_label_is_in_another_document() -> None:
    """Logits of packed documents are those of each alone, but for depths that would cross into the second one."""
    target = tiny_target()
    drafter, batch = tiny_parallel(target), random_batch(target, batch=1)
    ids, features, half = batch["input_ids"], batch["features"], LENGTH // 2
    positions = torch.cat([torch.arange(half), torch.arange(LENGTH - half)])[None]
    with torch.no_grad():
        packed = drafter.group_logits(ids, features, positions)
        alone = drafter.group_logits(ids[:, half:], features[:, half:])
    torch.testing.assert_close(packed[:, :, half:], alone, atol=1e-5, rtol=1e-5)
    has_label = packed[0, :, :half].isfinite().all(-1)
    assert has_label.sum(1).tolist() == [half - 1 - depth for depth in range(len(has_label))]


@pytest.mark.parametrize("first_token", [True, False])
def test_active_rows_skip_padding(first_token: bool) -> None:
    """Rows of 5, 2 and 3 active tokens out of 6 are concatenated; without first tokens each has one less.

    Attention then costs 25 + 4 + 9 of the 3 * 36 that it would.
    """
    labels = torch.full((3, 1, 6), -100)
    labels[0, 0, 4] = labels[1, 0, 1] = labels[2, 0, 2] = 7
    ids = labels[:, 0]
    rows, skipped = (ids, labels, active(labels), None, first_token), int(not first_token)
    groups = Groups.of(*rows, in_documents=True)
    assert groups.documents is not None
    bounds_d, longest = groups.documents
    assert bounds_d.diff().tolist() == [5 - skipped, 2 - skipped, 3 - skipped]
    assert longest == 5 - skipped
    tokens = [6 * row + place for row, length in enumerate((5, 2, 3)) for place in range(skipped, length)]
    assert groups.token_n.tolist() == tokens
    assert (groups.core_shape, groups.is_full) == ((1, 1, len(tokens)), True)
    assert Groups.of(*rows).core_shape == (3, 1, 6 - skipped)


def test_first_token_of_a_later_document_has_no_place_without_first_tokens() -> None:
    """A document of one token comes first: the second one's first token, which has no row, is no key either."""
    labels = torch.tensor([[[-100, -100, -100, 7, -100]]])
    positions = torch.tensor([[0, 0, 1, 2, 3]])
    groups = Groups.of(labels[:, 0], labels, active(labels), positions, first_token=False)
    assert groups.documents is not None
    assert (groups.documents[0].tolist(), groups.token_n.tolist()) == ([0, 0, 2], [2, 3])
