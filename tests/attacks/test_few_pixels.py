"""A picture read from honest training of a layer on pixels, by one pixel that it alone has ink in.

The pixel's column of a total, less what the rim's one value makes of the bias, is the record's slopes. By the
next layer's weights these are its errors, and so its label and scores; where they are not zero its units are
on, where all are zero its batches did not have it. So each round's scores are linear equations on its pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from tests.attacks.test_behind_convolutions import Pictures
from tests.support.attacks.malicious_server import STANDARD, Federation, Records

from tightframe.data.table import common_values
from tightframe.data.table.common_values import common_pixels
from tightframe.learning.few_records.unit_records import UnitRecords
from tightframe.learning.one_sum import feature_sums

EACH, RIM, GRAYS = 400, -1.0, 16
JOB: dict[str, Any] = {
    "method": "fedsgd",
    "method_options": {"learning_rate": 0.1, "momentum": 0.0},
    "dataset": "digits",
    "dataset_options": {},
    "model": "mlp",
    "weights": "exact",
    "evaluation": {"models": 1},
}


def hospitals() -> dict[str, Records]:
    """Three with scikit-learn's digits."""
    return {f"hospital-{place}": Records(Pictures(place * EACH, EACH, side=8)) for place in range(3)}


def rows_of(data: dict[str, Records]) -> np.ndarray:
    return np.concatenate([item.raw("train").reshape(EACH, -1) for item in data.values()])


def told(data: dict[str, Records], state: Path, rounds: int) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Sum rounds: the model received, and each pixel's column, less the rim's part (units, pixels)."""
    federation, opened = (
        Federation({**JOB, "rounds": rounds}, data, state=state, policy=STANDARD).enroll(),
        [],
    )
    for number in range(1, rounds + 1):
        known = {name: item.double() for name, item in federation.shared.state.model.items()}
        total = federation.sum("train", number)
        rows, bias = (total[f"gradient/backbone.1.{name}"] for name in ("weight", "bias"))
        opened.append((known, torch.as_tensor(rows - RIM * bias[:, None])))
    return opened


def read(opened: list[tuple[dict[str, Any], torch.Tensor]], pixel: int) -> tuple[int, np.ndarray]:
    """Return label and pixels of the one record with ink in a pixel; each of 16 grays is tried."""
    sizes = torch.stack([columns[:, pixel].norm() for _, columns in opened])
    drawn = [place for place in range(len(opened)) if sizes[place] > sizes.max() / 100]
    errors, on = [], []
    for place in drawn:
        slopes, last = opened[place][1][:, pixel], opened[place][0]["head.weight"]
        on.append(slopes.abs() > 1e-3 * slopes.abs().max())
        of = torch.cat([last.T[on[-1]], torch.ones(1, len(last)).double()])  # errors add up to 0
        errors.append(torch.linalg.lstsq(of, torch.cat([slopes[on[-1]], torch.zeros(1).double()])).solution)
    label = int(torch.stack(errors).mean(0).argmin())
    found = []
    for gray in range(1, GRAYS + 1):
        left, right = [], []
        for place, error, active in zip(drawn, errors, on, strict=True):
            near = sizes[[each for each in drawn if abs(each - place) < 6]].min()  # of one part in a sum
            parts = torch.round(sizes[place] / near) * 2 * gray / GRAYS * 2**12 / EACH
            chances = (error / parts + torch.eye(len(error))[label]).clamp_min(1e-9)
            # Against the likeliest class; a small chance is known less well.
            apart = torch.eye(len(error)).double()
            apart[:, int(chances.argmax())] -= 1
            apart *= chances[:, None]
            known = opened[place][0]
            behind = known["head.weight"] * active
            left.append(apart @ behind @ known["backbone.1.weight"])
            right.append(apart @ (chances.log() - behind @ known["backbone.1.bias"] - known["head.bias"]))
        found.append(lsq_linear(torch.cat(left).numpy(), torch.cat(right).numpy(), (RIM, 1)))
    return label, min(found, key=lambda item: float(item.cost)).x


@pytest.mark.whole
def test_without_the_rule_a_picture_with_ink_where_no_other_has_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where units that few records tell apart stay, labels and batches were told, and this reader fails."""
    monkeypatch.setattr(common_values, "common_pixels", lambda *_: None)
    monkeypatch.setattr(UnitRecords, "clear", lambda *_: None)
    data = hospitals()
    rows, opened = rows_of(data), told(data, tmp_path, 18)
    labels = np.concatenate([item.labels("train") for item in data.values()])
    alone = np.flatnonzero((rows != RIM).sum(0) == 1)
    assert len(alone) == 2
    for pixel in alone:
        record = int(np.flatnonzero(rows[:, pixel] != RIM)[0])
        label, pixels = read(opened, int(pixel))
        assert label == labels[record]
        assert np.linalg.norm(rows - pixels, axis=1).argmin() == record
        assert np.corrcoef(pixels, rows[record])[0, 1] > 0.7


def test_pixels_in_which_few_pictures_are_unlike_the_rest_tell_none_of_them(tmp_path: Path) -> None:
    data = hospitals()
    rows, ((_, columns),) = rows_of(data), told(data, tmp_path, 1)
    ink, sizes = (rows != RIM).sum(0), columns.norm(dim=0).numpy()
    assert 0 < ink[ink > 0].min() == 1
    assert sizes[ink < 20].max() < 1e-3 < 1 < sizes[ink > EACH].min()


@pytest.mark.whole
@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("model", ["identity", "mlp"])
def test_nor_does_a_sum_of_products_of_pixels(
    model: str, ruled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pixel in which one picture has ink, less one in which none has, the products are that picture."""
    if not ruled:
        monkeypatch.setattr(common_values, "common_pixels", lambda *_: None)
    data = hospitals()
    job = {**JOB, "method": "fed3r", "method_options": {}, "model": model}
    rows, job["model_options"] = rows_of(data), {"widths": []} if model == "mlp" else {}
    federation = Federation(job, data, state=tmp_path, policy=STANDARD).enroll()
    totals = [federation.sum(*exchange.place) for exchange in federation.setup.plan]
    gram = next(feature_sums.pooled(total).gram for total in totals if feature_sums.COARSE in total)
    assert gram is not None
    ink = (rows != RIM).sum(0)
    read = gram[ink == 1] - gram[int(ink.argmin())]
    assert bool((read.norm(dim=1) < 1e-3).all()) is ruled
    for pixel, one in zip(np.flatnonzero(ink == 1), read, strict=True):
        record = rows[rows[:, pixel] != RIM][0]
        assert ruled or np.corrcoef(one, record)[0, 1] > 0.999


def test_a_hospitals_pixels_are_as_in_most_of_its_pictures() -> None:
    """Of ten pictures three have another first pixel, three a lower second, five another third."""
    pixels = torch.zeros(10, 1, 2, 2)
    pixels[:3, 0, 0, 0] = torch.tensor([1.0, 2.0, 0.5])
    pixels[4:7, 0, 0, 1], pixels[::2, 0, 1, 0] = -1.0, 3.0

    class Ten(Pictures):
        def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
            return list(zip(pixels, range(10), strict=True))

    data: Any = Ten(0, 10)
    found = common_pixels(data, 4)
    assert found is not None
    made = found.apply(pixels, range(10))
    assert found.few.flatten().tolist() == [True, True, False, False]
    assert not made[:, 0, 0].any() and torch.equal(made[:, 0, 1], pixels[:, 0, 1])
    assert common_pixels(data, 1) is None
    assert common_pixels(data, 3).few.any().item() is False  # type: ignore[union-attr]


def test_a_patients_many_pictures_count_as_one() -> None:
    """Ink in a patient's six pictures, and in one picture of each of six patients, of twelve."""
    pixels = torch.zeros(18, 1, 1, 2)
    pixels[:6, ..., 0], pixels[6:12, ..., 1] = 1.0, 1.0

    class Eighteen(Pictures):
        def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
            return list(zip(pixels, range(18), strict=True))

        def groups(self, fold: str) -> Any:
            return np.array([7] * 6 + list(range(20, 32)))

    data: Any = Eighteen(0, 18)
    found = common_pixels(data, 6)
    assert found is not None and found.few.flatten().tolist() == [True, False]
    assert not found.apply(pixels, range(18))[..., 0].any()
