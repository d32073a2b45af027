"""Noisy evaluations in runs: planned, charged before the noise, bounded by the promise, read as told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import balanced_accuracy_score
from tests.support.audit import gaussian_epsilon
from tests.support.ledgers import charges_in
from tests.support.runs import asked, heart, missed

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.errors import JobError, RunError
from tightframe.files import write_atomically
from tightframe.phases import UNKNOWN
from tightframe.privacy.accounting import BudgetError
from tightframe.privacy.events import Gaussian
from tightframe.privacy.ledger.entries import Charge
from tightframe.privacy.releases import evaluation_totals
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.plan import CLOSING
from tightframe.rounds.riders import evaluation, failures, noisy_evaluation
from tightframe.rounds.riders.noisy_evaluation import with_noise
from tightframe.rounds.run_state import state_bytes
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo import private_view as private_silo
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.state_files import DECLARATION
from tightframe.rounds.sums.simulated_identity import simulated_identity

SITES = ["site-1", "site-2", "site-3", "site-4"]
DECLARED = Declaration(
    weight=1.0, synthetic=True, profile="research", min_class_count=1, any_static_cohort=False, untold=()
)
PRIVACY: dict[str, Any] = {"epsilon": 8.0, "evaluation": "noisy", "spare_rounds": 0}
JOB: dict[str, Any] = {
    "job_name": "told",
    "method": "fedavg",
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "model_options": {"widths": [8]},
    "sites": SITES,
    "min_sites": 3,
    "rounds": 1,
    "seed": 5,
    "weights": "uniform",
    # Every record in each step, so that all charges are plain Gaussians with a closed form.
    "training": {"epochs": 1, "batch_size": 1024, "learning_rate": 0.1, "augment": False},
    "privacy": PRIVACY,
}


def _prepared(rounds: int = 20, **privacy: Any) -> JobSetup:
    return prepare({**JOB, "rounds": rounds, "privacy": {**PRIVACY, **privacy}})


def _charges(folder: Path, site: str = "site-1") -> list[Charge]:
    return charges_in(folder / "silo_state" / "privacy" / site / "ledger.sqlite")


def _mu(noises: list[float]) -> float:
    return float(sum(noise**-2 for noise in noises) ** 0.5)


@pytest.mark.parametrize(("evaluations", "spare", "count"), [(1, 0, 1), (3, 2, 5), (99, 0, 20)])
def test_evaluations_cost_their_share_and_the_job_what_it_promises(
    evaluations: int, spare: int, count: int
) -> None:
    plan = _prepared(evaluations=evaluations, spare_rounds=spare).privacy
    assert plan is not None and plan.evaluation is not None
    noise = plan.evaluation.config.noise_multiplier
    assert plan.evaluation.events == (Gaussian(noise),) * count
    assert 0.79 < gaussian_epsilon(_mu([noise] * count), 1e-5) <= 0.8
    # A silo that takes all of its records in each of 20 steps.
    sigma = plan.training_noise(1.0, 20)
    assert 7.9 < gaussian_epsilon(_mu([noise] * count + [sigma] * 20), 1e-5) <= 8.0


def test_evaluations_are_where_the_public_schedule_says_and_have_a_mechanism() -> None:
    setup = _prepared(evaluations=3)
    assert setup.privacy is not None and setup.privacy.evaluation is not None
    assert setup.privacy.evaluation.after == (7, 14, 20)
    told = []
    for exchange in setup.plan:
        for phase in exchange.phases:
            fields = phase.schema.fields
            assert all(item.mechanism is not None and not item.static for item in fields)
            names = [item.name for item in fields if item.name.startswith("evaluation/")]
            assert not any(name.endswith("loss") for name in names)
            if names:
                told.append((exchange.kind, exchange.round, exchange.index, len(names)))
    # The model of round r is what round r + 1 begins with.
    assert told == [("train", 8, 0, 4), ("train", 15, 0, 4), ("closing", 20, 0, 4)]
    assert "noisy totals of the evaluation after round 7, after round 14, of the last model" in (
        setup.privacy.describe()
    )
    (closing,) = _prepared(evaluation="local").plan.at(CLOSING, 20)
    assert [item.mechanism for item in closing.phase.schema.fields] == ["constant"]


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"neighbours": "patient"}, "privacy.evaluation: Expected 'local' unless `neighbours` is 'record'"),
        ({"class_noise_share": 0.6, "evaluation_noise_share": 0.4}, "privacy.evaluation_noise_share"),
        ({"evaluation_noise_share": 1.0}, "privacy.evaluation_noise_share"),
        ({"evaluations": 0}, "privacy.evaluations"),
    ],
)
def test_what_does_not_go_with_it(privacy: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(**privacy)
    assert words in str(caught.value)


def _toy(inputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([inputs.sum(1), inputs[:, 0], -inputs[:, 1]], 1)


@pytest.mark.parametrize("findings", [False, True])
def test_each_record_of_either_fold_changes_a_term_by_exactly_the_sensitivity(
    findings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the code that counts and weighs, by leaving out each record in turn."""
    config = evaluation_totals.EvaluationConfig(1.0, 3, findings)
    monkeypatch.setattr(evaluation_totals, "noise_for", lambda shape, *_: np.zeros(shape, np.int64))
    stream = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(12, 4, generator=stream), torch.arange(12) % 3
    inputs[5] = torch.tensor([float("nan"), 1e30, -1e30, 0.0])
    if findings:
        labels = torch.randint(0, 2, (12, 3), generator=stream)
        labels[7, 1] = UNKNOWN
    folds = torch.arange(12) % 2  # validation, test

    def term(kept: torch.Tensor) -> NDArray[np.int64]:
        batches: Mapping[Any, Any] = {
            fold: iter([(inputs[kept & (folds == place)], labels[kept & (folds == place)])])
            for place, fold in enumerate(evaluation.FOLDS)
        }
        counted = evaluation.count(
            torch.nn.Identity(),
            lambda _, values: _toy(values),
            batches,
            num_classes=3,
            score_bins=5,
            findings=findings,
        )
        found = with_noise(counted, config, 1)
        return np.concatenate([config.as_units(item.numpy()).ravel() for item in found.values()])

    whole = term(torch.ones(12, dtype=torch.bool))
    for record in range(12):
        change = whole - term(torch.arange(12) != record)
        unknown = 2 * config.confusion_units**2 if findings and record == 7 else 0
        assert sum(int(value) ** 2 for value in change) == config.squared_sensitivity - unknown


def _session(folder: Path, **privacy: Any) -> tuple[SiloSession, JobSetup]:
    values = {**PRIVACY, "noise_multiplier": 50.0, **privacy}
    job = parse_job({**JOB, "rounds": 4, "summation": "plain", "privacy": values})
    identity = partial(simulated_identity, "run", "site-1", production=False)
    context = SiloContext("site-1", job, None, run_dir=folder, job_id="run", identity=identity)
    write_atomically(context.state_folder / DECLARATION, DECLARED.to_bytes())  # as its enrolment did
    return SiloSession(context), prepare(job)


def _request(setup: JobSetup, kind: str, number: int) -> dict[str, Any]:
    """A request for a term; behind the first round the silo has missed all sums before."""
    (exchange,) = setup.plan.at(kind, number)
    request = asked(setup, exchange, declared=dict.fromkeys(SITES, DECLARED.to_bytes()))
    if (kind, number) == ("train", 1):
        return request
    start = setup.initial_state()
    sent = {"state_bytes": state_bytes(start), "before": "0" * 64}
    return request | sent | {"total": missed(setup, exchange).to_bytes()}


@pytest.mark.parametrize(("evaluation", "number"), [("noisy", 1), ("noisy", 2), ("noisy", 4), ("local", 3)])
def test_a_silo_answers_evaluations_of_the_public_schedule_only(
    tmp_path: Path, evaluation: str, number: int
) -> None:
    session, setup = _session(tmp_path, evaluations=2, evaluation=evaluation)
    session.handle("contribute", _request(setup, "train", number))
    assert [item.purpose for item in _charges(tmp_path)] == [f"round {number} training"]  # and no evaluation


def test_an_evaluation_within_training_is_charged_beside_it(tmp_path: Path) -> None:
    session, setup = _session(tmp_path, evaluations=2)
    session.handle("contribute", _request(setup, "train", 3))  # of the model after round 2 of 4
    assert [item.purpose for item in _charges(tmp_path)] == ["round 3 evaluation", "round 3 training"]


def test_noise_is_charged_before_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> NDArray[np.int64]:
        raise RuntimeError("no noise today")

    monkeypatch.setattr(evaluation_totals, "noise_for", broken)
    # A failed silo's share of the noise: `silo/test_failures.py`.
    monkeypatch.setattr(failures, "with_noise", lambda made, *_: made)
    session, setup = _session(tmp_path)
    term = session.handle("contribute", _request(setup, "closing", 4))["term"]
    assert not any(term["update"] + term["static"])  # what failed is not told, and nothing else is either
    (charge,) = _charges(tmp_path)
    assert setup.privacy is not None and setup.privacy.evaluation is not None
    assert (charge.purpose, charge.attempt) == ("closing evaluation", 0)
    assert charge.event == Gaussian(setup.privacy.evaluation.config.noise_multiplier)
    assert charge.cohort == tuple(SITES) and charge.neighbours == "record"


def test_a_repeat_is_charged_again_and_nothing_is_drawn_beyond_the_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    real = evaluation_totals.noise_for

    def noting(*given: Any) -> NDArray[np.int64]:
        drawn.append(given)
        return real(*given)

    monkeypatch.setattr(evaluation_totals, "noise_for", noting)
    session, setup = _session(tmp_path, evaluation_noise_share=0.7)
    request = _request(setup, "closing", 4)
    session.handle("contribute", request)
    assert len(drawn) == 4  # two totals of two folds
    assert setup.privacy is not None and setup.privacy.evaluation is not None
    noise = setup.privacy.evaluation.config.noise_multiplier
    assert gaussian_epsilon(_mu([noise]), 1e-5) <= 8.0 < gaussian_epsilon(_mu([noise] * 2), 1e-5)
    (tmp_path / "local_report.json").unlink()
    with pytest.raises(BudgetError, match="it promises"):
        session.handle("contribute", request)
    assert len(drawn) == 4 and len(_charges(tmp_path)) == 1
    # What stays at the silo is there all the same, and exact.
    report = json.loads((tmp_path / "local_report.json").read_text())
    assert report["global"]["test"]["loss"] is not None and "noisy" not in report["global"]["test"]


@pytest.mark.whole
def test_the_totals_are_the_silos_integers_and_their_noise_in_plain_and_secure_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fixed draw, and training without noise, so that two runs can be alike."""
    draws: list[NDArray[np.int64]] = []
    exact: list[Mapping[str, torch.Tensor]] = []
    opened: list[Mapping[str, NDArray[np.float64]]] = []
    count, read = evaluation.count, noisy_evaluation.summarise

    def fixed(shape: tuple[int, ...], *_: Any) -> NDArray[np.int64]:
        draws.append(np.random.default_rng(len(draws) % 16).integers(-(2**24), 2**24, shape))
        return draws[-1]

    def counting(*given: Any, **named: Any) -> dict[str, torch.Tensor]:
        exact.append(count(*given, **named))
        return dict(exact[-1])

    def reading(totals: Any, *given: Any, **named: Any) -> Any:
        opened.append(totals)
        return read(totals, *given, **named)

    monkeypatch.setattr(evaluation_totals, "noise_for", fixed)
    monkeypatch.setattr(evaluation, "count", counting)
    monkeypatch.setattr(noisy_evaluation, "summarise", reading)
    monkeypatch.setattr(private_silo.PrivateSilo, "fit", LocalSilo.fit)
    for summation in ("plain", "secure"):
        training = {**JOB["training"], "learning_rate": 1e-3}
        privacy = {**PRIVACY, "noise_multiplier": 50.0}
        job = parse_job({**JOB, "summation": summation, "training": training, "privacy": privacy})
        data = {site: heart(site) for site in SITES}
        federation.run_job(job, data=data, folder=tmp_path / summation)
    assert len(opened) == 2 and len(exact) == 8 and len(draws) == 32
    config = evaluation_totals.EvaluationConfig(1.0, 2)
    for place, name in enumerate(opened[0]):
        weight = config.confusion_units if name.endswith("confusion") else config.score_units
        expected = sum(item[name].numpy().astype(np.int64) * weight for item in exact[:4])
        expected = expected + sum(draws[place:16:4])
        for totals in opened:
            assert (np.rint(totals[name] * evaluation_totals.GRID) == expected).all()


@pytest.mark.whole
@pytest.mark.usefixtures("pages")
def test_a_run_told_at_a_large_epsilon_and_a_silo_that_drops_out_of_the_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictions: list[tuple[torch.Tensor, torch.Tensor]] = []
    count, handle = evaluation.count, SiloSession.handle

    def counting(model: Any, predict: Any, batches: Any, **named: Any) -> dict[str, torch.Tensor]:
        held = list(batches["test"])
        predictions.extend((labels, predict(model.eval(), inputs).argmax(1)) for inputs, labels in held)
        return count(model, predict, {**batches, "test": iter(held)}, **named)

    def dropping(self: SiloSession, task: str, message: Any) -> Any:
        if self.context.name == "site-4" and task == "contribute" and message["kind"] == "closing":
            raise RunError("gone", code="TF-502")
        return handle(self, task, message)

    monkeypatch.setattr(evaluation, "count", counting)
    monkeypatch.setattr(SiloSession, "handle", dropping)
    privacy = {**PRIVACY, "epsilon": 60.0, "noise_multiplier": 2.0, "evaluation_noise_share": 0.7}
    result = federation.run_job(parse_job({**JOB, "privacy": privacy}), folder=tmp_path)
    final = result.outcome.final()
    assert final is not None and final.evaluation is not None
    test = final.evaluation.test
    assert final.evaluated_by == SITES[:3]
    labels, found = (torch.cat([pair[i] for pair in predictions]).numpy() for i in (0, 1))
    exact = balanced_accuracy_score(labels, found)
    assert 0 < test.balanced_accuracy_deviation < 0.05
    assert abs(test.balanced_accuracy - exact) < 6 * test.balanced_accuracy_deviation
    assert abs(test.records - len(labels)) < 6 * 2 * test.noise_deviation + 1
    # t - c = 2 honest silos share the noise of which three are in the sum.
    plan = result.outcome
    screen = plan.screen()
    assert "noisy balanced accuracy" in screen and "of 2 classes" in screen and "Exact test metrics" in screen
    rows = [json.loads(line) for line in (tmp_path / "server" / "metrics.jsonl").read_text().splitlines()]
    row = next(item for item in rows if item["evaluation"])
    assert row["noisy"] and row["noise_deviation"] == test.noise_deviation
    page = (tmp_path / "server" / "report.html").read_text(encoding="utf-8")
    assert f"with noise: {test.noise_deviation:.1f} records" in page and "Loss by round" not in page
    assert f"final model has noisy balanced accuracy {test.balanced_accuracy:.3f}" in page
    low, high = test.balanced_accuracy_interval
    # It is a 95% interval: three times as long it has the exact value in all but one of a million runs.
    assert 2 * low - high <= exact <= 2 * high - low
    assert f"{test.balanced_accuracy:.3f} [{low:.3f}, {high:.3f}], {test.classes_told} of 2 classes" in page
    # Noise and not the cohort protects these totals, so that the others may measure the final model.
    assert result.outcome.status == "trained" and list(result.outcome.lost) == ["site-4"]
    assert result.outcome.notes[1:] == ["The final model was measured without site-4: by 3 of 4 silos."]
    outcome = json.loads((tmp_path / "server" / "outcome.json").read_text())
    assert outcome["evaluation"]["test"]["noisy"] and outcome["best_round_by_validation"] is None
    assert any("noisy totals of the evaluation" in rule for rule in outcome["rules"])
    for site in SITES[:3]:
        charges = _charges(tmp_path / site, site)
        assert [item.purpose for item in charges] == ["round 1 training", "closing evaluation"]
        noise = charges[1].event.noise_multiplier
        assert test.noise_deviation == pytest.approx(noise * 2**0.5 * 1.5**0.5, rel=1e-3)
        assert charges[1].alone == Gaussian(noise / 2**0.5)
