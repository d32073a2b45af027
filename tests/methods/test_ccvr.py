"""CCVR: moments against numpy's of the pooled records, draws against their distribution, whole runs."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.methods.in_memory import Records, in_turn
from tests.support.runs import FOUR, job, run

from tightframe import federation
from tightframe.errors import RunError, TrainingError
from tightframe.methods.ccvr import (
    COUNTS,
    METHOD,
    PRODUCTS,
    RECORDS,
    SUMS,
    CcvrConfig,
    class_moments,
    draw_features,
    pooled_moments,
)
from tightframe.phases import ADMITTED, Cohort


def _features(seed: int, labels: list[int], width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=stream)
    truth = torch.tensor(labels)
    return torch.randn(len(labels), width, generator=stream) @ mixing + 3.0 * truth[:, None], truth


def test_moments_from_sums_are_those_of_the_pooled_records() -> None:
    """Three silos, classes spread unevenly, one class nowhere and one with a single record."""
    silos = [_features(1, [0] * 5 + [1] * 3), _features(2, [0] * 4 + [2]), _features(3, [1] * 6)]
    parts = [class_moments([(z[:4], y[:4]), (z[4:], y[4:])], 4, 4) for z, y in silos]
    counts, sums, products = (sum(item) for item in zip(*parts, strict=True))
    assert isinstance(counts, torch.Tensor) and isinstance(sums, torch.Tensor)
    assert isinstance(products, torch.Tensor) and products.shape == (4, 10)
    means, covariances = pooled_moments(counts, sums, products)
    features, labels = (np.concatenate([one[index].numpy() for one in silos]) for index in (0, 1))
    for label in (0, 1):
        own = features[labels == label].astype(np.float64)
        np.testing.assert_allclose(means[label], own.mean(0), rtol=1e-12)
        np.testing.assert_allclose(covariances[label], np.cov(own.T), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(means[2], features[labels == 2][0], rtol=1e-12)
    assert not covariances[2].any() and not means[3].any() and not covariances[3].any()
    _, shared = pooled_moments(counts, sums, products.sum(0))
    centred = features - means.numpy()[labels]
    np.testing.assert_allclose(shared[3], centred.T @ centred / (len(labels) - 3), rtol=1e-9, atol=1e-12)
    assert all(torch.equal(item, shared[0]) for item in shared)
    with pytest.raises(TrainingError, match="NaN"):
        class_moments([(torch.tensor([[float("nan")] * 4]), torch.tensor([0]))], 4, 4)


def test_draws_have_the_mean_and_the_covariance() -> None:
    root = torch.tensor([[2.0, 0.0, 0.0], [1.5, 0.5, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    mean, covariance = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64), root @ root.T  # of rank two
    drawn = draw_features(mean, covariance, 40_000, torch.Generator().manual_seed(4)).numpy()
    # Five standard errors of a mean, and of a covariance's entries.
    assert np.abs(drawn.mean(0) - mean.numpy()).max() < 5 * float(covariance.max() / 40_000) ** 0.5
    spread = 5 * np.sqrt(2 / 40_000) * float(covariance.max())
    assert np.abs(np.cov(drawn.T) - covariance.numpy()).max() < spread
    same = draw_features(mean, torch.zeros(3, 3, dtype=torch.float64), 5, torch.Generator().manual_seed(4))
    assert torch.equal(same, mean.expand(5, 3)), "a class of one record"


@pytest.mark.parametrize("covariance", ["class", "shared"])
def test_it_mends_a_head_that_favours_one_class(make_setting: Any, make_silo: Any, covariance: Any) -> None:
    """The body stays to the bit, the head finds again what its bias had hidden."""
    setting = make_setting(CcvrConfig(virtual_features=200, epochs=60, covariance=covariance))
    state = METHOD.init_server(setting, 3)
    crooked = {**state.model, "head.bias": torch.tensor([9.0, 0.0, 0.0])}
    state = state.evolve(model=crooked)
    silos = [
        make_silo(setting, [0] * 40 + [1] * 3, name="a"),
        make_silo(setting, [1] * 3 + [2] * 5, name="b"),
    ]
    for silo in silos:  # a class is as bright as its number
        silo.inputs = 0.2 * silo.inputs + silo.labels[:, None, None, None]
    assert METHOD.after is not None
    told, counted, moments = METHOD.after(setting)
    beside = ["moments/rows", "moments/enough"]
    assert [[item.name for item in one.schema.fields] for one in (told, counted)] == [
        [COUNTS],
        [COUNTS, *beside],
    ]
    shared = [RECORDS] if covariance == "shared" else []
    assert [item.name for item in moments.schema.fields] == [COUNTS, SUMS, PRODUCTS, *shared]
    assert all(item.static and not item.weighted for item in moments.schema.fields)
    by_class = [item.name for item in moments.schema.fields if item.per_class]
    assert by_class == ([COUNTS, SUMS] if shared else [COUNTS, SUMS, PRODUCTS])
    received = {**moments.broadcast(state), ADMITTED: torch.ones(3, dtype=torch.bool)}
    terms = [moments.contribute(silo, received, {}).tensors for silo in silos]
    totals = {name: sum(term[name] for term in terms).numpy() for name in terms[0]}  # type: ignore[union-attr]
    cohort = Cohort(1, {"a": 1.0, "b": 1.0}, 1.0)
    after = moments.update(state, totals, cohort)
    again = moments.update(state, totals, cohort)
    assert all(torch.equal(after.model[name], again.model[name]) for name in after.model), "drawn by a seed"
    assert all(torch.equal(after.model[name], crooked[name]) for name in crooked if "head" not in name)

    def recall(model: Any) -> float:
        right = [(silos[0].load(model)(silo.inputs).argmax(1) == silo.labels) for silo in silos]
        labels = torch.cat([silo.labels for silo in silos])
        return float(torch.stack([torch.cat(right)[labels == c].float().mean() for c in range(3)]).mean())

    assert recall(crooked) == pytest.approx(1 / 3) and recall(after.model) > 0.8
    if shared:
        without = {**received, ADMITTED: torch.tensor([True, False, True])}
        left_out = moments.contribute(silos[0], without, {}).tensors
        assert float(left_out[RECORDS]) == 40, "no axis of classes, which rules could withhold later"
        fewer = {**totals, RECORDS: totals[RECORDS] - 1}
        assert moments.update(state, fewer, cohort) is state, "products of other records than the sums"
        assert "calibrated nothing" in moments.read(state, fewer, cohort).warnings[0]
        assert not moments.read(state, totals, cohort).warnings
    failed = replace(cohort, failed=1)
    assert moments.update(state, totals, failed) is state, "the failed silo's part is random"
    assert "calibrated nothing" in moments.read(state, totals, failed).warnings[0]
    alone = {**totals, COUNTS: np.array([43.0, 0, 0])}
    assert moments.update(state, alone, cohort) is state, "one class alone says nothing of the others"


class _FailsOnce(Records):
    """A silo that is stopped when its records are first passed over without augmentation.

    Enrolment has looked at the form of one by then.
    """

    _looks = 0

    def records(self, fold: str, *, augment_seed: int | None = None) -> Any:
        if fold == "train" and augment_seed is None:
            self._looks += 1
            if self._looks == 2:
                raise RunError("stopped", code="TF-504")
        return super().records(fold, augment_seed=augment_seed)


def _run(method: str = "ccvr", *, fails: bool = False, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "dataset": "fed_isic2019",
        "dataset_options": {"image_size": 16},
        "model_options": {"widths": [8]},
        "training": {"epochs": 1, "batch_size": 8, "learning_rate": 0.05},
        "method_options": {"virtual_features": 20, "epochs": 2} if method == "ccvr" else {},
    }
    silos = {name: Records(in_turn(seed), seed) for seed, name in enumerate("abcdef")}
    if fails:
        silos["d"] = _FailsOnce(in_turn(3), 3)
    return federation.run(method, silos, 2, **{**options, **changes})


@functools.cache
def _whole() -> Any:
    """Return a run with secure sums in which nobody drops out."""
    return _run(summation="secure")


@pytest.mark.whole
def test_secure_sums_give_the_same_bits_as_plain_ones() -> None:
    """Under the class rules: three silos hold each of the classes 0 and 1, all six class 2."""
    plain, secure = _run(summation="plain"), _whole()
    assert all(torch.equal(plain.state.model[name], secure.state.model[name]) for name in plain.state.model)
    assert [row.kind for row in secure.outcome.rows][-3:] == ["after", "after", "closing"]
    bare = _run("fedavg")
    same = {name for name in bare.state.model if torch.equal(bare.state.model[name], plain.state.model[name])}
    assert same == {name for name in bare.state.model if "head" not in name}, "the head is calibrated"


@pytest.mark.whole
def test_a_drop_out_after_the_rounds_is_asked_once_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = _run(fails=True, min_sites=3)
    assert "asking all once more" in caplog.text
    whole = _whole()
    assert all(torch.equal(found.state.model[name], whole.state.model[name]) for name in whole.state.model)


@pytest.mark.whole
@pytest.mark.parametrize(("summation", "attempts"), [("secure", {0}), ("secure", {0, 1}), ("plain", {0})])
def test_too_few_silos_after_the_rounds_cost_no_model(
    summation: str, attempts: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three silos all must be there, and one is late when its class sums are asked for."""
    of = job(
        method="ccvr",
        sites=FOUR[:3],
        rounds=1,
        summation=summation,
        model_options={"widths": [8]},
        method_options={"virtual_features": 20, "epochs": 2},
    )

    def late(task: str, site: str, request: Any) -> bool:
        place = (request.get("kind"), request.get("phase"), request.get("attempt"))
        return site == "site-1" and place[:2] == ("after", 1) and place[2] in attempts

    with caplog.at_level(logging.WARNING):
        result, _ = run(of, tmp_path, silent=late)
    assert result.outcome.trained and (tmp_path / "server" / "model.safetensors").is_file()
    left = "the model is as that round left it" in caplog.text
    assert left == (summation == "plain" or attempts == {0, 1})
    assert ("asking all once more" in caplog.text) == (summation == "secure")
