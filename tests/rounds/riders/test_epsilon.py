"""What the lead learns of the epsilon that a job has cost: ranges over silos, and numbers by consent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opacus.accountants import PRVAccountant
from tests.support.audit import gaussian_epsilon
from tests.support.jobs import SMALL
from tests.support.ledgers import charges_of
from tests.support.runs import twin

from tightframe import federation
from tightframe.config.job import parse_job
from tightframe.config.policy import Policy, PolicyBlock
from tightframe.phases import Cohort, Reading, Totals
from tightframe.privacy.events import SubsampledGaussian
from tightframe.privacy.training import portions
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.riders import epsilon
from tightframe.rounds.riders.epsilon import BINS, EDGES, SHOWN
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.plain import PlainServer

SITES = ["site-1", "site-2", "site-3", "site-4"]
POLICIES = {"site-1": "exact", "site-2": "nothing", "site-4": "exact"}
JOB: dict[str, Any] = {
    **SMALL,
    "job_name": "told",
    "method": "fedavg",
    "sites": SITES,
    "min_sites": 3,
    "rounds": 2,
    "seed": 5,
    "weights": "uniform",
    "training": {"epochs": 1, "batch_size": 26, "learning_rate": 0.1, "augment": False},
    "summation": "plain",
    "privacy": {"epsilon": 7.0, "noise_multiplier": 1.75},
}


def set_policies(patch: pytest.MonkeyPatch) -> None:
    """As each site's own file would; the twin needs none."""

    def policy(self: SiloContext) -> Policy:
        how = POLICIES.get(self.name)
        return PolicyBlock.model_validate({"epsilon_shown": how}).resolve(production=False)

    patch.setattr(SiloContext, "policy", property(policy))


def cost(folder: Path, site: str, last_round: int) -> float:
    """Epsilon of what a silo's ledger has up to a round: in closed form, or by Opacus if it samples."""
    events = [item.event for item in charges_of(folder, site) if int(item.purpose.split()[1]) <= last_round]
    steps = [event for event in events if isinstance(event, SubsampledGaussian)]
    assert len(steps) == len(events) >= last_round
    if all(event.sampling_rate == 1.0 for event in steps):
        return gaussian_epsilon(sum(event.steps / event.noise_multiplier**2 for event in steps) ** 0.5, 1e-5)
    accountant = PRVAccountant()
    accountant.history = [(event.noise_multiplier, event.sampling_rate, event.steps) for event in steps]
    return float(accountant.get_epsilon(1e-5, eps_error=1e-3))


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[federation.Result, Path, list[tuple[str, dict[str, Any]]]]:
    """A run in which one silo is charged twice for round 2; and the terms, as a plain server sees them."""
    folder = tmp_path_factory.mktemp("run")
    terms: list[tuple[str, dict[str, Any]]] = []
    handle, add = SiloSession.handle, PlainServer.add

    def again(self: SiloSession, task: str, message: Any) -> Any:
        if self.context.name == "site-4" and (message.get("kind"), message.get("round")) == ("train", 2):
            handle(self, task, message)  # an answer that is lost
        return handle(self, task, message)

    def noting(self: PlainServer, site: str, term: Any) -> None:
        if BINS in self._schema:
            alone = PlainServer(self._schema)
            add(alone, site, term)
            terms.append((site, dict(codec.decode(self._schema, alone.open(), parties=len(SITES)))))
        add(self, site, term)

    with pytest.MonkeyPatch.context() as patch:
        set_policies(patch)
        patch.setattr(portions, "check_per_record", lambda *_, **__: None)  # has tests of its own
        patch.setattr(SiloSession, "handle", again)
        patch.setattr(PlainServer, "add", noting)
        data = {site: twin(site) for site in SITES}
        return federation.run_job(parse_job(JOB), data=data, folder=folder), folder, terms


@pytest.mark.whole
def test_every_round_tells_what_the_ledgers_say_repeats_included(
    finished: tuple[federation.Result, Path, list[Any]],
) -> None:
    result, folder, _ = finished
    rounds = [row.privacy for row in result.outcome.rows if row.kind == "train"]
    assert len(rounds) == 2
    ends = list(zip((0.0, *EDGES), EDGES, strict=False))
    for number, spent in enumerate(rounds, start=1):
        assert spent is not None and spent.round == number
        exact = {site: cost(folder, site, number) for site in SITES}
        assert set(spent.shown) == {"site-1", "site-4"}
        for site, value in spent.shown.items():
            assert value == pytest.approx(exact[site], abs=4e-3)
        told = [exact[site] for site in SITES if site != "site-2"]
        held = {(low, min(high, 7.0)): sum(low < value <= high for value in told) for low, high in ends}
        expected = {place: count for place, count in held.items() if count}
        assert {(item.above, item.up_to): item.silos for item in spent.histogram} == expected
        assert spent.untold == 1
    last = rounds[-1]
    assert last is not None and [item.silos for item in last.histogram] == [2, 1], "the repeat is above"
    attempts = [item.attempt for item in charges_of(folder, "site-4") if item.purpose == "round 2 training"]
    assert attempts == [0, 1]
    report = json.loads((folder / "site-4" / "local_report.json").read_text())
    assert 0 <= last.shown["site-4"] - report["privacy"]["epsilon"] <= 1e-3


@pytest.mark.whole
def test_the_lead_finds_it_in_metrics_outcome_card_and_last_screen(
    finished: tuple[federation.Result, Path, list[Any]],
) -> None:
    result, folder, _ = finished
    rows = [json.loads(line) for line in (folder / "server" / "metrics.jsonl").read_text().splitlines()]
    told = [row["privacy"] for row in rows if row["kind"] == "train"]
    assert [item["round"] for item in told] == [1, 2]
    assert all(row["privacy"] is None for row in rows if row["kind"] != "train")
    last = told[-1]
    assert last["promised"] == 7.0 and last["delta"] == 1e-5 and last["untold"] == 1
    assert sum(item["silos"] for item in last["histogram"]) == 3
    assert last["range"] == [last["histogram"][0]["above"], last["histogram"][-1]["up_to"]]
    for name in ("outcome.json", "model.json"):
        assert json.loads((folder / "server" / name).read_text())["privacy_spent"] == last
    spent = result.outcome.privacy_spent
    assert spent is not None and f"After round 2: {spent}" in result.outcome.screen()
    assert f"site-4 shows {last['shown']['site-4']:.3f}" in str(spent)


@pytest.mark.whole
def test_a_silo_writes_what_its_policy_lets_out_and_into_its_own_place_only(
    finished: tuple[federation.Result, Path, list[Any]],
) -> None:
    _, _, terms = finished
    assert [site for site, _ in terms] == SITES * 2
    for site, own in terms:
        place = SITES.index(site)
        assert own[BINS].sum() == (0 if site == "site-2" else 1)
        assert not np.delete(own[SHOWN], place).any()
        assert (own[SHOWN][place] > 0) == (POLICIES.get(site) == "exact")


@pytest.mark.parametrize("spent", [0.0, 0.25, 0.2500001, 3.999, 4.0, 4.0001, 7.0])
def test_an_edge_belongs_to_the_range_below_and_numbers_are_rounded_up(spent: float) -> None:
    told = epsilon.terms(spent, "exact", "site-2", SITES)
    (place,) = torch.nonzero(told[BINS]).flatten().tolist()
    assert (0.0, *EDGES)[place] < max(spent, 1e-9) <= EDGES[place]
    assert spent <= told[SHOWN][1] / 1000 < spent + 0.00101
    job = parse_job(JOB)
    schema = epsilon.fields(job)
    for how in ("exact", "range", "nothing"):
        codec.encode(schema, epsilon.terms(spent, how, "site-2", SITES), share=1.0, parties=4)
    read = epsilon.read_totals(job, {name: value.numpy() for name, value in told.items()}, ["site-2"], 3)
    assert read is not None and read.range is not None
    assert read.range[0] <= spent <= read.range[1] <= 7.0


def _totals(bins: dict[int, float], numbers: dict[int, float]) -> dict[str, np.ndarray]:
    totals = {BINS: np.zeros(len(EDGES)), SHOWN: np.zeros(len(SITES))}
    for name, values in ((BINS, bins), (SHOWN, numbers)):
        for place, value in values.items():
            totals[name][place] = value
    return totals


@pytest.mark.parametrize(
    ("bins", "numbers"),
    [
        ({4: 5}, {}),  # more silos than there are
        ({4: -1}, {}),
        ({4: 1.5}, {}),
        ({6: 1}, {}),  # beyond what the job promises
        ({4: 2}, {3: 3000}),  # of a silo that is not in the sum
        ({4: 2}, {0: -3000}),
        ({5: 2}, {0: 7001}),
        ({4: 1}, {0: 3000, 1: 3500}),  # two numbers in a range with one silo
    ],
)
def test_what_no_honest_silos_can_have_told_is_not_read(
    bins: dict[int, float], numbers: dict[int, float]
) -> None:
    job, cohort = parse_job(JOB), SITES[:3]
    assert epsilon.read_totals(job, _totals({4: 2, 5: 1}, {0: 3000}), cohort, 1) is not None
    with pytest.raises(ValueError, match="Expected a histogram of 3 silos"):
        epsilon.read_totals(job, _totals(bins, numbers), cohort, 1)


def test_a_silo_that_tells_nonsense_costs_the_line_and_not_the_run() -> None:
    setup = prepare(JOB)
    (exchange,) = setup.plan.round(1)
    cohort, state = Cohort(1, dict.fromkeys(SITES, 1.0), 1.0), setup.initial_state()

    def read(totals: Totals) -> Reading:
        return exchange.phase.read(state, {**totals, "update/x": np.zeros(1)}, cohort)

    honest = read(_totals({4: 4}, {}))
    assert honest.notes[epsilon.NOTE] is not None and not honest.warnings
    assert read({}).notes[epsilon.NOTE] is None and not read({}).warnings
    nonsense = read(_totals({4: 3, 5: -1}, {}))
    assert nonsense.notes.get(epsilon.NOTE) is None
    assert "round 1: what silos report of their epsilon is not used" in nonsense.warnings[0]
    # The method gets its own totals in each case.
    assert set(honest.totals) == set(nonsense.totals) == {"update/x"}


def test_the_line_for_people() -> None:
    spent = epsilon.spent(3, 8.0, 1e-5, 7, (0, 0, 0, 0, 2, 4, 0, 0, 0), {"site-2": 3.214})
    assert str(spent) == (
        "privacy spent: 2 silos up to epsilon 4, 4 silos up to epsilon 8 (delta 1e-05, at most 8 promised); "
        "site-2 shows 3.214; 1 silo reported nothing"
    )
    assert spent.range == (2.0, 8.0)
    silent = epsilon.spent(1, 8.0, 1e-5, 3, (0,) * 9, {})
    assert silent.range is None and str(silent).startswith("privacy spent: not reported (delta 1e-05")
    json.dumps(silent.as_json(), allow_nan=False)


def test_nothing_is_told_without_privacy_and_with_the_last_phase_of_a_round_with_it() -> None:
    with_it = prepare(JOB)
    (exchange,) = with_it.plan.round(1)
    schema = exchange.phase.schema
    assert BINS in schema and schema[SHOWN].shape == (4,)
    assert schema[SHOWN].bound == 7000.0
    without = prepare({**JOB, "privacy": None})
    assert all(BINS not in exchange.phase.schema for exchange in without.plan.round(1))
