"""Features of single records read from totals of ReLU units behind convolutions, and pictures from these.

Features after a ReLU are not negative and much alike, so that most units are on for nearly every record or
for hardly any. Of a unit that one record alone moves the quotient of weights and bias is the record's
features, however many other records there are.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.support.attacks.malicious_server import ANY_WIDTH, Chosen, Federation, Records
from torch.nn import functional

from tightframe.errors import SecureSumError
from tightframe.learning import model_update

JOB: dict[str, Any] = {
    "method": "fedsgd",
    "dataset": "mnist",
    "dataset_options": {"silos": 4},
    "model": "conv2cifar",
    "model_options": {},
    "weights": "exact",
}
LAYER, DENSE = "backbone.7", 7
"""The first dense layer, and its place in the network."""


class Pictures:
    """Some of scikit-learn's digits, as large as those of MNIST."""

    source = "pictures"

    def __init__(self, first: int, number: int) -> None:
        pixels, labels = _digits()
        self._folds = {"train": slice(first, first + number), "test": slice(-20, None)}
        self._pixels, self._labels = pixels, labels

    def labels(self, fold: str) -> Any:
        return self._labels[self._folds.get(fold, slice(-40, -20))]

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return list(zip(self._pixels[self._folds.get(fold, slice(-40, -20))], self.labels(fold), strict=True))

    def check(self, progress: Any = None) -> None: ...


@functools.cache
def _digits() -> tuple[torch.Tensor, np.ndarray]:
    digits = load_digits()
    small = torch.as_tensor(digits.images[:, None], dtype=torch.float32) / 8 - 1
    return functional.interpolate(small, 28, mode="bilinear"), np.asarray(digits.target, np.int64)


def hospitals(each: int) -> dict[str, Records]:
    """Four with so many records each."""
    return {f"hospital-{place}": Records(Pictures(place * each, each)) for place in range(4)}


def convolutions(federation: Federation) -> torch.nn.Module:
    """Return what comes before the dense layers, with the weights that all know."""
    model: Any = model_update.build_template(federation.setup.setting)
    model.load_state_dict(dict(federation.shared.state.model))
    return model.backbone[:DENSE].eval().requires_grad_(False)


def in_clear(federation: Federation) -> tuple[torch.nn.Module, torch.Tensor, dict[int, torch.Tensor]]:
    """Return the convolutions, all pictures, and features that one round's total tells of some of them."""
    before, total = convolutions(federation), federation.sum("train", 1)
    bias = total[f"gradient/{LAYER}.bias"]
    moved = np.abs(bias) > 1e-9
    rows = torch.as_tensor(total[f"gradient/{LAYER}.weight"][moved] / bias[moved, None]).float()
    pictures = torch.as_tensor(np.concatenate([item.raw("train") for item in federation.data.values()]))
    alike = functional.normalize(rows, dim=1) @ functional.normalize(before(pictures), dim=1).T
    best, which = alike.max(1)
    return before, pictures, {int(which[row]): rows[row] for row in torch.nonzero(best > 0.999).flatten()}


def as_a_picture(before: torch.nn.Module, features: torch.Tensor, steps: int = 200) -> torch.Tensor:
    """Return pictures whose features are near given ones (B, d), and which are smooth."""
    found = torch.zeros(len(features), 1, 28, 28, requires_grad=True)
    optimizer = torch.optim.Adam([found], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scale = features.norm(dim=1, keepdim=True)
    for step in range(steps):
        optimizer.zero_grad()
        rough = found.diff(dim=2).abs().mean() + found.diff(dim=3).abs().mean()
        away = ((before(found) - features) / scale).square().sum()
        (away + len(features) * 1000 ** (-step / steps) * rough).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            found.clamp_(-1, 1)
    return found.detach()


@pytest.mark.whole
def test_without_the_rule_pictures_are_read_from_one_total(tmp_path: Path) -> None:
    """More records do not help: of 60 and of 240 as many are read."""
    for each in (60, 15):
        federation = Federation(JOB, hospitals(each), state=tmp_path / str(each), policy=ANY_WIDTH)
        before, pictures, read = in_clear(federation.enroll())
        assert len(read) >= 5
    places = list(read)[:4]
    found = as_a_picture(before, torch.stack([read[place] for place in places]))
    alike = torch.corrcoef(torch.cat([found.flatten(1), pictures.flatten(1)]))[: len(places), len(places) :]
    assert alike.argmax(1).tolist() == places


def test_units_that_few_of_a_hospitals_records_move_tell_none(tmp_path: Path) -> None:
    federation = Federation(JOB, hospitals(15), state=tmp_path).enroll()
    *_, read = in_clear(federation)
    assert not read


def test_of_two_jobs_that_one_picture_lies_between_the_second_is_refused(tmp_path: Path) -> None:
    """At a rate of 1e-6 the difference of a class's sums was its 192 features (cosine 1.0000)."""
    data, name = hospitals(60), "hospital-1"
    job = {**JOB, "method": "fedmr", "rounds": 2, "training": {"learning_rate": 1e-6, "batch_size": 16}}
    Federation(job, data, state=tmp_path).enroll().sum("train", 1)
    fewer = {**data, name: Chosen(data[name], np.arange(1, 60))}
    other = Federation(job, fewer, state=tmp_path, job_id="job-b")
    with pytest.raises(SecureSumError, match=r"^TF-617: .*summed records"):
        other.ask_to_enroll(name, other.params())
