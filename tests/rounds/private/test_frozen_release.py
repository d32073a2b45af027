"""Runs of the closed forms under privacy: one noisy release, charged once, before its noise is drawn."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.methods.test_one_sum import PIXELS, digits, head_scores, partition
from tests.rounds.private.test_patients import JOB, some, twins, view
from tests.support.audit import gaussian_epsilon
from tests.support.ledgers import charges_of

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.errors import JobError, RunError, TightframeError
from tightframe.learning.one_sum import noisy_sums
from tightframe.methods import get
from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.releases import frozen_sums
from tightframe.privacy.releases.frozen_sums_plan import GRID, Part
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.silo.private_view import PrivateSilo
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.common import RefusedError
from tightframe.rounds.sums.secure_server import SecureSums

SILOS = [f"silo-{number}" for number in range(4)]
BASE: dict[str, Any] = {**PIXELS, "encoder": "random", "weights": "uniform", "seed": 2}
HONEST = 3
"""n - c of four silos with c = 1: a release opens with all of them, or not at all."""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PRV, which stands beside what is held; ``tests/privacy`` tests it."""
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)


def private(method: str, folder: Path | None = None, *, privacy: dict[str, Any], **changes: Any) -> Any:
    return federation.run(method, partition("4 silos"), 1, folder=folder, **BASE, privacy=privacy, **changes)


def options_of(method: str) -> dict[str, Any]:
    return {"method_options": {"ridge": 0.5}} if method == "fed3r" else {}


@functools.cache
def exact_run(method: str) -> federation.Result:
    """With plain exact sums."""
    values = {**BASE, "class_rules": "off", "summation": "plain", **options_of(method)}
    return federation.run(method, partition("4 silos"), 1, **values)


def noiseless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "share", lambda part, shape, honest: np.zeros(shape, np.int64))
    monkeypatch.setattr(Part, "deviation", lambda part, **_: 0.0)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("method", "summation"),
    [("fed3r", "plain"), ("fed3r", "secure"), ("fedcgs", "plain"), ("fedncm", "plain")],
)
def test_without_noise_the_head_is_that_of_the_exact_sums(
    method: str, summation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for its temperature, and what cutting features to 2^-12 changes."""
    noiseless(monkeypatch)
    exact = exact_run(method)
    found = private(method, privacy={"epsilon": 90.0}, summation=summation, **options_of(method))
    images = digits()["test"][0]
    told, made = (head_scores(result.state.model, images) for result in (exact, found))
    if method == "fed3r":  # its intercepts are set anew: the slopes are the ridge regression's
        told, made = (
            np.asarray(result.state.model["head.weight"].double().numpy()) for result in (exact, found)
        )
    ratio = float((told * made).sum() / (made**2).sum())
    assert np.abs(told - ratio * made).max() < 0.02 * np.abs(told).max()
    assert [row.kind for row in found.outcome.rows if row.silos] == ["train", "closing"], "one exchange"


def test_it_is_charged_once_before_it_is_drawn_and_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    draw, charge = Part.share, Ledger.charge_all

    def charging(ledger: Ledger, *args: Any, **kwargs: Any) -> Any:
        charged.append(0)
        return charge(ledger, *args, **kwargs)

    def drawing(part: Part, shape: tuple[int, ...], honest: int) -> Any:
        assert charged and honest == HONEST
        charged[-1] += 1
        return draw(part, shape, honest)

    monkeypatch.setattr(Ledger, "charge_all", charging)
    monkeypatch.setattr(Part, "share", drawing)
    result = private("fed3r", tmp_path, privacy={"epsilon": 4.0, "spare_rounds": 0})
    assert charged == [4] * 4, "each silo charges, and then draws for G's two parts, B and n"
    for site in SILOS:
        (only,) = charges_of(tmp_path, site)
        assert only.purpose == "round 1 feature sums" and isinstance(only.event, Gaussian)
        z = only.event.noise_multiplier
        assert 3.99 < gaussian_epsilon(1 / z, 1e-5) <= 4.0, "all of epsilon, and not more"
        assert only.alone is not None and only.alone.noise_multiplier == z / math.sqrt(HONEST)
    rules = "\n".join(result.outcome.rules)
    assert "one noisy release of products, class sums and class counts of frozen features" in rules
    assert "no training" in rules and "DP-SGD" not in rules
    accuracy = (head_scores(result.state.model, digits()["test"][0]).argmax(1) == digits()["test"][1]).mean()
    assert accuracy > 0.8
    row = next(row for row in result.outcome.rows if row.kind == "train")
    assert row.evaluation is None and not row.training


def test_the_budget_is_planned_for_repeats_and_evaluations() -> None:
    def noise(method: str = "fedncm", **privacy: Any) -> float:
        values = {
            **{key: value for key, value in BASE.items() if key != "seed"},
            **{"job_name": "x", "method": method, "sites": SILOS, "min_sites": 3, "rounds": 1},
        }
        plan = prepare(parse_job({**values, "privacy": {"epsilon": 2.0, **privacy}})).privacy
        assert plan is not None and plan.frozen is not None and not plan.trains
        total = accounting.guaranteed(plan.release_events, 1e-5)
        assert privacy.get("noise_multiplier") or 1.99 < total <= 2.0
        return plan.frozen.config.noise_multiplier

    alone, spare = noise(spare_rounds=0), noise(spare_rounds=1)
    assert spare == pytest.approx(alone * math.sqrt(2), rel=1e-3)
    evaluated = noise(spare_rounds=0, evaluation="noisy", evaluation_noise_share=0.5)
    assert alone < evaluated < 1.3 * alone
    assert noise(noise_multiplier=7.5) == 7.5
    assert noise("fed3r", spare_rounds=0) == alone


def test_a_budget_that_does_not_hold_it_is_refused_before_anything_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("drawn")

    monkeypatch.setattr(Part, "share", never)
    with pytest.raises(TightframeError, match="TF-701"):
        private("fedncm", privacy={"epsilon": 2.0, "noise_multiplier": 0.5, "spare_rounds": 0})


def losing(monkeypatch: pytest.MonkeyPatch, lost: str | None) -> list[Any]:
    """Let the last silo go at a task; return the list of the totals that are opened, at which runs end."""
    handle = SiloSession.handle
    opened: list[Any] = []

    def dropping(self: SiloSession, task: str, message: Any) -> Any:
        answer = handle(self, task, message)
        if lost == task and self.context.name == "silo-3" and message.get("kind", "train") == "train":
            raise RunError("gone", code="TF-502")
        return answer

    def reading(totals: Any) -> Any:
        opened.append(totals)
        raise RunError("enough", code="TF-510")

    monkeypatch.setattr(SiloSession, "handle", dropping)
    monkeypatch.setattr("tightframe.learning.one_sum.read", reading)
    return opened


@pytest.mark.whole
@pytest.mark.parametrize(
    ("whole", "lost", "silos", "honest"),
    [
        (None, None, 4, 3),
        (None, "enroll", 3, 2),  # shares follow the roster that enrolled: three of the job's four
        (False, None, 4, 2),
        (False, "contribute", 3, 2),
    ],
)
def test_the_opened_noise_is_what_was_promised_and_half_of_it_is_found(
    whole: bool | None,
    lost: str | None,
    silos: int,
    honest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No record is in the sums here, so that what a secure sum opens is noise and nothing else."""
    opened = losing(monkeypatch, lost)
    monkeypatch.setattr(frozen_sums.FrozenTotals, "_add", lambda *_: None)

    def carried(name: str) -> tuple[float, float]:
        """The squared noise over the promised variance, and the deviation that the method is told."""
        opened.clear()
        with pytest.raises(RunError):
            private("fed3r", privacy={"epsilon": 4.0}, min_sites=3, whole_sums=whole)
        values = opened[0][f"released/{name}"]
        weight = {"products": 0.5 * math.sqrt(2), "sums": 1.0}[name]
        squared = 0.5**2 + 1 + 0.15**2
        z = accounting.solve(lambda noise: [Gaussian(noise)], epsilon=4.0, delta=1e-5)
        promised = z**2 * squared / weight**2
        told = float(opened[0][f"released/{name}/deviations"]) ** 2 / promised
        return float((values**2).sum()) / promised / values.size, told

    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], 640) / 640
    found, told = carried("sums")
    assert low < found * honest / silos < high
    assert told * honest / silos == pytest.approx(1, rel=1e-3)
    assert found > 1, "at least what was promised: one silo more than the honest ones"
    real = Part.share_variance
    monkeypatch.setattr(Part, "share_variance", lambda part, honest: real(part, honest) // 4)
    assert carried("sums")[0] * honest / silos < low


@pytest.mark.whole
def test_a_release_without_one_silo_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three others' shares would carry all of the noise only if none of them colluded."""
    opened = losing(monkeypatch, "contribute")
    with pytest.raises(RunError, match="TF-501"):
        private("fedncm", tmp_path, privacy={"epsilon": 4.0}, min_sites=3)
    assert not opened
    assert len(charges_of(tmp_path, "silo-0")) == 1, "what was drawn stays charged"


@pytest.mark.whole
def test_nor_by_a_server_that_opens_smaller_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each silo refuses by itself: to sign or reveal for less than all, and to enrol by other parameters."""
    opened = losing(monkeypatch, "contribute")
    refused: list[str] = []
    handle = SiloSession.handle

    def noting(self: SiloSession, task: str, message: Any) -> Any:
        try:
            return handle(self, task, message)
        except TightframeError as error:
            if task in ("agree", "reveal"):
                refused.append(f"{task} {error.code} {error}")
            raise

    monkeypatch.setattr(SiloSession, "handle", noting)
    with monkeypatch.context() as lying:
        lying.setattr("tightframe.securesum.server.minimum_survivors", lambda params: 3)
        with pytest.raises(RunError, match="TF-501"):
            private("fedncm", privacy={"epsilon": 4.0}, min_sites=3)
    assert len(refused) == 3 and not opened
    assert all(item.startswith("agree TF-611") and "at least 4" in item for item in refused)
    params = SecureSums._params
    monkeypatch.setattr(
        SecureSums, "_params", lambda sums, roster: replace(params(sums, roster), min_sites=3)
    )
    with pytest.raises(RefusedError, match=r"silo-0, silo-1, silo-2 and silo-3 refused: TF-601"):
        private("fedncm", privacy={"epsilon": 4.0}, min_sites=3)
    assert not opened


TABLE = {"rounds": 1, "model": "identity", "model_options": {}, "training": {"batch_size": 3}}


@pytest.mark.parametrize("method", ["fed3r", "fedncm"])
def test_without_any_one_patient_a_release_changes_by_its_sensitivity_at_most(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brute force, through the silo's own batches, in which patients are cut apart."""
    noiseless(monkeypatch)
    monkeypatch.setattr(Budget, "charge", lambda *_, **__: None)

    def moved(neighbours: str) -> float:
        privacy = {"epsilon": 60.0, "neighbours": neighbours, "noise_multiplier": 1.0}

        def made(gone: int | None) -> dict[str, torch.Tensor]:
            folder = tmp_path / neighbours / str(gone)
            asked = view(folder, some(gone), method=method, privacy=privacy, **TABLE)
            model = asked.load(prepare(asked.setup.job).initial_state().model).eval()
            return asked.private_frozen_sums(model, 32, products=method == "fed3r", radius=1.0)

        release = view(tmp_path, some(), method=method, privacy=privacy, **TABLE)._plan.frozen
        assert release is not None and release.config.neighbours == neighbours
        whole, found = made(None), []
        for person in np.unique(some().groups("train")):  # type: ignore[arg-type]
            change = {name: (item - whole[name]) * GRID for name, item in made(int(person)).items()}
            found.append(
                sum(
                    float(item.square().sum()) / release.config.part(name).squared_sensitivity
                    for name, item in change.items()
                )
            )
        return max(found)

    assert 0.3 < moved("patient") <= 1
    assert moved("record") > 2, "who has several records has several times as much"


@pytest.mark.whole
def test_a_federation_releases_and_charges_by_patient(tmp_path: Path) -> None:
    job = parse_job(
        {**JOB, **TABLE, "method": "fedcgs", "privacy": {"epsilon": 8.0, "neighbours": "patient"}}
    )
    result = federation.run_job(job, data=twins(), folder=tmp_path)
    assert result.outcome.trained
    (only,) = charges_of(tmp_path, "site-1")
    assert only.neighbours == "patient" and only.purpose == "round 1 feature sums"
    assert "for one patient more or less" in "\n".join(result.outcome.rules)


@pytest.mark.whole
def test_a_silo_that_fails_still_adds_its_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes: list[Any] = []
    draw, add = Part.share, PrivateSilo._add_features

    def failing(self: PrivateSilo, *args: Any) -> None:
        if self.name == "silo-1":
            raise ValueError("records are broken")
        add(self, *args)

    def drawing(part: Part, shape: tuple[int, ...], honest: int) -> Any:
        shapes.append(shape)
        return draw(part, shape, honest)

    monkeypatch.setattr(PrivateSilo, "_add_features", failing)
    monkeypatch.setattr(Part, "share", drawing)
    result = private("fedncm", tmp_path, privacy={"epsilon": 8.0, "spare_rounds": 0})
    assert result.outcome.trained
    assert sorted(shapes) == sorted([(10, 64), (10,)] * 4)
    assert charges_of(tmp_path, "silo-1") == [], "noise alone says nothing of its records"
    assert len(charges_of(tmp_path, "silo-2")) == 1


@pytest.mark.whole
def test_a_start_is_released_once_beside_the_training(tmp_path: Path) -> None:
    privacy = {"epsilon": 30.0, "spare_rounds": 0, "feature_clip": 3.0, "class_noise_share": 0.5}
    training = {"batch_size": 1024, "learning_rate": 0.01, "momentum": 0.0, "augment": False}
    result = private("fedavg", tmp_path, privacy=privacy, start="fed3r", training=training)
    charges = charges_of(tmp_path, "silo-0")
    assert [item.purpose for item in charges] == ["start feature sums", "round 1 training"]
    z = charges[0].event.noise_multiplier
    assert 14.9 < gaussian_epsilon(1 / z, 1e-5) <= 15.0, "its part of epsilon"
    assert accounting.guaranteed([item.event for item in charges], 1e-5) <= 30.0
    images, labels = digits()["test"]
    model = result.state.model
    flat = images.reshape(len(images), -1)
    scores = flat @ model["head.weight"].numpy().T + model["head.bias"].numpy()
    assert (scores.argmax(1) == labels).mean() > 0.8, "features are taken as they are"
    assert "sums of frozen features once, for the start" in "\n".join(result.outcome.rules)


def test_nothing_exact_leaves_and_the_rest_stays_refused() -> None:
    for name in ("fed3r", "fedcgs", "fedncm"):
        assert get(name).private is not None
    values = {**BASE, "job_name": "x", "sites": SILOS, "min_sites": 3, "rounds": 1, "method": "fed3r"}
    setup = prepare(parse_job({**values, "privacy": {}}))
    names = {
        item.name for exchange in setup.plan for phase in exchange.phases for item in phase.schema.fields
    }
    assert not any(name.startswith(("frozen/", "temperature/", "classes/")) for name in names)
    with pytest.raises(JobError, match="nothing protects the field statistics/"):
        prepare(
            parse_job(
                {
                    **values,
                    "model": "identity",
                    "encoder": "trained",
                    "model_options": {"standardise": True},
                    "privacy": {},
                }
            )
        )
    plain = {**values, "privacy": {"epsilon": 3.0}}
    dumped = parse_job(plain).model_dump()["privacy"]
    assert "product_weight" not in dumped and "count_weight" not in dumped, "hashes of older jobs stay"


def test_noise_that_hides_every_class_ends_the_run_and_says_so() -> None:
    with pytest.raises(RunError, match=r"^TF-510: [\s\S]*noise hides all but"):
        private("fedncm", privacy={"epsilon": 0.01, "spare_rounds": 0})


def test_the_fields_of_one_feature() -> None:
    names = [item.name for item in noisy_sums.noisy_fields(2, 1, products=True)]
    assert names == ["released/diagonal", "released/sums", "released/counts"]
    totals = {"released/diagonal": np.array([90.0]), "released/counts": np.array([50.0, 60.0])}
    totals |= {"released/sums": np.array([[10.0], [50.0]])}
    totals |= {f"{name}/deviations": np.array(0.1) for name in names}
    found = noisy_sums.read(totals).sums
    assert found.gram is not None and found.gram.tolist() == [[90.0]] and found.noise > 0
    assert torch.allclose(found.counts, torch.tensor([50.0, 60.0]).double(), atol=0.1)
