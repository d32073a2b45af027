"""Fed3R, FedCGS and FedNCM: whole runs against scikit-learn on the pooled records, and as a start."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from tests.support.pages import Page
from tests.support.runs import FOUR, job, run
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.data.arrays import ArrayData
from tightframe.errors import JobError, RunError
from tightframe.inference.model import load_model
from tightframe.learning.one_sum import with_head
from tightframe.learning.one_sum.feature_sums import (
    COARSE,
    COUNTS,
    RECORDS,
    FeatureSums,
    contribute_sums,
    pooled,
)
from tightframe.learning.one_sum.temperature import GRID
from tightframe.methods import METHODS, fed3r, fedcgs, fedncm
from tightframe.phases import ADMITTED
from tightframe.report import writing
from tightframe.rounds.riders import failures
from tightframe.rounds.setup import prepare
from tightframe_app import cli

SOLVED = {"fed3r": fed3r, "fedcgs": fedcgs, "fedncm": fedncm}
PIXELS = {"dataset": "digits", "model": "mlp", "model_options": {"widths": []}}
"""Features are the 64 pixels."""
PLAIN = {**PIXELS, "summation": "plain", "class_rules": "off"}


@functools.cache
def _loaded() -> Any:
    return load_digits(return_X_y=True)


def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """800 training, 200 validation and 797 test images."""
    images, labels = _loaded()
    order = np.random.default_rng(6).permutation(len(labels))
    parts = dict(zip(("train", "validation", "test"), np.split(order, [800, 1000]), strict=True))
    shaped = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return {fold: (shaped[part], labels[part]) for fold, part in parts.items()}


def phi(images: np.ndarray) -> np.ndarray:
    """The features of records in float64, in the unit ball."""
    flat = images.reshape(len(images), -1).astype(np.float64)
    return np.asarray(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1))


def silos_of(owners: dict[str, np.ndarray], count: int) -> dict[str, ArrayData]:
    """Records of the folds by the silo that owns each."""
    folds = digits()
    return {
        f"silo-{silo}": ArrayData(
            {
                fold: tuple(item[owners[fold] == silo] for item in folds[fold])  # type: ignore[misc]
                for fold in folds
            },
            source="digits",
            num_classes=10,
        )
        for silo in range(count)
    }


def partition(name: str) -> dict[str, ArrayData]:
    rng, folds = np.random.default_rng(9), digits()
    if name == "one silo":
        return silos_of({fold: np.zeros(len(labels)) for fold, (_, labels) in folds.items()}, 1)
    if name == "a class each":
        return silos_of({fold: labels for fold, (_, labels) in folds.items()}, 10)
    if name == "Dirichlet 0.05":
        shares = rng.dirichlet([0.05] * 10, 10)
        owners = {
            fold: np.array([rng.choice(10, p=shares[label]) for label in labels])
            for fold, (_, labels) in folds.items()
        }
        # Enrolment refuses a silo without training records.
        owners["train"][:10] = np.arange(10)
        return silos_of(owners, 10)
    count = int(name.split()[0])
    return silos_of({fold: np.arange(len(labels)) % count for fold, (_, labels) in folds.items()}, count)


def equal(one: Any, two: Any) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("method", "widths", "names"),
    [
        ("fed3r", [], ("one silo", "a class each", "Dirichlet 0.05")),
        ("fed3r", [48], ("one silo", "Dirichlet 0.05")),
        ("fedcgs", [], ("one silo", "Dirichlet 0.05")),
        ("fedncm", [], ("one silo", "Dirichlet 0.05")),
    ],
)
def test_every_partition_gives_the_same_model(method: str, widths: list[int], names: Sequence[str]) -> None:
    """To the bit; the sums are Fed3R's, which has all of them, whatever a method solves of them."""
    values = {**PLAIN, "model_options": {"widths": widths}, "seed": 4}
    found = [federation.run(method, partition(name), 1, **values).state.model for name in names]
    assert all(equal(found[0], other) for other in found[1:])


def sums_over(silos: Sequence[ArrayData], *, products: bool) -> Any:
    """What the server has, from the terms of some silos whose features are pixels."""
    totals: dict[str, Any] = {}
    for silo in silos:
        own = FeatureSums(10, 64, products=products)
        images = np.stack([inputs.numpy() for inputs, _ in silo.records("train")])
        own.add(torch.from_numpy(images).flatten(1), torch.from_numpy(silo.labels("train")))
        totals = {name: totals.get(name, 0) + item.numpy() for name, item in own.tensors().items()}
    return pooled(totals)


def test_the_solutions_are_scikit_learns_on_the_pooled_records() -> None:
    (images, labels) = digits()["train"]
    features, ten = phi(images), list(partition("10 silos").values())
    found = sums_over(ten, products=True)

    weight, bias = fed3r.solve(fed3r.Fed3RConfig(ridge=0.5), found, True)
    wide = np.c_[features, np.full(len(features), 0.3)]
    oracle = Ridge(alpha=0.5, fit_intercept=False).fit(wide, np.eye(10)[labels])
    np.testing.assert_allclose(weight, oracle.coef_[:, :-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(bias, 0.3 * oracle.coef_[:, -1], rtol=0, atol=1e-6)
    bare, none = fed3r.solve(fed3r.Fed3RConfig(ridge=0.5), found, False)
    oracle = Ridge(alpha=0.5, fit_intercept=False).fit(features, np.eye(10)[labels])
    np.testing.assert_allclose(bare, oracle.coef_, rtol=0, atol=1e-6)
    assert not none.any()

    weight, bias = fedcgs.solve(fedcgs.FedCGSConfig(shrinkage=0.1), found, True)
    shrunk = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(features, labels)
    factor = len(labels) / (len(labels) - 10)  # scikit-learn divides the scatter by N
    largest = np.abs(shrunk.coef_).max()
    np.testing.assert_allclose(weight * factor / largest, shrunk.coef_ / largest, rtol=0, atol=1e-6)

    weight, _ = fedncm.solve(fedncm.FedNCMConfig(), sums_over(ten, products=False), True)
    np.testing.assert_allclose(weight, NearestCentroid().fit(features, labels).centroids_, rtol=0, atol=1e-6)


def head_scores(model: Any, images: np.ndarray) -> np.ndarray:
    """Scores of pixels by a final model's tensors, with mean zero."""
    scores = phi(images) @ model["head.weight"].double().numpy().T + model["head.bias"].double().numpy()
    return np.asarray(scores - scores.mean(1, keepdims=True))


@pytest.mark.whole
def test_a_runs_model_is_scikit_learns_at_one_temperature() -> None:
    """And the evaluation through sums is that of this model."""
    folds = digits()
    (images, labels), (others, truth) = folds["train"], folds["test"]
    oracles = {
        "fed3r": Ridge(alpha=0.5, fit_intercept=False).fit(
            np.c_[phi(images), np.full(len(images), 0.3)], np.eye(10)[labels]
        ),
        "fedncm": NearestCentroid().fit(phi(images), labels),
    }
    for method, options in (("fed3r", {"ridge": 0.5}), ("fedncm", {})):
        result = federation.run(method, partition("4 silos"), 1, **PLAIN, method_options=options)
        found = head_scores(result.state.model, others)
        if method == "fed3r":
            told = oracles[method].predict(np.c_[phi(others), np.full(len(others), 0.3)])
            told = told - told.mean(1, keepdims=True)
            temperature = float(np.median(told / found))
            assert min(abs(temperature - item) for item in GRID) < 1e-4 * temperature
            np.testing.assert_allclose(found * temperature, told, rtol=0, atol=1e-6)
        final = result.outcome.final()
        assert final is not None and final.evaluation is not None
        assert np.array_equal(found.argmax(1), head_scores(result.state.model, others).argmax(1))
        accuracy = float((found.argmax(1) == truth).mean())
        assert final.evaluation.test.accuracy == pytest.approx(accuracy, abs=1e-12) and accuracy > 0.88
        assert final.evaluation.test.loss is not None and final.evaluation.test.loss < 0.45, "calibrated"
        if method == "fedncm":
            assert np.array_equal(found.argmax(1), oracles[method].predict(phi(others)))


@pytest.mark.whole
@pytest.mark.parametrize("method", SOLVED)
def test_secure_sums_give_the_same_bits_as_plain_ones(method: str) -> None:
    plain, secure = (
        federation.run(method, partition("4 silos"), 1, **PIXELS, summation=kind)
        for kind in ("plain", "secure")
    )
    assert equal(plain.state.model, secure.state.model)
    kinds = [(row.kind, row.round) for row in secure.outcome.rows]
    assert kinds == [*[("before", 0)] * 3, ("start", 0), ("train", 1), ("closing", 1)]


class Stopped(ArrayData):
    """Is stopped when its training records are read, which is for the sums."""

    def records(self, fold: Any, *, augment_seed: int | None = None) -> Any:
        if fold == "train":
            raise RunError("stopped", code="TF-504")
        return super().records(fold, augment_seed=augment_seed)


@pytest.mark.whole
def test_without_a_silo_that_is_lost_the_model_is_that_of_the_others() -> None:
    """Six silos with plain sums; counts and sums of the records are asked of all, and one does not answer."""
    six = partition("6 silos")
    five = {name: item for name, item in six.items() if name != "silo-2"}
    expected = federation.run("fed3r", five, 1, **PLAIN).state.model
    six["silo-2"].__class__ = Stopped
    found = federation.run("fed3r", six, 1, **PLAIN, min_sites=5)
    lost = [(row.kind, list(row.dropped)) for row in found.outcome.rows if row.dropped]
    # It is there again for the validation records, of which it then tells.
    assert lost == [("before", ["silo-2"])] * 2, "the count of different rows, and their sums"
    whole = federation.run("fed3r", partition("6 silos"), 1, **PLAIN).state.model
    direction, of_five, of_six = (
        torch.nn.functional.normalize(model["head.weight"].flatten(), dim=0)
        for model in (found.state.model, expected, whole)
    )
    assert torch.allclose(direction, of_five, rtol=0, atol=1e-6), "the same, but for the temperature"
    assert not torch.allclose(direction, of_six, rtol=0, atol=1e-4)


@pytest.mark.whole
def test_in_secure_sums_a_lost_silo_is_asked_again_and_a_silo_that_never_came_is_left_out(
    tmp_path: Path,
) -> None:
    """Sums of records are counts: opened for all enrolled silos or not at all."""
    base = {"method": "fed3r", "rounds": 1, "class_rules": "off"}
    of = job(**base, sites=FOUR, min_sites=3)
    whole, _ = run(of, tmp_path / "whole")

    def late(attempts: set[int]) -> Any:
        def silent(task: str, site: str, request: Any) -> bool:
            place = (request.get("kind"), request.get("phase"))
            return site == "site-4" and place == ("before", 1) and request.get("attempt") in attempts

        return silent

    again, _ = run(of, tmp_path / "again", silent=late({0}))
    assert equal(again.state.model, whole.state.model)
    with pytest.raises(RunError, match=r"^TF-510: [\s\S]*could not be opened"):
        run(of, tmp_path / "gone", silent=late({0, 1}))
    three = job(**base, sites=FOUR[:3], min_sites=3)
    expected, _ = run(three, tmp_path / "three")
    absent, _ = run(of, tmp_path / "absent", silent=lambda task, site, request: site == "site-4")
    assert equal(absent.state.model, expected.state.model), "the three that enrolled"
    assert not equal(absent.state.model, whole.state.model)


class Overflowing(ArrayData):
    """Whose features are not finite, in a model that others can use."""

    def records(self, fold: Any, *, augment_seed: int | None = None) -> Any:
        return [(torch.full((1, 8, 8), torch.inf), int(label)) for label in self.labels(fold)]


@pytest.mark.parametrize("rules", ["on", "off"])
def test_a_silo_that_cannot_add_its_sums_ends_the_run_with_its_counts_in_the_total(
    rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts that are missing follow from the total of another start; without its B no model is right."""
    told: list[Any] = []
    untrained = failures.untrained
    monkeypatch.setattr(failures, "untrained", lambda *given: told.append(untrained(*given)) or told[-1])
    six = partition("6 silos")
    six["silo-2"].__class__ = Overflowing
    with pytest.raises(RunError, match=r"^TF-510: .*1 silo of 6 could not add its own"):
        federation.run("fed3r", six, 1, **{**PLAIN, "class_rules": rules, "min_sites": 3})
    (made,) = told
    counts = np.bincount(six["silo-2"].labels("train"), minlength=10)
    assert np.array_equal(made.tensors[COUNTS], counts) and made.tensors[RECORDS] == counts.sum()
    assert not made.tensors[COARSE].any()


@pytest.mark.whole
def test_under_the_class_rules_a_class_of_two_silos_is_in_nothing_and_all_say_so(tmp_path: Path) -> None:
    """Class 9 is at two silos only: the model is that of all other records."""
    folds = digits()
    owners = {fold: np.arange(len(labels)) % 5 for fold, (_, labels) in folds.items()}
    owners["train"][folds["train"][1] == 9] %= 2
    ruled, whole = (
        federation.run(
            "fed3r", silos_of(owners, 5), 1, folder=tmp_path / rules, **{**PLAIN, "class_rules": rules}
        )
        for rules in ("on", "off")
    )
    (images, labels) = folds["train"]
    kept = labels != 9
    own = FeatureSums(10, 64, products=True)
    own.add(torch.from_numpy(images[kept]).flatten(1), torch.from_numpy(labels[kept]))
    expected = pooled({name: item.numpy() for name, item in own.tensors().items()})
    weight, bias = fed3r.solve(fed3r.Fed3RConfig(), expected, True)
    told = phi(images) @ weight[:9].numpy().T + bias[:9].numpy()
    scores = phi(images) @ ruled.state.model["head.weight"].double().numpy().T
    scores += ruled.state.model["head.bias"].double().numpy()
    assert (scores[:, 9] == -30).all() and (scores.argmax(1) < 9).all()
    assert np.array_equal(scores[:, :9].argmax(1), told.argmax(1))
    ratio = (told - told.mean(1, keepdims=True)) / scores[:, :9]
    np.testing.assert_allclose(ratio, np.median(ratio), rtol=0.01)
    said = "9 is not in the model, which never answers it: fewer than 3 silos have 5 patients of it."
    results = tmp_path / "on" / "server"
    compared = CliRunner().invoke(cli.app, ["compare", *(str(tmp_path / name) for name in ("on", "off"))])
    writing.write(results)
    for told in (ruled.outcome.screen(), Page.of(results).text):
        assert said in told
    assert "not in the model, because too few silos have it: 9" in compared.output
    assert json.loads((results / "model.json").read_text())["absent_classes"] == ["9"]
    assert load_model(tmp_path / "on").absent_classes == ("9",)
    assert not load_model(tmp_path / "off").absent_classes and not whole.outcome.absent_classes


def test_too_few_holders_end_the_run_and_say_why() -> None:
    with pytest.raises(RunError, match="two classes at least, but got 0: three silos"):
        federation.run("fed3r", partition("a class each"), 1, **{**PLAIN, "class_rules": "on"})


def test_records_of_a_withheld_class_are_in_no_sum(make_setting: Any, make_silo: Any) -> None:
    setting = replace(make_setting(None), num_classes=3)
    silo = make_silo(setting, [0] * 4 + [1] * 5 + [2] * 3)
    model = {f"model/{name}": item for name, item in setting.build_model().state_dict().items()}

    def told(**received: torch.Tensor) -> dict[str, torch.Tensor]:
        return contribute_sums(silo, {**model, **received}, products=True, radius=1.0)

    whole, part = told(), told(**{ADMITTED: torch.tensor([True, False, True])})
    assert float(whole[RECORDS]) == 12 and float(part[RECORDS]) == 7
    without = make_silo(setting, [0] * 4 + [1] * 5 + [2] * 3)
    kept = without.labels != 1
    without.inputs, without.labels = without.inputs[kept], without.labels[kept]
    alone = contribute_sums(without, model, products=True, radius=1.0)
    assert all(torch.equal(alone[name], part[name]) for name in alone)
    none = told(**{ADMITTED: torch.zeros(3, dtype=torch.bool)})
    assert not any(item.any() for item in none.values())
    silo.offers_prototypes = False
    assert not any(item.any() for item in told().values())


def values(**changes: Any) -> dict[str, Any]:
    base = {"job_name": "x", "method": "fedavg", "dataset": "digits", "model": "mlp", "rounds": 2}
    return {**base, "sites": ["a", "b", "c"], "min_sites": 3, **changes}


def test_more_rounds_are_refused_with_what_to_do_instead() -> None:
    for method in SOLVED:
        with pytest.raises(JobError, match=f"rounds: Expected 1 with {method}.*start: {method}"):
            prepare(parse_job(values(method=method)))
        prepare(parse_job(values(method=method, rounds=1)))
    assert {item.name for item in METHODS if item.rounds is not None} == set(SOLVED)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "fedetf"}, "start: fedetf has a head of its own"),
        ({"method": "fed3r", "rounds": 1}, "start: fed3r has a head of its own"),
        ({"method": "fedproto"}, "start: fedproto has no global model"),
        ({"start": "fedavg"}, "start: fedavg is no closed form.*fed3r, fedcgs, fedncm"),
        ({"start": "fedxyz"}, "start: .*fedxyz"),
        ({"start": "fedcgs", "model": "conv2cifar", "dataset": "cifar10"}, "start: .*to have a bias"),
    ],
)
def test_a_start_that_the_model_cannot_take_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(JobError, match=match):
        prepare(parse_job(values(**{"start": "fed3r", **changes})))


def test_a_job_without_a_start_has_the_hash_that_it_had() -> None:
    assert "start" not in parse_job(values()).model_dump()
    assert parse_job(values(start="fed3r")).model_dump()["start"] == "fed3r"
    bare = {"model": "conv2cifar", "dataset": "cifar10", "start": "fed3r"}
    assert prepare(parse_job(values(**bare))).start is fed3r.METHOD, "a head without a bias"


STARTED: dict[str, Any] = {
    **PLAIN,
    "model_options": {"widths": [32]},
    "seed": 3,
    "local_baseline_epochs": 1,
    "training": {"learning_rate": 0.02, "batch_size": 32},
}


@pytest.fixture(scope="module")
def unstarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[federation.Result, Path]:
    """A run that begins with the seed's head, and its folder."""
    folder = tmp_path_factory.mktemp("bare")
    return federation.run("fedavg", partition("4 silos"), 2, **STARTED, folder=folder), folder


@pytest.mark.whole
@pytest.mark.parametrize("start", SOLVED)
def test_a_start_sets_the_head_and_training_goes_on(
    start: str, unstarted: tuple[federation.Result, Path], tmp_path: Path
) -> None:
    """The first round's evaluation is of the closed form; the backbone begins as without a start."""
    (bare, place), silos = unstarted, partition("4 silos")
    begun = federation.run("fedavg", silos, 2, **STARTED, folder=tmp_path, start=start)
    closed = federation.run(start, silos, 1, **{**STARTED, "training": {}, "local_baseline_epochs": 0})
    first = next(row for row in begun.outcome.rows if row.kind == "start")
    final = closed.outcome.final()
    assert first.evaluation is not None and final is not None and final.evaluation is not None
    assert abs(first.evaluation.test.accuracy - final.evaluation.test.accuracy) < 0.02  # type: ignore[operator]
    assert first.evaluation.test.loss < 1.3 * final.evaluation.test.loss  # type: ignore[operator]
    last, without = begun.outcome.final(), bare.outcome.final()
    assert last is not None and last.evaluation is not None
    assert without is not None and without.evaluation is not None
    assert last.evaluation.test.accuracy > without.evaluation.test.accuracy  # type: ignore[operator]
    # A baseline is of one silo alone, and so begins with the seed's head.
    both = [load_file(folder / "silo-0" / "silo_state" / "start.safetensors") for folder in (place, tmp_path)]
    assert equal(*both)


@pytest.mark.whole
def test_secure_silos_compute_the_head_themselves(tmp_path: Path) -> None:
    of = job(method="fedavg", rounds=1, start="fed3r", class_rules="off")
    result, line = run(of, tmp_path)
    asked = [request for task, _, request, _ in line.seen if task == "contribute"]
    assert not any("state_bytes" in request for request in asked), "nobody needed the server's state"
    assert result.outcome.trained


def test_a_single_logit_is_the_difference_of_two_rows() -> None:
    model = {"head.weight": torch.zeros(1, 3), "head.bias": torch.zeros(1), "other": torch.ones(1)}
    weight, bias = torch.tensor([[1.0, 2, 3], [5.0, 5, 5]]).double(), torch.tensor([1.0, 4.0]).double()
    made = with_head(model, weight, bias)
    assert made["head.weight"].tolist() == [[4, 3, 2]] and made["head.bias"].tolist() == [3]
    assert made["head.weight"].dtype == torch.float32 and made["other"] is model["other"]
    assert set(with_head({"head.weight": torch.zeros(2, 3)}, weight, bias)) == {"head.weight"}


def test_a_personal_model_is_trained_at_the_silo() -> None:
    result = federation.run(
        "fed3r",
        partition("4 silos"),
        1,
        **PLAIN,
        personalise=True,
        training={"learning_rate": 0.05, "batch_size": 16},
    )
    personal = result.outcome.personal
    assert personal is not None and personal.accuracy is not None and personal.accuracy > 0.85
