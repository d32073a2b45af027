"""Features of single records read from totals of layers behind convolutions, and pictures from these.

Features after a ReLU are not negative and much alike, so that most units are on for nearly every record or
for hardly any. Of a unit that one record alone moves the quotient of weights and bias is the record's
features, however many other records there are.

Where fewer records than a layer's inputs and units are in a sum, its rows span no more than the records'
features, and its columns no more than their slopes. A transformer's last layers get of a record one token.

A convolution whose kernel is the picture is a dense layer on pixels: rounds span what the records span.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tests.support.attacks.malicious_server import ANY_WIDTH, STANDARD, Chosen, Federation, Records
from torch.nn import functional

from tightframe.errors import SecureSumError, TightframeError
from tightframe.learning import model_update
from tightframe.rounds.few_records import across_jobs, layers, rule

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


TRANSFORMER: dict[str, Any] = {
    "method": "fedsgd",
    "method_options": {"optimizer": "adam", "learning_rate": 1e-3},
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 32},
    "model": "monai",
    "model_options": {
        "network": "ViT",
        "patch_size": 8,
        "hidden_size": 96,
        "mlp_dim": 384,
        "num_layers": 1,
        "num_heads": 4,
    },
    "weights": "exact",
    "rounds": 20,
}


ONE_PATCH: dict[str, Any] = {
    **TRANSFORMER,
    "model_options": {
        **TRANSFORMER["model_options"],
        "patch_size": 32,
        "hidden_size": 8,
        "mlp_dim": 8,
        "num_heads": 2,
    },
    "rounds": 8,
}
"""Of eight units, in each of eight sums."""


class Pictures:
    """Some of scikit-learn's digits, by default as large as those of MNIST."""

    source = "pictures"

    def __init__(self, first: int, number: int, *, side: int = 28, channels: int = 1) -> None:
        pixels, labels = _digits(side)
        pixels, labels = pixels.expand(-1, channels, -1, -1), labels % (10 if channels == 1 else 8)
        self._folds = {"train": slice(first, first + number), "test": slice(-20, None)}
        self._pixels, self._labels = pixels, labels

    def labels(self, fold: str) -> Any:
        return self._labels[self._folds.get(fold, slice(-40, -20))]

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        return list(zip(self._pixels[self._folds.get(fold, slice(-40, -20))], self.labels(fold), strict=True))

    def check(self, progress: Any = None) -> None: ...


@functools.cache
def _digits(side: int) -> tuple[torch.Tensor, np.ndarray]:
    digits = load_digits()
    small = torch.as_tensor(digits.images[:, None], dtype=torch.float32) / 8 - 1
    return functional.interpolate(small, side, mode="bilinear"), np.asarray(digits.target, np.int64)


def hospitals(each: int, **form: int) -> dict[str, Records]:
    """Four with so many records each."""
    return {f"hospital-{place}": Records(Pictures(place * each, each, **form)) for place in range(4)}


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


def as_a_picture(before: torch.nn.Module, features: torch.Tensor, steps: int = 80) -> torch.Tensor:
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


@pytest.mark.whole
def test_units_that_few_of_a_hospitals_records_move_tell_none(tmp_path: Path) -> None:
    """Of so many records as 384 units need."""
    federation = Federation(JOB, hospitals(260), state=tmp_path).enroll()
    *_, read = in_clear(federation)
    assert not read


@pytest.mark.whole
def test_of_two_jobs_that_one_picture_lies_between_the_second_is_refused(tmp_path: Path) -> None:
    """At a rate of 1e-6 the difference of a class's sums was its features (``conv2cifar``: cosine 1.0000)."""
    data, name = hospitals(60), "hospital-1"
    job = {**JOB, "model": "small_cnn", "method": "fedmr", "rounds": 2}
    job["training"] = {"learning_rate": 1e-6, "batch_size": 16}
    Federation(job, data, state=tmp_path).enroll().sum("train", 1)
    fewer = {**data, name: Chosen(data[name], np.arange(1, 60))}
    other = Federation(job, fewer, state=tmp_path, job_id="job-b")
    with pytest.raises(SecureSumError, match=r"^TF-617: .*summed records"):
        other.ask_to_enroll(name, other.params())


def test_a_hospital_refuses_more_units_behind_convolutions_than_its_rule_allows(tmp_path: Path) -> None:
    every_class = STANDARD.model_copy(update={"min_class_count": 1})
    with pytest.raises(TightframeError, match=r"^TF-625: [\s\S]*384 units, behind .* on 45 declared"):
        Federation(JOB, hospitals(15), state=tmp_path, policy=every_class).enroll()
    pictures = hospitals(12, side=32, channels=3)
    with pytest.raises(TightframeError, match=r"^TF-625: [\s\S]*the first on 3072 .* on 36 declared"):
        Federation(ONE_PATCH, pictures, state=tmp_path / "one", policy=every_class).enroll()


def _slope(z: torch.Tensor) -> torch.Tensor:
    """Return the derivative of a GELU."""
    normal = torch.distributions.Normal(0.0, 1.0)
    return normal.cdf(z) + z * normal.log_prob(z).exp()


@pytest.mark.whole
def test_without_the_rule_one_total_of_a_transformer_tells_records_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units that few records move stay, and there are hardly any.

    Which records are drawn, and so how many one total tells, nobody knows: 1 to 11 from the eighth round on.
    """
    for module in (across_jobs, layers, rule):
        monkeypatch.setattr(module, "units_planned", lambda _setup: None)
    federation = Federation(TRANSFORMER, hospitals(30, side=32, channels=3), state=tmp_path).enroll()
    told = []
    for number in range(1, TRANSFORMER["rounds"] + 1):
        known = dict(federation.shared.state.model)
        total = federation.sum("train", number)
        if number > 7:
            told.append(records_told(federation, known, total))
        if told and told[-1] >= 2:
            return
    pytest.fail(f"records that the totals tell: {told}")


def records_told(federation: Federation, known: dict[str, torch.Tensor], total: dict[str, np.ndarray]) -> int:
    """Return how many records' features are found in a total, and not because all of a class are alike."""
    model: Any = model_update.build_template(federation.setup.setting)
    model.load_state_dict(known)
    layers, place = model.backbone.blocks[0].mlp.double(), "gradient/backbone.blocks.0.mlp.linear"
    found = search(
        layers,
        *(torch.as_tensor(total[place + name]).double() for name in ("1.weight", "1.bias", "2.weight")),
    )
    seen: list[torch.Tensor] = []
    layers.linear1.register_forward_hook(lambda _layer, given, _output: seen.append(given[0][:, 0].detach()))
    model.double()(
        torch.as_tensor(np.concatenate([item.raw("train") for item in federation.data.values()])).double()
    )
    labels = torch.as_tensor(np.concatenate([item.labels("train") for item in federation.data.values()]))
    true = functional.normalize(seen[0] - seen[0].mean(0), dim=1)
    best, which = (functional.normalize(found - seen[0].mean(0), dim=1) @ true.T).max(1)
    return sum(
        float(functional.cosine_similarity(true[labels == labels[r]].mean(0), true[r], dim=0)) < 0.95
        for r in which[best > 0.95].unique()
    )


def search(
    layers: Any, rows: torch.Tensor, bias: torch.Tensor, columns: torch.Tensor, records: int = 60
) -> torch.Tensor:
    """Return rows whose slopes, times some in the next layer's span, are in the span of a total's columns."""
    slopes, _, span = torch.linalg.svd(rows, full_matrices=False)
    slopes, span = slopes[:, :records], span[:records]
    behind, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    behind = layers.linear2.weight.detach().T @ behind[:, :records][:, sizes[:records] > 1e-6 * sizes[0]]
    starts = (rows / bias[:, None])[bias.abs().argsort(descending=True)[:30]]
    starts = functional.normalize(starts, dim=1) * starts.median(0).values.norm()
    place = (starts @ span.T).requires_grad_(True)
    optimizer = torch.optim.Adam([place], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.05 ** (1 / 60))
    for _ in range(60):
        each = (
            _slope(place @ span @ layers.linear1.weight.detach().T + layers.linear1.bias.detach())[..., None]
            * behind
        )
        whole, inside = each.mT @ each, slopes.T @ each
        jitter = 1e-10 * whole.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(whole.shape[1])
        lower = torch.linalg.cholesky(whole + jitter)
        half = torch.linalg.solve_triangular(lower, whole - inside.mT @ inside, upper=False)
        left = torch.linalg.solve_triangular(lower, half.mT, upper=False)
        cost = torch.linalg.eigvalsh((left + left.mT) / 2)[:, 0].clamp_min(1e-30).add(1e-20).log().sum()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        schedule.step()
    return (place @ span).detach()


@pytest.mark.whole
def test_without_the_rule_a_few_totals_of_whole_pictures_tell_who_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record lies in the span of the totals' rows, another does not: 64 rows of 48 records."""
    data = hospitals(12, side=32, channels=3)
    records = sum(len(item.labels("train")) for item in data.values())
    for module in (across_jobs, layers, rule):
        monkeypatch.setattr(module, "units_planned", lambda _setup: None)
    federation = Federation(ONE_PATCH, data, state=tmp_path).enroll()
    name = "gradient/backbone.patch_embedding.patch_embeddings.weight"
    rows = [federation.sum("train", number)[name] for number in range(1, ONE_PATCH["rounds"] + 1)]
    _, sizes, span = np.linalg.svd(np.concatenate(rows).reshape(-1, 3072), full_matrices=False)
    span = span[: min(records, int((sizes > 1e-6 * sizes[0]).sum()))]

    def away(pictures: np.ndarray) -> np.ndarray:
        own = pictures.reshape(len(pictures), -1).astype(float)
        return np.linalg.norm(own - own @ span.T @ span, axis=1) / np.linalg.norm(own, axis=1)

    there = np.concatenate([away(item.raw("train")) for item in data.values()])
    others = away(_digits(32)[0][500:600].expand(-1, 3, -1, -1).numpy())
    assert there.max() < others.min() / 10
