"""The feature cache returns rows as written, in any order; a shard has its name once it is whole; damage is said."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.train.drafter.rows import ROWS_COLUMN, FeatureCollator
from draftsmith.train.features import cache as feature_cache
from draftsmith.train.features.cache import FeatureCache, FeatureIndex, cut_into_shards

LENGTHS, BEGINS = [3, 1, 4, 1, 5], [0, 3, 4, 8, 9]
LAYERS, HIDDEN = (2, -1), 6


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit shards to five tokens of two layers, six wide, in bf16."""
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 5 * 2 * 6 * 2)


def make_index(dtype: str = "bfloat16") -> FeatureIndex:
    itemsize = getattr(torch, dtype).itemsize
    shards = cut_into_shards(LENGTHS, len(LAYERS) * HIDDEN * itemsize)
    return FeatureIndex(LAYERS, HIDDEN, {"data.features.dtype": dtype, "target.model": "x"}, shards)


def write_cache(folder: Path) -> tuple[FeatureIndex, Tensor]:
    """Write a cache; return the index and all features [tokens, L, D] in the order of the rows."""
    index = make_index()
    index.write(folder)
    whole = torch.randn(index.tokens, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = FeatureCache(folder, index, LAYERS)
    for row in (3, 0, 4, 1, 2):
        assert not cache.has(row)
        cache.write(row, whole[BEGINS[row] : BEGINS[row] + LENGTHS[row]].flatten(1))
        assert cache.has(row)
        assert index.missing(folder) == index.shards
    cache.finish_all()
    assert sorted(file.name for file in folder.iterdir()) == [*(shard.file for shard in index.shards), "index.json"]
    return index, whole


@pytest.mark.usefixtures("small_shards")
def test_shards_by_hand() -> None:
    """Shards of 5 tokens: 3 + 1, 4 + 1, 5; a row longer than a shard gets its own."""
    shards = make_index().shards
    assert [(shard.first_row, shard.offsets) for shard in shards] == [(0, [0, 3, 4]), (2, [0, 4, 5]), (4, [0, 5])]
    assert [shard.file for shard in shards] == [f"features-0000{number}.safetensors" for number in range(3)]
    assert [list(shard.rows) for shard in shards] == [[0, 1], [2, 3], [4]]
    assert [shard.offsets for shard in cut_into_shards([9, 1, 9], 24)] == [[0, 9], [0, 1], [0, 9]]
    assert make_index().tokens == 14
    assert make_index().bytes_per_token == 2 * 6 * 2


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("layers", [(2, -1), (-1, 2), (-1,)])
def test_rows_are_read_back_as_written(tmp_path: Path, layers: tuple[int, ...]) -> None:
    index, whole = write_cache(tmp_path)
    assert FeatureIndex.read(tmp_path) == index
    for written_by in ("ours", "safetensors"):  # which sorts the layers by name
        if written_by == "safetensors":
            for shard in index.shards:
                save_file(load_file(tmp_path / shard.file), tmp_path / shard.file)
        cache = FeatureCache(tmp_path, index, layers)
        cache.check_complete()
        assert cache.width == len(layers) * HIDDEN
        for row in (4, 0, 2, 1, 3):
            found = torch.zeros(LENGTHS[row], cache.width, dtype=cache.dtype)
            cache.read([row], found)
            expected = whole[BEGINS[row] : BEGINS[row] + LENGTHS[row], [LAYERS.index(layer) for layer in layers]]
            assert torch.equal(found, expected.flatten(1))


@pytest.mark.usefixtures("small_shards")
def test_damaged_shards_are_named(tmp_path: Path) -> None:
    index, _ = write_cache(tmp_path)
    file = tmp_path / index.shards[1].file
    for damage in (file.read_bytes()[:-1], b"no header", b"\xff" * 99, (tmp_path / index.shards[0].file).read_bytes()):
        file.write_bytes(damage)
        with pytest.raises(
            UserError, match=r"features-00001\.safetensors does not hold what index\.json says: delete it"
        ):
            FeatureCache(tmp_path, index, LAYERS).check_complete()
    file.unlink()
    with pytest.raises(
        UserError, match=r"is not complete \(1 of 3 shards are missing\): run `draftsmith features` again"
    ):
        FeatureCache(tmp_path, index, LAYERS).check_complete()


@pytest.mark.usefixtures("small_shards")
def test_batches_are_padded(tmp_path: Path) -> None:
    """Rows 2 and 1: [2, 4, F], the shorter one padded with zeros; the same from a worker's copy. Then rows 4 and 0."""
    index, whole = write_cache(tmp_path)
    collator = FeatureCollator(FeatureCache(tmp_path, index, LAYERS))
    rows = [
        {"input_ids": [1] * LENGTHS[row], "loss_mask": [1] * LENGTHS[row], ROWS_COLUMN: [row]} for row in (2, 1)
    ]  # fmt: skip
    packed = {"input_ids": [1] * 8, "loss_mask": [1] * 8, ROWS_COLUMN: [4, 0]}
    assert torch.equal(collator([packed])["features"][0], torch.cat([whole[9:14], whole[:3]]).flatten(1))
    batch = collator(rows)
    assert batch["features"].shape == (2, 4, 12)
    assert torch.equal(batch["features"][0], whole[4:8].flatten(1))
    assert torch.equal(batch["features"][1, :1], whole[3:4].flatten(1))
    assert not batch["features"][1, 1:].any()
    assert batch["input_ids"].tolist() == [[1] * 4, [1, 0, 0, 0]]
    sent = pickle.loads(pickle.dumps(collator))(rows)
    assert all(torch.equal(sent[name], value) for name, value in batch.items())
