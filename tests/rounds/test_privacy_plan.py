"""What a job with privacy plans, priced by Opacus on its own; what is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opacus.accountants import PRVAccountant

from tightframe import methods
from tightframe.config.job import ONE_RELEASE, parse_job
from tightframe.errors import JobError
from tightframe.phases import Field, Phase, Schema
from tightframe.privacy.events import Gaussian
from tightframe.rounds import setup as rounds_setup
from tightframe.rounds.privacy_plan import honest_silos, noise_of_scores
from tightframe.rounds.riders.evaluation import FOLDS
from tightframe.rounds.riders.noisy_evaluation import summarise
from tightframe.rounds.setup import JobSetup, prepare

PRIVATE = {item.name: {} for item in methods.METHODS if item.private is not None} | {
    "fedrs": {"form": "soft"}
}
"""Methods that have a form for differential privacy, with the options of it."""

JOB: dict[str, Any] = {
    "job_name": "private",
    "method": "fedavg",
    "dataset": "fed_isic2019",
    "dataset_options": {"image_size": 16},
    "model": "small_cnn",
    "model_options": {"widths": [8, 8, 8]},
    "sites": [f"site-{number}" for number in range(1, 7)],
    "min_sites": 5,
    "rounds": 20,
    "weights": "uniform",
    "privacy": {"epsilon": 4.0},
}


def _prepared(**changes: Any) -> JobSetup:
    return prepare({**JOB, **changes})


def _by_opacus(steps: list[tuple[float, float, int]], delta: float) -> float:
    # Not RDP: noise is solved by privacy-loss distributions, and RDP's bound of it is 4.38.
    accountant = PRVAccountant()
    accountant.history = list(steps)
    return float(accountant.get_epsilon(delta))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("method", "releases", "prior"), [("fedavg", 0, False), ("fedetf", 0, True), ("fedmr", 10, False)]
)
def test_a_silos_whole_job_costs_what_it_promises(method: str, releases: int, prior: bool) -> None:
    plan = _prepared(method=method).privacy
    assert plan is not None
    assert (len(plan.releases), plan.prior) == (releases, prior)
    assert plan.number_of_releases == releases + prior
    sigma = plan.training_noise(0.1, 200)
    spent = [(sigma, 0.1, 200)]
    if plan.class_noise is not None:
        number = releases + (1 if releases else 0) + prior  # one of them may be repeated
        spent += [(plan.class_noise, 1.0, 1)] * number
        assert list(plan.class_events) == [Gaussian(plan.class_noise)] * number
    assert 3.99 < _by_opacus(spent, 1e-5) <= 4.0 + 0.0105  # PRV is 0.01 above the value
    less = [(noise * 0.9, rate, steps) for noise, rate, steps in spent]
    assert _by_opacus(less, 1e-5) > 4.0


def test_releases_are_as_many_as_asked_and_only_these_rounds_have_class_sums() -> None:
    setup = _prepared(method="fedmr", privacy={"epsilon": 4.0, "releases": 3})
    assert setup.privacy is not None and len(setup.privacy.releases) == 3
    with_sums = [
        number
        for number in range(1, 21)
        if any(item.mechanism == "class_sums" for item in setup.training_phases(number)[0].schema.fields)
    ]
    assert tuple(with_sums) == setup.privacy.releases


@pytest.mark.parametrize("method", PRIVATE)
def test_every_field_of_every_sum_has_a_mechanism(method: str) -> None:
    rounds = methods.get(method).rounds or JOB["rounds"]
    for exchange in _prepared(method=method, method_options=PRIVATE[method], rounds=rounds).plan:
        for phase in exchange.phases:
            fields = phase.schema.fields
            assert fields and all(item.mechanism is not None for item in fields)
            assert not any(item.static for item in fields)


@pytest.mark.parametrize("where", ["before", "after", "train"])
def test_a_field_without_a_mechanism_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In any round: here in the fifth of twenty, beside fields that have one, or in a phase of its own."""
    known = methods.get("fedavg")
    bare = Schema((Field("extra/sum", (), bound=1.0),))

    def alone(*_: Any) -> tuple[Phase, ...]:
        return (replace(known.plan(rounds_setup_of[0].setting, 1, 20)[0], schema=bare),)

    def plan(setting: Any, number: int, rounds: int) -> tuple[Phase, ...]:
        (phase,) = known.plan(setting, number, rounds)
        return (replace(phase, schema=phase.schema + bare if number == 5 else phase.schema),)

    rounds_setup_of = [_prepared()]
    changed = replace(known, **({"plan": plan} if where == "train" else {where: alone}))
    monkeypatch.setattr(rounds_setup.methods, "get", lambda name: changed)
    with pytest.raises(JobError, match="privacy: nothing protects the field extra/sum of fedavg"):
        _prepared()
    assert prepare({**JOB, "privacy": None}).method is changed


def test_without_privacy_nothing_changes() -> None:
    setup = _prepared(privacy=None)
    assert setup.privacy is None and setup.evaluates and setup.setting.privacy is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "exact"}, "weights: Expected 'uniform'"),
        ({"personalise": True}, "personalise"),
        ({"training": {"amp": True}}, "training.amp"),
        ({"local_baseline_epochs": 1}, "local_baseline_epochs"),
        ({"method": "fednh"}, "fednh has no form for differential privacy"),
        ({"method": "scaffold"}, "scaffold has no form"),
        ({"method": "fedilc"}, "fedilc has no form"),
        ({"method_options": {"loss": "focal"}}, "loss 'focal' sums exact class counts"),
        ({"method": "fedmr", "method_options": {"lite_m": 4}}, "lite_m"),
        ({"method": "fedmr", "method_options": {"intra_form": "official"}}, "intra_form 'official'"),
        ({"privacy": {"epsilon": 0.0}}, "privacy.epsilon"),
        ({"privacy": {"epsilon": 4.0, "neighbours": "image"}}, "privacy.neighbours"),
        ({"privacy": {"evaluation": "exact"}}, "privacy.evaluation"),
    ],
)
def test_what_would_leave_without_noise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        _prepared(**changes)
    assert words in str(caught.value)


def test_batch_normalisation_is_replaced_on_both_sides_alike() -> None:
    names = [
        [
            name
            for name, _ in _prepared(model="resnet18", model_options={}, dataset_options={"image_size": 32})
            .setting.build_model()
            .named_buffers()
        ]
        for _ in range(2)
    ]
    assert names == [[], []]


def test_the_honest_share_is_the_threshold_less_the_colluders() -> None:
    job = parse_job(JOB)
    assert honest_silos(job, 6) == 4  # t = 5, c = 1
    assert honest_silos(parse_job({**JOB, "summation": "plain"}), 6) == 1
    lenient = {**JOB, "server_trust": "semi_honest", "min_sites": 3}
    assert honest_silos(parse_job(lenient), 6) == 3  # t = 4


def test_no_smaller_sum_than_the_jobs_own_minimum_is_opened_so_shares_may_be_smaller() -> None:
    whole = parse_job({**JOB, "min_sites": 3, "whole_sums": True})
    assert [honest_silos(whole, enrolled) for enrolled in (6, 5, 4, 3)] == [5, 4, 3, 2], "n - c of the roster"
    assert honest_silos(parse_job({**JOB, "min_sites": 6}), 6) == 5
    assert honest_silos(parse_job({**JOB, "whole_sums": True, "colluders": 2}), 6) == 4
    assert honest_silos(parse_job({**JOB, "min_sites": 3, "whole_sums": False}), 6) == 4


@pytest.mark.parametrize("method", sorted(PRIVATE))
def test_private_jobs_of_one_release_plan_no_repeat_and_open_whole_and_no_others(method: str) -> None:
    rounds = methods.get(method).rounds or JOB["rounds"]
    values = {**JOB, "method": method, "method_options": PRIVATE[method], "rounds": rounds}
    setup = prepare(values)
    assert setup.privacy is not None
    one = setup.privacy.frozen is not None and not setup.privacy.trains
    assert (method in ONE_RELEASE) == one, "the names are those of the registry"
    job = setup.job
    assert job.privacy is not None and job.privacy.spare_rounds == (0 if one else 1)
    assert (job.whole_sums, honest_silos(job, 6)) == ((True, 5) if one else (None, 4))
    assert ("whole_sums" in job.model_dump()) == one, "other jobs keep their files and hashes"
    assert parse_job(job.model_dump(mode="json")).sha256() == job.sha256()
    given = {**values, "whole_sums": False, "privacy": {"epsilon": 4.0, "spare_rounds": 1}}
    said = parse_job(given)
    assert (said.whole_sums, said.privacy and said.privacy.spare_rounds) == (False, 1), (
        "a job may say otherwise"
    )
    assert parse_job(said.model_dump(mode="json")).sha256() == said.sha256()
    exact = parse_job({**values, "privacy": None})
    assert exact.whole_sums is None and "whole_sums" not in exact.model_dump()


@pytest.mark.parametrize("summation", ["secure", "plain"])
def test_what_noise_hides_is_known_before_the_run(summation: str) -> None:
    setup = _prepared(summation=summation, privacy={"epsilon": 4.0, "evaluation": "noisy"})
    assert setup.privacy is not None and setup.privacy.evaluation is not None
    config = setup.privacy.evaluation.config
    totals = {
        f"evaluation/{fold}/{name}": np.zeros(shape)
        for fold in FOLDS
        for name, shape in (("confusion", (8, 8)), ("scores", (8, 2, 4)))
    }
    honest = honest_silos(setup.job, 6)
    test = summarise(totals, config, setup.dataset.class_names, silos=6, honest=honest).test
    assert noise_of_scores(setup.job, setup.privacy) == (test.noise_deviation, test.class_floor)
