"""FLamby's contract, on the real HAM four-centre subset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score

from tightframe.data.isic import fed_isic2019 as flamby
from tightframe.data.isic.fed_isic2019 import BaselineLoss, FedIsic2019
from tightframe.errors import DataError

COUNTS = {1: (194, 63), 2: (290, 101), 3: (355, 142), 5: (102, 33)}


@pytest.fixture(scope="module")
def ham(real_data: Path) -> Path:
    return real_data / "fed_isic_ham"


def test_module_constants() -> None:
    assert flamby.NUM_CLIENTS == 6
    assert flamby.BATCH_SIZE == 64
    assert flamby.NUM_EPOCHS_POOLED == 20
    assert flamby.LR == 5e-4
    assert flamby.Optimizer is torch.optim.Adam
    assert flamby.FedClass is FedIsic2019
    assert flamby.get_nb_max_rounds(100) == 9


@pytest.mark.parametrize("center", COUNTS)
@pytest.mark.parametrize("train", [True, False])
def test_a_centre(ham: Path, center: int, train: bool) -> None:
    data = FedIsic2019(center=center, train=train, data_path=str(ham))
    size = COUNTS[center][0 if train else 1]
    assert len(data) == len(data.image_paths) == len(data.targets) == len(data.centers) == size
    assert set(data.centers.tolist()) == {center}
    assert (data.center, data.pooled) == (center, False)
    assert data.train_test == ("train" if train else "test")
    assert data.key == f"{data.train_test}_{center}"
    for index in (0, size - 1):
        x, y = data[index]
        assert (x.shape, x.dtype) == ((3, 200, 200), torch.float32)
        assert (y.shape, y.dtype) == ((), torch.int64)
        assert y == data.targets[index]


def test_pooled_is_all_centres(ham: Path) -> None:
    train, test = (FedIsic2019(train=train, pooled=True, data_path=ham) for train in (True, False))
    assert (len(train), len(test)) == (941, 339)
    assert {c: (train.centers == c).sum() for c in COUNTS} == {c: n for c, (n, _) in COUNTS.items()}
    assert not set(train.image_paths) & set(test.image_paths)


def test_a_test_item_is_the_centre_crop(ham: Path) -> None:
    data = FedIsic2019(center=5, train=False, data_path=ham)
    image = np.asarray(Image.open(data.image_paths[7]).crop((12, 12, 212, 212)), dtype=np.float64) / 255.0
    expected = (image - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(data[7][0].permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_training_items_change_with_the_global_stream_or_not_at_all(ham: Path) -> None:
    data = FedIsic2019(center=5, data_path=ham)
    torch.manual_seed(0)
    first, second = data[0][0], data[0][0]
    torch.manual_seed(0)
    assert torch.equal(data[0][0], first)
    assert not torch.equal(first, second)
    seeded = FedIsic2019(center=5, data_path=ham, seed=3)
    assert torch.equal(seeded[0][0], seeded[0][0])


def test_dtypes(ham: Path) -> None:
    data = FedIsic2019(5, False, X_dtype=torch.float64, y_dtype=torch.int32, data_path=ham)
    x, y = data[0]
    assert (x.dtype, y.dtype) == (torch.float64, torch.int32)


def test_workers_make_the_same_batches(ham: Path) -> None:
    data = FedIsic2019(center=5, data_path=ham, seed=1)
    data = torch.utils.data.Subset(data, range(12))
    alone, spread = (
        list(torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers)) for workers in (0, 2)
    )
    for (x, y), (other_x, other_y) in zip(alone, spread, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_an_absent_image_fails_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "ISIC_2019_Training_Input_preprocessed").mkdir()
    (tmp_path / "mine").write_text("image,target,center,fold\nISIC_1,1,0,train\n")
    data = FedIsic2019(data_path=tmp_path, split_path=tmp_path / "mine")
    assert len(data) == 1
    with pytest.raises(DataError, match="TF-205"):
        data[0]
    with pytest.raises(DataError, match="TF-208"):
        FedIsic2019(train=False, data_path=tmp_path, split_path=tmp_path / "mine")


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="got 6"):
        FedIsic2019(center=6, data_path=tmp_path)
    with pytest.raises(DataError, match="TF-203"):
        FedIsic2019(data_path=tmp_path)
    with pytest.raises(DataError, match="TF-203"):
        FedIsic2019()


def test_metric_is_balanced_accuracy() -> None:
    rng = np.random.default_rng(0)
    truth = rng.choice([0, 1, 4, 7], 200)  # some classes absent, as in a centre's test fold
    logits = rng.normal(size=(200, 8)) + 1.5 * np.eye(8)[truth] * (truth[:, None] == 1)
    present = np.where(np.isin(np.arange(8), [0, 1, 4, 7]), 0.0, -100.0)  # sklearn warns of others
    expected = balanced_accuracy_score(truth, (logits + present).argmax(1))
    assert flamby.metric(truth, logits + present) == pytest.approx(expected, abs=1e-12)
    assert flamby.metric(truth[:, None], logits + present) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="at least one label"):
        flamby.metric(np.array([]), np.zeros((0, 8)))


def test_loss_is_the_weighted_focal_loss() -> None:
    alpha = 18597 / np.array([3332, 9084, 2649, 712, 1950, 184, 201, 485])
    np.testing.assert_allclose(flamby.ALPHA, alpha, atol=5e-5)
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(16, 8)) * 3, rng.integers(0, 8, 16)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = p[np.arange(16), labels]
    expected = np.mean(np.array(flamby.ALPHA)[labels] * (1 - chosen) ** 2 * -np.log(chosen))
    loss = BaselineLoss()
    value = loss(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels))
    assert value.item() == pytest.approx(expected, rel=1e-5)
    column = loss(torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)[:, None])
    assert column.item() == pytest.approx(expected, rel=1e-5)
    unweighted = BaselineLoss(alpha=[1.0] * 8, gamma=0.0)(torch.tensor(logits), torch.tensor(labels))
    assert unweighted.item() == pytest.approx(float(np.mean(-np.log(chosen))), rel=1e-6)
