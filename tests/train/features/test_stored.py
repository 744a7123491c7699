"""Stored features are returned as written, in any order, from our files and from a server's; damage is reported."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_runs import LENGTHS, save_target, tiny_run, token_rows
from torch import Tensor

from draftsmith.data.engines.answer_features import row_file
from draftsmith.errors import UserError
from draftsmith.models.target.features import target_features
from draftsmith.models.target.loading import load_target
from draftsmith.train.drafter.rows import ROWS_COLUMN, FeatureCollator
from draftsmith.train.features.stored import StoredFeatures

TOKENS, LAYERS, HIDDEN = token_rows(), (2, -1), 32


@pytest.fixture
def stored(tmp_path: Path) -> StoredFeatures:
    save_target(tmp_path / "target")
    recipe = tiny_run(tmp_path)
    return StoredFeatures(recipe, TOKENS, load_target(recipe.target)[0], LAYERS)


def write(stored: StoredFeatures) -> list[Tensor]:
    """Store random features [S, L, D] of all rows, in any order; return them."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(length, len(LAYERS), HIDDEN, generator=generator).bfloat16() for length in LENGTHS]
    rows = [3, 0, 4, 1, 2, 7, 6, 5]
    for written, row in enumerate(rows):
        assert stored.missing() == sorted(rows[written:])
        stored.store(row, whole[row])
    assert len(list(stored.folder.iterdir())) == len(rows)
    return whole


def test_rows_are_read_back_as_written(stored: StoredFeatures) -> None:
    whole = write(stored)
    stored.check_complete()
    assert stored.width == len(LAYERS) * HIDDEN
    assert stored.count_tokens([0, 2]) * stored.token_bytes == (12 + 9) * 2 * HIDDEN * 2
    found = torch.zeros(LENGTHS[4] + LENGTHS[0], stored.width, dtype=stored.dtype)
    stored.read([4, 0], found)
    assert torch.equal(found, torch.cat([whole[4], whole[0]]).flatten(1))


@pytest.mark.parametrize("with_last_token", [True, False])
def test_rows_of_a_server_are_normed(stored: StoredFeatures, with_last_token: bool) -> None:
    """They are in the target's dtype; the states of an answer's last token are missing, and those before stand in."""
    target, ids = stored._target, torch.tensor(stored.ids(0))
    states = target_features(target, ids[None], layers=stored.served)[0].unflatten(1, (2, HIDDEN))
    kept = slice(0, len(ids) if with_last_token else len(ids) - 1)
    stored.store(0, states)
    (file,) = stored.folder.iterdir()
    save_file({"hidden_states": states[kept], "token_ids": ids[kept], "layers": torch.tensor(stored.served)}, file)
    expected = target_features(target, ids[None], layers=LAYERS)[0].unflatten(1, (2, HIDDEN))
    torch.testing.assert_close(stored.take(0)[:-1], expected[:-1].bfloat16(), atol=0.05, rtol=0)


def test_damaged_and_missing_rows_are_named(stored: StoredFeatures) -> None:
    write(stored)
    (stored.folder.parent / "index.json").touch()  # of an earlier release
    row, file = 3, row_file(stored.folder, stored.ids(3))
    tensors = load_file(file)
    for damage in (
        {**tensors, "token_ids": tensors["token_ids"] + 1},
        {**tensors, "layers": torch.tensor([1, 4])},
        {**tensors, "hidden_states": tensors["hidden_states"][:, :, 1:].contiguous()},
        {**tensors, "hidden_states": tensors["hidden_states"] * torch.nan},
    ):
        save_file(damage, file)
        with pytest.raises(UserError, match=rf"{file.name}, a file of features, has .*: delete it, and"):
            stored.take(row)
    file.write_bytes(b"no header")
    with pytest.raises(UserError, match=rf"{file.name}, a file of features, is damaged"):
        stored.take(row)
    file.unlink()
    with pytest.raises(UserError, match=r"no features of 1 of 8 rows, .*; index\.json there"):
        stored.check_complete()


def test_batches_are_padded(stored: StoredFeatures) -> None:
    """The shorter row is padded with zeros; a packed row has one after the other; the same from a worker's copy."""
    whole, collator = write(stored), FeatureCollator(stored)
    rows = [
        {"input_ids": [1] * LENGTHS[row], "loss_mask": [1] * LENGTHS[row], ROWS_COLUMN: [row]} for row in (1, 2)
    ]  # fmt: skip
    packed = {"input_ids": [1] * 23, "loss_mask": [1] * 23, ROWS_COLUMN: [4, 0]}
    assert torch.equal(collator([packed])["features"][0], torch.cat([whole[4], whole[0]]).flatten(1))
    batch = collator(rows)
    assert batch["features"].shape == (2, 14, 2 * HIDDEN)
    assert torch.equal(batch["features"][0], whole[1].flatten(1))
    assert torch.equal(batch["features"][1, :9], whole[2].flatten(1))
    assert not batch["features"][1, 9:].any()
    sent = pickle.loads(pickle.dumps(collator))(rows)
    assert all(torch.equal(sent[name], value) for name, value in batch.items())
