"""Whole runs with differential privacy: what leaves, what is charged, what is refused, what is told."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding
from opacus.accountants import PRVAccountant
from tests.support.audit import gaussian_epsilon
from tests.support.jobs import SMALL
from tests.support.ledgers import charges_in, charges_of
from tests.support.pages import written
from tests.support.runs import asked, heart, twin
from tests.support.securesum.certificates import issue, make_root

from tightframe import __version__, federation
from tightframe.config.job import parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.base import SiloData
from tightframe.errors import RunError, SiteConfigError, TightframeError
from tightframe.files import write_atomically
from tightframe.phases import ServerState
from tightframe.privacy import accounting
from tightframe.privacy.accounting import BudgetError
from tightframe.privacy.events import Gaussian, SubsampledGaussian
from tightframe.privacy.ledger.entries import Charge, DatasetError, TamperError
from tightframe.privacy.releases.class_sums_plan import ClassSumsConfig
from tightframe.privacy.training import portions
from tightframe.rounds import site_ledger
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import Declaration
from tightframe.rounds.riders import noisy_sums
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import private_view
from tightframe.rounds.silo.budget import Budget
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import RequestedSum
from tightframe.rounds.site_ledger.known_records import fingerprint
from tightframe.rounds.state_files import DECLARATION
from tightframe.rounds.sums.plain import PlainServer
from tightframe.rounds.sums.simulated_identity import simulated_identity, simulated_root_pem

SITES = ["site-1", "site-2", "site-3", "site-4"]
DECLARED = Declaration(
    weight=1.0, synthetic=True, profile="research", min_class_count=1, any_static_cohort=False, untold=()
)
JOB: dict[str, Any] = {
    **SMALL,
    "job_name": "private",
    "method": "fedmr",
    "sites": SITES,
    "min_sites": 3,
    "rounds": 2,
    "seed": 5,
    "weights": "uniform",
    "training": {"epochs": 1, "batch_size": 64, "learning_rate": 0.1, "augment": False},
    "privacy": {"epsilon": 6.0, "spare_rounds": 0},
}
# To solve the noise for a budget takes seconds at each silo, and so does what sampled steps cost.
GIVEN: dict[str, Any] = {
    **JOB,
    "dataset": "fed_heart_disease",
    "dataset_options": {},
    "model": "mlp",
    "model_options": {"widths": [8]},
    "training": {**JOB["training"], "batch_size": 512},
    "privacy": {"epsilon": 20.0, "noise_multiplier": 1.5},
}


def hearts() -> dict[str, SiloData]:
    return {site: heart(site) for site in SITES}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PRV, which stands beside what is held, and the probe of what is trained.

    ``finished`` has both, the probe at one silo.

    Each takes a second a silo, the probe in every round. ``tests/privacy`` tests them.
    """
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)


PRV_ERROR = 0.01
"""Of PRV, which is so much above the best value at most."""


def _epsilon(charges: list[Charge], delta: float) -> float:
    """By the closed form where every record is in every step, else by Opacus."""
    if all(getattr(item.event, "sampling_rate", 1.0) == 1.0 for item in charges):
        counts = [getattr(item.event, "steps", 1) / item.event.noise_multiplier**2 for item in charges]
        return gaussian_epsilon(sum(counts) ** 0.5, delta)
    accountant = PRVAccountant()
    for item in charges:
        event = item.event
        if isinstance(event, Gaussian):
            accountant.history.append((event.noise_multiplier, 1.0, 1))
        else:
            assert isinstance(event, SubsampledGaussian)
            accountant.history.append((event.noise_multiplier, event.sampling_rate, event.steps))
    return float(accountant.get_epsilon(delta, eps_error=PRV_ERROR))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[federation.Result, Path]:
    folder, checked, check = tmp_path_factory.mktemp("run"), itertools.count(), portions.check_per_record

    def at_one_silo(*given: Any, **named: Any) -> None:
        if next(checked) % len(SITES) == 0:
            check(*given, **named)

    with written(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "check_per_record", at_one_silo)
        data = {site: twin(site) for site in SITES}
        job = parse_job({**JOB, "training": {**JOB["training"], "batch_size": 16}})
        return federation.run_job(job, data=data, folder=folder), folder


def test_every_silo_charges_each_round_once_and_keeps_the_promise(
    finished: tuple[federation.Result, Path],
) -> None:
    _, folder = finished
    for site in SITES:
        charges = charges_of(folder, site)
        assert [item.purpose for item in charges] == [
            "round 1 training",
            "round 1 class sums",
            "round 2 training",
        ]
        assert all(item.cohort == tuple(SITES) and item.neighbours == "record" for item in charges)
        assert charges[1].alone is not None  # what it costs if no other silo adds noise
        assert 5.5 < _epsilon(charges, 1e-5) <= 6.0 + PRV_ERROR
        report = json.loads((folder / site / "local_report.json").read_text())
        assert report["privacy"]["epsilon"] <= 6.0 and report["privacy"]["promised"] == 6.0
        assert report["global"]["test"]["accuracy"] is not None  # at the silo itself


def test_the_server_learns_no_metric_and_says_what_protects(finished: tuple[federation.Result, Path]) -> None:
    result, folder = finished
    assert all(row.evaluation is None and not row.training for row in result.outcome.rows)
    assert result.outcome.trained and result.outcome.final() is None
    outcome = json.loads((folder / "server" / "outcome.json").read_text())
    assert outcome["privacy"]["epsilon"] == 6.0 and outcome["evaluation"] is None
    spent = outcome["privacy_spent"]  # of ranges over silos alone, unless a policy tells more
    assert sum(item["silos"] for item in spent["histogram"]) == len(SITES) and not spent["shown"]
    assert spent["range"] == [4.0, 6.0]
    rules = "\n".join(outcome["rules"])
    assert "each silo at most epsilon 6 at delta 1e-05" in rules and "no differential privacy" not in rules
    assert "local_report.json" in result.outcome.screen()
    page = (folder / "server/report.html").read_text()
    assert "under differential privacy they stay at the silos" in page
    assert "cannot say what privacy cost in accuracy" in page and "export --evaluate FOLDER --set" in page
    own = json.loads((folder / "site-1" / "local_report.json").read_text())["privacy"]["epsilon"]
    told = f"epsilon {math.ceil(own * 1000) / 1000:.3f} of the 6 that it promised"
    assert told in (folder / "site-1/report.html").read_text()


def test_nothing_but_noisy_updates_and_class_sums_is_in_any_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    add = PlainServer.add

    def noting(self: PlainServer, site: str, term: Any) -> None:
        seen.update(item.name.split("/")[0] for item in self._schema.fields)
        add(self, site, term)

    monkeypatch.setattr(PlainServer, "add", noting)
    federation.run_job(parse_job({**GIVEN, "summation": "plain"}), data=hearts(), folder=tmp_path)
    assert seen == {"update", "prototype", "privacy", "closing"}


def test_two_runs_with_one_seed_differ_because_noise_has_none(tmp_path: Path) -> None:
    given = {**GIVEN, "rounds": 1, "summation": "plain"}
    first, again = (
        federation.run_job(parse_job(given), data=hearts(), folder=tmp_path / name).state.model
        for name in ("first", "again")
    )
    assert any(not torch.equal(value, again[name]) for name, value in first.items())


def test_noise_is_charged_before_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("no noise today")

    monkeypatch.setattr(private_view.class_sums, "noise_for", broken)
    job = parse_job(GIVEN)
    result = federation.run_job(job, data=hearts(), folder=tmp_path)
    assert [item.purpose for item in charges_of(tmp_path, "site-1")][:2] == [
        "round 1 training",
        "round 1 class sums",
    ]
    (first, *_) = [row for row in result.outcome.rows if row.kind == "train"]
    assert first.silos == SITES and first.dropped == {} and first.counts == {}, (
        "what failed is told to nobody"
    )


def _budget(folder: Path, name: str, job_id: str, job: dict[str, Any] = JOB) -> Budget:
    setup = prepare(parse_job(job))
    assert setup.privacy is not None
    identity = partial(simulated_identity, job_id, name, production=False)
    context = SiloContext(name, setup.job, None, run_dir=folder, job_id=job_id, identity=identity)
    return Budget(context, setup.privacy, SITES)


def test_a_silo_whose_budget_is_spent_stays_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in production, where the ledger outlives a run and one root certifies a site for all of them.
    monkeypatch.setattr(
        "tightframe.rounds.context.ledger_path", lambda folder, name: tmp_path / f"{name}.sqlite"
    )
    monkeypatch.setattr(site_ledger, "signature_check", lambda anchors, name=None: lambda *signed: None)
    original = SiloContext.policy.func  # type: ignore[attr-defined]
    capped = property(lambda self: original(self).model_copy(update={"epsilon_cap": 6.1}))
    monkeypatch.setattr(SiloContext, "policy", capped)
    earlier = _budget(tmp_path, "site-2", "an earlier job", GIVEN)
    earlier.charge("round 1 training", (SubsampledGaussian(1.5, 1.0, 2),))
    job = {**GIVEN, "privacy": {"epsilon": 6.0, "noise_multiplier": 1.5}}
    result = federation.run_job(parse_job(job), data=hearts(), folder=tmp_path)
    assert result.outcome.not_enrolled == {"site-2": "TF-701"}
    assert result.outcome.trained and all("site-2" not in row.silos for row in result.outcome.rows)
    assert len(charges_in(earlier.path)) == 1  # refused before anything was charged
    assert "the privacy budget does not suffice" in result.outcome.screen()


def test_a_repeated_round_is_charged_again_and_never_beyond_the_promise(tmp_path: Path) -> None:
    setup = prepare(parse_job(JOB))
    assert setup.privacy is not None
    spending = _budget(tmp_path, "site-1", "run")
    event = SubsampledGaussian(setup.privacy.training_noise(0.1, 40), 0.1, 10)
    charged = 0
    with pytest.raises(Exception, match="TF-701") as caught:
        for _ in range(10):
            spending.charge("round 1 training", (event,))
            charged += 1
    assert "it promises" in str(caught.value)
    assert charged == len(charges_in(spending.path)) >= 4
    assert [item.attempt for item in charges_in(spending.path)] == list(range(charged))


def test_two_jobs_of_a_chain_that_charge_at_once_keep_the_promise_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = prepare(parse_job(JOB))
    assert setup.privacy is not None
    event = SubsampledGaussian(setup.privacy.training_noise(0.1, 40), 0.1, 10)
    one = _budget(tmp_path, "site-1", "run")
    promise, most = setup.privacy.privacy, 1
    while accounting.guaranteed([event] * (most + 1), promise.delta) <= promise.epsilon:
        most += 1
    for number in range(most - 1):
        one.charge(f"round {number} training", (event,))
    other, refused, beside = _budget(tmp_path, "site-1", "run"), list[str](), list[threading.Thread]()
    guaranteed = accounting.guaranteed

    def charge() -> None:
        try:
            other.charge("round 99 training", (event,))
        except BudgetError as error:
            refused.append(error.code)

    def slowly(*arguments: Any) -> float:
        found = guaranteed(*arguments)
        if not beside:
            beside.append(threading.Thread(target=charge))
            beside[0].start()
            beside[0].join(0.5)
        return found

    monkeypatch.setattr(accounting, "guaranteed", slowly)
    one.charge("round 98 training", (event,))
    beside[0].join()
    assert refused == ["TF-701"]
    assert len(charges_in(one.path)) == most


def test_the_class_counts_of_a_silos_prior_are_drawn_once_a_job(tmp_path: Path) -> None:
    federation.run_job(parse_job({**GIVEN, "method": "fedetf"}), data=hearts(), folder=tmp_path)
    for site in SITES:
        purposes = [item.purpose for item in charges_of(tmp_path, site)]
        assert purposes.count("class counts") == 1 and len(purposes) == 3


def test_the_total_over_the_silos_carries_the_promised_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = prepare(parse_job(JOB))
    assert setup.privacy is not None
    config, honest, width = setup.privacy.class_sums, 3, 300
    identity = partial(simulated_identity, "run", "site-3", production=False)
    monkeypatch.setattr(Budget, "charge", lambda *_, **__: None)
    drawn = []
    for number in range(4):
        context = SiloContext("site-3", setup.job, None, run_dir=tmp_path, job_id="run", identity=identity)
        view = private_view.PrivateSilo(
            context, setup, torch.device("cpu"), number + 1, RequestedSum(SITES, honest)
        )
        sums, _ = view.private_class_sums(lambda inputs: inputs.new_zeros(len(inputs), width), width)
        drawn.append(sums.numpy())
    total = np.sum(drawn[:honest], 0)
    promised = config.noise_multiplier * (config.feature_clip**2 + config.count_weight**2) ** 0.5
    count = total.size
    # Six standard deviations of a sample variance either way; half the noise would be a quarter of it.
    assert abs(total.var() / promised**2 - 1) < 6 * (2 / count) ** 0.5
    assert abs(np.sum(drawn, 0).var() / promised**2 - 4 / 3) < 8 * (2 / count) ** 0.5
    assert drawn[0].var() * config.grid**2 == pytest.approx(config.share_variance(honest), rel=0.25)


def test_the_server_averages_releases_and_leaves_classes_below_the_floor() -> None:
    setup = prepare(parse_job(JOB))
    assert setup.privacy is not None
    phase = setup.training_phases(1)[0]
    config: ClassSumsConfig = setup.privacy.class_sums
    width = phase.schema["prototype/feature_sums"].shape[1]
    counts = np.array([4000.0, 3.0, *[0.0] * 6])
    means = np.zeros((8, width))
    means[:2, 0] = 0.5
    totals: Mapping[str, Any] = {
        "prototype/feature_sums": means * counts[:, None],
        "prototype/counts": counts * config.count_units / config.grid,
    }
    state, found = noisy_sums.read_class_sums(
        setup.privacy, phase, ServerState({}, {}), totals, silos=4, honest=3
    )
    np.testing.assert_allclose(found["prototype/counts"], [4000, *[0] * 7], rtol=1e-4)
    np.testing.assert_allclose(found["prototype/feature_sums"][0, 0], 2000, rtol=1e-4)
    # The average of this release and of its opposite.
    moved: Mapping[str, Any] = {**totals, "prototype/feature_sums": -means * counts[:, None]}
    _, later = noisy_sums.read_class_sums(setup.privacy, phase, state, moved, silos=4, honest=3)
    assert later["prototype/counts"][0] == pytest.approx(4000, rel=1e-4)
    assert later["prototype/feature_sums"][0, 0] == pytest.approx(0, abs=1e-3)
    assert set(
        noisy_sums.read_class_sums(setup.privacy, phase, state, {"update/x": np.zeros(1)}, silos=4, honest=3)[
            1
        ]
    ) == {"update/x"}


def test_the_same_records_under_another_name_have_no_second_budget(tmp_path: Path) -> None:
    spending = _budget(tmp_path, "site-1", "run")
    events = (SubsampledGaussian(3.0, 0.1, 10),)
    spending.check(events)
    context = spending._context
    renamed = replace(context, entry=SiteEntry(dataset_id="ward-9"), records=context.data)
    with pytest.raises(DatasetError, match="TF-703"):
        Budget(renamed, spending._plan, SITES).check(events)
    assert fingerprint("fed_isic2019", context.data) != fingerprint("eicu", context.data)


def test_more_releases_than_the_policy_has_are_refused_before_the_first(tmp_path: Path) -> None:
    """A noisy evaluation of the last model, and class sums in the first of two rounds."""
    privacy = {"epsilon": 6.0, "spare_rounds": 3, "evaluation": "noisy"}
    setup = prepare(parse_job({**JOB, "privacy": privacy}))
    assert setup.privacy is not None
    spending = _budget(tmp_path, "site-1", "run")

    def check(most: int) -> None:
        entry = SiteEntry.model_validate({"policy": {"max_releases": most}})
        context = replace(spending._context, entry=entry, records=spending._context.data)
        Budget(context, setup.privacy, SITES).check(setup.privacy.release_events)

    expected = r"at most 1 releases \(`max_releases`.* plans 2: .*class sums in 1 round"
    with pytest.raises(BudgetError, match=expected):
        check(1)
    assert charges_in(spending.path) == []
    check(2)  # what may be repeated is no release more


def _session(folder: Path, **changes: Any) -> tuple[SiloSession, Any]:
    job = parse_job({**GIVEN, "summation": "plain", **changes})
    identity = partial(simulated_identity, "run", "site-1", production=False)
    context = SiloContext("site-1", job, None, run_dir=folder, job_id="run", identity=identity)
    write_atomically(context.state_folder / DECLARATION, DECLARED.to_bytes())  # as its enrolment did
    return SiloSession(context), prepare(job)


def _request(setup: Any, **changes: Any) -> dict[str, Any]:
    (exchange,) = setup.plan.round(1)
    return asked(setup, exchange, declared=dict.fromkeys(SITES, DECLARED.to_bytes()), **changes)


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"kind": "personal", "round": 2}, "TF-505"),
        ({"kind": "statistics", "round": 0}, "TF-505"),
        ({"kind": "before", "round": 0}, "TF-505"),
        ({"kind": "after", "round": 2}, "TF-505"),
        ({"round": 3}, "TF-505"),
        ({"phase": 1}, "TF-505"),
        ({"round": 1.5}, "TF-604"),
        ({"round": True}, "TF-604"),
        ({"phase": -1}, "TF-604"),
        ({"attempt": 0.5}, "TF-604"),
    ],
)
def test_a_server_gets_no_sum_that_the_job_does_not_have(
    tmp_path: Path, other: dict[str, Any], code: str
) -> None:
    session, setup = _session(tmp_path)
    with pytest.raises(RunError, match=code):
        session.handle("contribute", _request(setup, **other))
    assert not (session.context.state_folder / "privacy").exists()  # nothing charged


def test_without_privacy_personal_models_are_answered_only_where_the_job_has_them(tmp_path: Path) -> None:
    session, setup = _session(tmp_path, privacy=None)
    with pytest.raises(RunError, match="TF-505"):
        session.handle("contribute", _request(setup, kind="personal", round=2))


def test_a_given_noise_multiplier_keeps_the_promise_too(tmp_path: Path) -> None:
    privacy = {"epsilon": 1.0, "noise_multiplier": 0.3}
    session, _ = _session(tmp_path, privacy=privacy)
    enrol = {"job_sha256": session.context.job.sha256(), "version": __version__}
    with pytest.raises(TightframeError, match="TF-701"):
        session.handle("enroll", enrol)


def test_a_silo_that_keeps_its_prototypes_adds_noise_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[Any] = []
    monkeypatch.setattr(Budget, "charge", lambda *given, **_: charged.append(given))
    monkeypatch.setattr(private_view.class_sums, "noise_for", lambda shape, *_: torch.full(shape, 7))
    setup = prepare(parse_job({**JOB, "prototype_sites": SITES[1:]}))
    identity = partial(simulated_identity, "run", "site-1", production=False)
    context = SiloContext("site-1", setup.job, None, run_dir=tmp_path, job_id="run", identity=identity)
    view = private_view.PrivateSilo(context, setup, torch.device("cpu"), 1, RequestedSum(SITES, 3))
    sums, counts = view.private_class_sums(lambda inputs: inputs.flatten(1)[:, :4], 4)
    assert setup.privacy is not None
    grid = setup.privacy.class_sums.grid
    assert not charged and bool((sums * grid == 7).all()) and bool((counts * grid == 7).all())


def test_a_budget_composes_over_the_projects_of_a_site_once_their_roots_are_named(tmp_path: Path) -> None:
    """Two roots, as after a new root key, or of two projects side by side; one ledger."""
    now = datetime.now(UTC)
    dates = {"start": now - timedelta(days=3), "end": now + timedelta(days=30)}
    context, plan = (made := _budget(tmp_path, "site-1", "run"))._context, made._plan
    projects = [make_root(name, **dates) for name in ("old", "new")]
    kits = [(issue(root, "site-1", **dates).signer(), root.anchor()) for root in projects]
    pems = [tmp_path / "old.pem", tmp_path / "new.pem"]
    for pem, root in zip(pems, projects, strict=True):
        pem.write_bytes(root.x509.public_bytes(Encoding.PEM))

    def project(which: int, job_id: str, *roots: Path, **values: Any) -> Budget:
        entry = SiteEntry.model_validate({"ledger_roots": [str(root) for root in roots], **values})
        changed = replace(context, entry=entry, records=context.data, job_id=job_id)
        changed.identity = lambda: kits[which]
        return Budget(changed, plan, SITES)

    event = SubsampledGaussian(2.0, 1.0, 2)
    project(0, "first").charge("round 1 training", (event,))
    with pytest.raises(TamperError, match="TF-702: Expected the head record to be signed by this site"):
        project(1, "second").charge("round 1 training", (event,))
    assert len(charges_in(project(0, "any").path)) == 1
    project(1, "second", pems[0]).charge("round 1 training", (event,))
    # The other project goes on with it as well, once it trusts the new root; and the cap holds for both.
    with pytest.raises(TamperError, match="TF-702"):
        project(0, "third").charge("round 1 training", (event,))
    # mu of four releases at z = 2 is 1, and of six 1.22: epsilon 4.4 and 5.5 at delta 1e-5.
    capped = project(0, "third", pems[1], policy={"epsilon_cap": 5.0, "delta_cap": 1e-5})
    assert gaussian_epsilon(1.0, 1e-5) < 5.0 < gaussian_epsilon(1.5**0.5, 1e-5)
    with pytest.raises(BudgetError, match=r"Spent: 4\.\d+ by 2 charges"):
        capped.charge("round 1 training", (event,))
    assert [item.job_id for item in charges_in(capped.path)] == ["first", "second"]


def test_the_root_of_no_project_is_trusted_by_mistake(tmp_path: Path) -> None:
    made = _budget(tmp_path, "site-1", "run")
    leaf = tmp_path / "client.crt"
    leaf.write_bytes(issue(make_root(), "site-1").x509.public_bytes(Encoding.PEM))
    simulated = tmp_path / "simulated.pem"
    simulated.write_bytes(simulated_root_pem("run"))
    for path, why in ((leaf, "something else"), (simulated, "a simulated one"), (tmp_path / "no", "No such")):
        entry = SiteEntry(ledger_roots=[str(path)])
        context = replace(made._context, entry=entry, records=made._context.data)
        with pytest.raises(SiteConfigError, match=f"TF-202: .*{path.name} gave {why}"):
            Budget(context, made._plan, SITES).spent_by_job()


def test_in_production_a_budget_needs_a_name_that_no_move_changes(tmp_path: Path) -> None:
    budget_of = _budget(tmp_path, "site-1", "run")
    production = replace(budget_of._context, production=True)
    with pytest.raises(SiteConfigError, match="dataset_id"):
        Budget(production, budget_of._plan, SITES).check((SubsampledGaussian(3.0, 0.1, 10),))
