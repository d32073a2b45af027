"""FedSGD with privacy in whole runs: the noise of the opened sum, what is charged, what is refused."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant
from scipy import stats
from tests.support.audit import gaussian_epsilon
from tests.support.ledgers import charges_of
from tests.support.runs import heart

from tightframe import federation
from tightframe.config.job import Privacy, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.refusals import BelowPolicyError
from tightframe.data.base import SiloData
from tightframe.data.eicu import EicuOptions
from tightframe.data.eicu.twin import open_twin
from tightframe.errors import JobError, RunError
from tightframe.learning.gradients import sharing as shared_gradients
from tightframe.methods.fedsgd import FedSGDConfig
from tightframe.phases import ServerState
from tightframe.privacy import accounting
from tightframe.privacy.events import Gaussian, SubsampledGaussian
from tightframe.privacy.releases.gradient_sums import GradientSumConfig
from tightframe.privacy.training import portions
from tightframe.rounds.privacy_plan import honest_silos
from tightframe.rounds.riders import epsilon, noisy_sums
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import private_view
from tightframe.rounds.silo.session import SiloSession

SITES = ["site-1", "site-2", "site-3", "site-4"]
HONEST = 2
"""t - c of four silos, t = 3 and c = 1, by the protocol's own table."""
JOB: dict[str, Any] = {
    "job_name": "shared",
    "method": "fedsgd",
    "method_options": {"momentum": 0.0},
    "dataset": "fed_heart_disease",
    "model": "mlp",
    "model_options": {"widths": [300]},
    "sites": SITES,
    "min_sites": 3,
    "rounds": 1,
    "seed": 5,
    "weights": "uniform",
    "training": {"batch_size": 64, "augment": False},
    "privacy": {"epsilon": 8.0, "noise": "shared", "spare_rounds": 0},
}


def job(**changes: Any) -> dict[str, Any]:
    privacy = {**JOB["privacy"], **changes.pop("privacy", {})}
    return {**JOB, **changes, "privacy": privacy}


def hearts() -> dict[str, SiloData]:
    return {site: heart(site) for site in SITES}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PRV, which stands beside what is held, and the probe; ``tests/privacy`` tests them."""
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)


# ---------------------------------------------------------------- noise


def carried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], *, failing: str = ""
) -> tuple[float, int]:
    """The squared noise in the opened sum over the promised variance, and of how many numbers."""
    opened = []

    def nothing(model: torch.nn.Module, *_: Any, config: GradientSumConfig, charge: Any, **__: Any) -> Any:
        charge()
        return torch.zeros(config.size + 1, dtype=torch.int64)

    def one_fails(self: Any, *given: Any) -> Any:
        if self.name == failing:
            raise RuntimeError("a record that cannot be read")
        return real_sum(self, *given)

    def as_opened(config: Any, state: ServerState, total: float, silos: int, honest: int) -> Any:
        return state, silos * Privacy().clip_norm  # so that the reading changes nothing

    def keeping(optimizer: Any, state: ServerState, directions: Any, totals: Any, cohort: Any) -> Any:
        opened.append(np.concatenate([np.ravel(item) for name, item in totals.items() if "gradient" in name]))
        return real_descend(optimizer, state, directions, totals, cohort)

    real_descend, real_sum = shared_gradients.descend, private_view.PrivateSilo.private_gradient_sum
    with monkeypatch.context() as patched:
        patched.setattr(private_view, "clipped_gradient_sum", nothing)
        patched.setattr(private_view.PrivateSilo, "private_gradient_sum", one_fails)
        patched.setattr(noisy_sums, "expected_records", as_opened)
        patched.setattr(shared_gradients, "descend", keeping)
        federation.run_job(parse_job(values), data=hearts(), folder=folder)
    plan = prepare(values).privacy
    assert plan is not None and plan.gradients is not None
    config = plan.gradients
    units = config.as_units(opened[0])
    assert len(units) == config.size + 1 and all(np.array_equal(opened[0], other) for other in opened)
    promised = config.noise_multiplier**2 * config.squared_sensitivity
    return float((units.astype(np.float64) ** 2).sum()) / promised, len(units)


def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last silo is gone in training."""
    handle = SiloSession.handle

    def gone(self: SiloSession, task: str, message: Any) -> Any:
        answer = handle(self, task, message)
        if self.context.name == "site-4" and task == "contribute" and message["kind"] == "train":
            raise RunError("gone", code="TF-502")
        return answer

    monkeypatch.setattr(SiloSession, "handle", gone)


@pytest.mark.parametrize("lost", [0, 1])
def test_the_opened_sum_has_the_promised_noise_and_half_of_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    if lost:
        dropping(monkeypatch)
    found, numbers = carried(tmp_path / "kept", monkeypatch, job())
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], numbers)
    assert low < found / ((4 - lost) / HONEST) < high
    assert found > high, "at least what was promised: three silos are more than two"
    share = GradientSumConfig.share_variance
    monkeypatch.setattr(
        GradientSumConfig, "share_variance", lambda config, honest: share(config, honest) // 4
    )
    halved, _ = carried(tmp_path / "halved", monkeypatch, job())
    assert halved < low


def test_where_sums_open_whole_three_silos_make_the_noise_of_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n - c = 3 in place of t - c = 2; and so nothing is opened without one of them."""
    whole = job(whole_sums=True)
    found, numbers = carried(tmp_path / "whole", monkeypatch, whole)
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], numbers)
    assert low < found / (4 / 3) < high
    assert found > high, "at least what was promised: four silos are more than three"
    dropping(monkeypatch)
    opened: list[Any] = []
    monkeypatch.setattr(shared_gradients, "descend", lambda *given: opened.append(given))
    with pytest.raises(RunError, match="TF-501"):
        federation.run_job(parse_job(whole), data=hearts(), folder=tmp_path / "lost")
    assert not opened
    assert charges_of(tmp_path / "lost", "site-1"), "what was sent is charged, opened or not"


@pytest.mark.parametrize(("silos", "before", "after"), [(4, 2, 3), (6, 4, 5), (10, 6, 9)])
def test_the_same_noise_in_the_sum_promises_more_where_sums_open_whole(
    silos: int, before: int, after: int
) -> None:
    """What the sum holds is its silos' shares; what is promised counts on the least honest of them."""
    sites = [f"site-{number}" for number in range(silos)]
    values = {**job(rounds=160), "sites": sites}
    less, more = (parse_job({**values, **extra}) for extra in ({}, {"whole_sums": True}))
    assert (honest_silos(less, silos), honest_silos(more, silos)) == (before, after)
    plan = prepare(more.model_dump(mode="json")).privacy
    assert plan is not None and plan.gradients is not None
    noise = plan.gradients.noise_multiplier
    promised = [
        gaussian_epsilon(math.sqrt(160) / (noise * math.sqrt(honest / after)), 1e-5)
        for honest in (after, before)
    ]
    assert promised[0] == pytest.approx(8, abs=0.01)
    assert promised[1] == pytest.approx({4: 10.24, 6: 9.16, 10: 10.24}[silos], abs=0.02)


def test_with_own_noise_and_with_plain_sums_each_silo_adds_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, values in (("own", job(privacy={"noise": "own"})), ("plain", job(summation="plain"))):
        found, numbers = carried(tmp_path / name, monkeypatch, values)
        low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], numbers)
        assert low < found / 4 < high
        assert [item.alone for item in charges_of(tmp_path / name, "site-1")] == [None]


def test_a_failed_silo_adds_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, told = epsilon.read_totals, []
    monkeypatch.setattr(epsilon, "read_totals", lambda *given: told.append(read(*given)) or told[-1])
    found, numbers = carried(tmp_path, monkeypatch, job(), failing="site-2")
    low, high = stats.chi2.ppf([1e-7, 1 - 1e-7], numbers)
    assert low < found / (4 / HONEST) < high
    assert told and all(item.untold == 0 for item in told), "what it has spent is told as ever"
    assert not charges_of(tmp_path, "site-2"), "noise alone says nothing of its records"


# ---------------------------------------------------------------- charges and the plan


def test_each_round_is_charged_once_with_one_noise_at_all_silos(tmp_path: Path) -> None:
    values = job(rounds=3, model_options={"widths": [4]}, privacy={"epsilon": 2.0, "spare_rounds": 1})
    result = federation.run_job(parse_job(values), data=hearts(), folder=tmp_path)
    plan = prepare(values).privacy
    assert plan is not None and plan.gradients is not None
    noise = plan.gradients.noise_multiplier
    for site in SITES:
        charges = charges_of(tmp_path, site)
        assert [item.purpose for item in charges] == [f"round {number} training" for number in (1, 2, 3)]
        assert {item.event for item in charges} == {Gaussian(noise)}
        assert {item.alone for item in charges} == {Gaussian(noise / math.sqrt(HONEST))}
        report = json.loads((tmp_path / site / "local_report.json").read_text())
        assert report["privacy"]["epsilon"] == pytest.approx(
            gaussian_epsilon(math.sqrt(3) / noise, 1e-5), rel=1e-3
        )
        alone = gaussian_epsilon(math.sqrt(3 * HONEST) / noise, 1e-5)
        assert report["privacy"]["alone"] == pytest.approx(alone, rel=1e-3)
    rules = "\n".join(result.outcome.rules)
    assert "one sum of gradients a round of all records" in rules and "noise shared by all silos" in rules
    assert "it counts on noise that other silos add" in rules
    start = prepare(values).initial_state().model
    assert any(not torch.equal(item, start[name]) for name, item in result.state.model.items())
    assert all(row.evaluation is None and not row.training for row in result.outcome.rows)


def test_with_drawn_records_a_round_is_charged_as_drawn(tmp_path: Path) -> None:
    values = job(
        method_options={"sampling_rate": 0.25},
        model_options={"widths": [4]},
        privacy={"noise_multiplier": 2.0},
    )
    federation.run_job(parse_job(values), data=hearts(), folder=tmp_path)
    (charge,) = charges_of(tmp_path, "site-3")
    assert charge.event == SubsampledGaussian(2.0, 0.25, 1)
    assert charge.alone == SubsampledGaussian(2.0 / math.sqrt(HONEST), 0.25, 1)


@pytest.mark.parametrize(("rate", "rounds"), [(1.0, 30), (0.25, 99)])
def test_the_noise_is_the_least_for_all_rounds_and_the_spare_one(rate: float, rounds: int) -> None:
    """Central DP-SGD's: by the closed form, or Opacus' PRV, which is 0.01 above the value."""
    values = job(
        rounds=rounds, method_options={"sampling_rate": rate}, privacy={"epsilon": 4.0, "spare_rounds": 1}
    )
    plan = prepare(values).privacy
    assert plan is not None and plan.gradients is not None

    def cost(noise: float) -> float:
        if rate == 1:
            return gaussian_epsilon(math.sqrt(rounds + 1) / noise, 1e-5)
        accountant = PRVAccountant()
        accountant.history = [(noise, rate, rounds + 1)]
        return float(accountant.get_epsilon(1e-5))

    noise = plan.gradients.noise_multiplier
    assert cost(noise) <= 4.0 + (0.0105 if rate < 1 else 1e-9)
    assert cost(noise * 0.98) > 4.0
    # Public numbers alone: neither records nor site have a part in it.
    other = prepare({**values, "training": {"batch_size": 1}}).privacy
    assert other is not None and other.gradients == plan.gradients


def test_a_plan_over_the_jobs_promise_is_refused_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(private_view, "clipped_gradient_sum", lambda *_, **__: drawn.append(1))
    values = job(privacy={"epsilon": 1.0, "noise_multiplier": 0.5})
    with pytest.raises(RunError, match="TF-701"):
        federation.run_job(parse_job(values), folder=tmp_path)
    assert not drawn and not charges_of(tmp_path, "site-1")


def test_patients_are_drawn_clipped_and_charged(tmp_path: Path) -> None:
    options = {"twin_scale": 0.05, "drugs": 32}
    values = job(dataset="eicu", dataset_options=options, model_options={"widths": [4]}, sites=SITES[:3])
    values = {**values, "privacy": {**values["privacy"], "neighbours": "patient"}}
    data = {site: open_twin(place, EicuOptions(**options)) for place, site in enumerate(SITES[:3])}  # type: ignore[arg-type]
    result = federation.run_job(parse_job(values), data=data, folder=tmp_path)
    assert "of all patients" in "\n".join(result.outcome.rules)
    assert {item.neighbours for item in charges_of(tmp_path, "site-1")} == {"patient"}
    patients = sum(len(np.unique(silo.groups("train"))) for silo in data.values())
    plan = prepare(values).privacy
    assert plan is not None and plan.gradients is not None
    told = float(result.state.extra[noisy_sums.GRADIENTS + "records"])
    # Three silos of three, t = 3 and c = 1: 3 / 2 of the promised variance.
    assert abs(told - patients) < 6 * plan.gradients.records_deviation(1.5)
    records = sum(len(silo.labels("train")) for silo in data.values())
    assert records - patients > 12 * plan.gradients.records_deviation(1.5), "which tells both apart"


# ---------------------------------------------------------------- what divides the sum


def test_the_mean_is_over_all_numbers_so_far_and_never_below_their_noise() -> None:
    config = GradientSumConfig(10.0, 650)
    one = config.count_units / config.grid
    reading = partial(noisy_sums.expected_records, config, honest=2)
    state, expected = reading(ServerState({}), 1000 * one, 4)
    assert expected == pytest.approx(1000)
    state, expected = reading(state, 1400 * one, 4)
    assert expected == pytest.approx(1200)
    state, expected = reading(state, 600 * one, 2)  # after a drop-out: 300 records a silo as before
    assert expected == pytest.approx(600)
    _, lone = reading(ServerState({}), -50 * one, 4)
    assert (
        lone == pytest.approx(config.records_deviation(4 / 2)) == pytest.approx(10 * 5.099 * 2**0.5, rel=1e-3)
    )


# ---------------------------------------------------------------- what is refused, what stays


def test_a_site_may_want_all_noise_to_be_its_own() -> None:
    strict = PolicyBlock(profile="standard", private_noise="own", delta_cap=1e-3).resolve(production=True)
    shared, own, plain = (
        parse_job(job(**changes)) for changes in ({}, {"privacy": {"noise": "own"}}, {"summation": "plain"})
    )
    with pytest.raises(BelowPolicyError, match="private_noise: the job asks for noise shared by all silos"):
        strict.check(shared)
    strict.check(own)
    lenient = PolicyBlock(profile="research", private_noise="own").resolve(production=False)
    lenient.check(plain)  # there a silo adds all of it anyway
    PolicyBlock(profile="standard").resolve(production=True).check(shared)


def test_a_site_that_wants_norms_wants_none_of_a_noisy_sum_of_gradients() -> None:
    policy = PolicyBlock(profile="standard").resolve(production=True)
    policy.check_method(FedSGDConfig(), parse_job(job()))
    with pytest.raises(BelowPolicyError, match="no update_norm"):
        policy.check_method(FedSGDConfig(), parse_job({**JOB, "privacy": None}))


def test_jobs_without_the_option_keep_their_files_and_hashes() -> None:
    given = parse_job(job(privacy={"noise": "own"}))
    assert "noise" not in given.model_dump()["privacy"]
    assert parse_job(job()).model_dump()["privacy"]["noise"] == "shared"
    assert given.sha256() == parse_job({**JOB, "privacy": {"epsilon": 8.0, "spare_rounds": 0}}).sha256()
    with pytest.raises(JobError, match="noise"):
        parse_job(job(privacy={"noise": "none"}))
