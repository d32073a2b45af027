from __future__ import annotations

import csv
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tightframe.data.isic import CLASS_NAMES, TEST_COUNTS, TRAIN_COUNTS, IsicOptions, twin
from tightframe.data.isic.twin import Key, TwinData, scaled

SMALL = IsicOptions(image_size=48)
FOLDS = ("train", "validation", "test")


def silo(center: int) -> TwinData:
    return TwinData(center, SMALL)


def test_the_table_is_the_real_sets(real_data: Path) -> None:
    with (real_data / "fed_isic2019_meta" / "center_class_fold_counts.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 12
    for row in rows:
        table = TRAIN_COUNTS if row["fold"] == "train" else TEST_COUNTS
        assert table[int(row["center"])] == tuple(int(row[name]) for name in CLASS_NAMES)


def test_the_tables_totals() -> None:
    assert [sum(row) for row in TRAIN_COUNTS] == [9930, 3163, 2691, 1807, 655, 351]
    assert [sum(row) for row in TEST_COUNTS] == [2483, 791, 672, 452, 164, 88]


@pytest.mark.parametrize("center", range(6))
def test_counts_are_the_scaled_real_ones(center: int) -> None:
    data = silo(center)
    train = np.bincount(np.concatenate([data.labels("train"), data.labels("validation")]), minlength=8)
    assert train.tolist() == [max(6, round(n * 0.034)) if n else 0 for n in TRAIN_COUNTS[center]]
    test = np.bincount(data.labels("test"), minlength=8)
    assert test.tolist() == [max(6, round(n * 0.034)) if n else 0 for n in TEST_COUNTS[center]]
    held_out = np.bincount(data.labels("validation"), minlength=8)
    assert all((out >= 1) == (n > 0) for out, n in zip(held_out, TRAIN_COUNTS[center], strict=True))


def test_about_a_thousand_records() -> None:
    assert sum(len(silo(c).labels(fold)) for c in range(6) for fold in FOLDS) == 1004
    assert scaled(0) == 0


def test_every_class_has_three_holders_in_training() -> None:
    """Fewer would let a sum over the silos that hold a class show one silo's part."""
    holders = np.sum([np.bincount(silo(c).labels("train"), minlength=8) > 0 for c in range(6)], axis=0)
    assert (holders >= 3).all()
    assert holders.tolist() == [6, 6, 5, 3, 6, 5, 5, 3]


def test_folds_share_no_record() -> None:
    names = [key.name for c in range(7) for fold in FOLDS for key in silo(c).keys(fold)]
    assert len(set(names)) == len(names)


def test_a_seventh_silo_is_a_copy_of_centre_0_with_records_of_its_own() -> None:
    first, seventh = silo(0), silo(6)
    assert np.bincount(first.labels("test")).tolist() == np.bincount(seventh.labels("test")).tolist()
    assert first.source == "synthetic twin of Fed-ISIC2019, centre 0"
    assert seventh.source == "synthetic twin of Fed-ISIC2019, centre 0 (copy 2)"
    assert silo(9).source == "synthetic twin of Fed-ISIC2019, centre 3 (copy 2)"
    assert first.synthetic
    with pytest.raises(ValueError, match="at least 0"):
        silo(-1)


def test_a_record_looks_the_same_at_every_size() -> None:
    for center in range(6):
        key = Key(0, center, "train", center, 0)
        large = torch.from_numpy(twin.image(key, 192)).permute(2, 0, 1)[None].float()
        reduced = torch.nn.functional.interpolate(large, size=(48, 48), mode="area")[0]
        small = torch.from_numpy(twin.image(key, 48)).permute(2, 0, 1).float()
        other = torch.from_numpy(twin.image(Key(0, center, "train", center, 1), 48)).permute(2, 0, 1).float()
        assert (small - reduced).abs().mean() < 0.35 * (small - other).abs().mean()
        assert (small - reduced).abs().mean() < 8


@pytest.mark.parametrize("side", [18, 54, 224])
def test_shape_and_use_of_the_range(side: int) -> None:
    pixels = twin.image(Key(0, 3, "test", 0, 2), side)
    assert pixels.shape == (side, side, 3)
    assert pixels.dtype == np.uint8
    assert pixels.std() > 15
    assert ((pixels == 0) | (pixels == 255)).mean() < 0.2


def test_the_twin_is_frozen() -> None:
    """Pixels of one record of every centre and class; a change needs a new ``TWIN_VERSION``."""
    digest = hashlib.sha256()
    for center in range(6):
        for label in range(8):
            digest.update(twin.image(Key(0, center, "test", label, 1), 48).tobytes())
    assert twin.TWIN_VERSION == 1
    assert digest.hexdigest() == "8ef0279af53ec4170e35ac73d36068a379c1d12f2751a98db61dd54d8b6fea0b"


@pytest.mark.parametrize("augment_seed", [None, 5])
def test_workers_make_the_same_records(augment_seed: int | None) -> None:
    records = silo(5).records("train", augment_seed=augment_seed)
    alone, spread = (list(DataLoader(records, batch_size=8, num_workers=n)) for n in (0, 2))
    assert len(alone) == 5
    for (x, y), (other_x, other_y) in zip(alone, spread, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_augmentation_depends_on_seed_and_index_only() -> None:
    data = silo(4)
    one, again, other = (data.records("train", augment_seed=seed) for seed in (1, 1, 2))
    backwards = {i: again[i][0] for i in reversed(range(len(again)))}
    assert all(torch.equal(one[i][0], backwards[i]) for i in range(len(one)))
    assert not any(torch.equal(one[i][0], other[i][0]) for i in range(len(one)))
    plain = data.records("train")
    assert not any(torch.equal(one[i][0], plain[i][0]) for i in range(len(one)))
    assert [one[i][1] for i in range(len(one))] == data.labels("train").tolist()


def test_records_are_images_of_their_own_keys() -> None:
    data = silo(5)
    records: Any = data.records("test")
    for index, key in enumerate(data.keys("test")):
        expected = torch.from_numpy(twin.image(key, 54)).permute(2, 0, 1)
        assert torch.equal(records.image(index), expected)
    x, y = records[0]
    assert (x.shape, x.dtype) == ((3, 48, 48), torch.float32)
    assert isinstance(y, int)
    with pytest.raises(IndexError):
        records[len(records)]


def test_records_can_be_sent_to_a_worker_without_the_cache() -> None:
    records: Any = silo(5).records("validation")
    expected = records[0][0]
    copy = pickle.loads(pickle.dumps(records))  # noqa: S301 -- our own bytes
    assert copy._cache.used == 0
    assert records._cache.used == 54 * 54 * 3
    assert torch.equal(copy[0][0], expected)


def test_nothing_is_rendered_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightframe.data.isic.twin.render", lambda *arguments: pytest.fail("rendered"))
    lines: list[str] = []
    silo(5).check(lines.append)
    assert lines == []
