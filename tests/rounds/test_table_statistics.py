"""A job that sums statistics of the sites' tables: against pandas and scikit-learn, and against attackers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import CensoredData, ecdf, logrank
from sklearn.datasets import load_breast_cancer
from tests.support import runs
from tests.support.ledgers import charges_of
from tests.support.pages import Page
from tests.support.tables import FOUR, statistics_job
from typer.testing import CliRunner

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.data.contract import Contract
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.disclosure import shapes
from tightframe.data.table.proposal import propose
from tightframe.data.table.silo import TableData, open_site
from tightframe.data.table.summary import preview
from tightframe.data.table.tabulated import Layout, tabulate
from tightframe.errors import DataError, JobError, RunError, TightframeError
from tightframe.results.statistics import ColumnStatistics, Count, OfClass, TableStatistics
from tightframe.rounds.context import SiloContext
from tightframe.rounds.phases import table_statistics, table_summary
from tightframe.rounds.server.coordinator import Coordinator
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.release import release_profile
from tightframe.rounds.sums.simulated_identity import simulated_anchor, simulated_identity
from tightframe.rounds.sums.transcripts import ServerIdentity
from tightframe.securesum.errors import ReleaseProfileError
from tightframe.securesum.site.journal import History, ProfileUsed
from tightframe_app.cli import app
from tightframe_app.jobs import folders

SITES = FOUR
LOOSE = {"policy": {"min_class_count": 1}}
"""A site's rules under which nothing is withheld."""


def breasts() -> pd.DataFrame:
    """Scikit-learn's table, with a category, a boolean, and missing values."""
    bunch = load_breast_cancer(as_frame=True)
    frame = bunch.data[["mean radius", "mean area"]].rename(columns=lambda name: name.removeprefix("mean "))
    stream = np.random.default_rng(7)
    frame.insert(0, "id", [f"r{row}" for row in frame.index])
    frame.insert(1, "patient", [f"p{row // 2}" for row in frame.index])
    frame["side"] = stream.choice(["left", "right", "both"], len(frame), p=[0.5, 0.44, 0.06])
    frame["smoker"] = stream.choice(["yes", "no"], len(frame))
    frame.loc[stream.choice(len(frame), 90, replace=False), "area"] = np.nan
    frame.loc[stream.choice(len(frame), 120, replace=False), "smoker"] = np.nan
    frame["diagnosis"] = bunch.target.map({0: "M", 1: "B"})
    return frame


FRAME = breasts()
CONTRACT: dict[str, Any] = {
    "title": "Breast masses",
    "columns": [
        {"column": "radius", "kind": "number", "unit": "mm", "low": 0, "high": 40},
        {"column": "area", "kind": "number", "low": 0, "high": 3000, "missing": "fill"},
        {"column": "side", "kind": "category", "vocabulary": ["left", "right", "both"]},
        {"column": "smoker", "kind": "boolean", "missing": "indicator"},
    ],
    "label": {
        "column": "diagnosis",
        "classes": [{"code": "B", "title": "benign"}, {"code": "M", "title": "malignant"}],
    },
    "record": "id",
    "patient": "patient",
}
PARTS = {site: FRAME[FRAME["patient"].str[1:].astype(int) % 4 == place] for place, site in enumerate(SITES)}


def job(**changes: Any) -> JobConfig:
    return parse_job(statistics_job(**{"dataset_options": {"contract": CONTRACT}, **changes}))


def entries(folder: Path, parts: Mapping[str, pd.DataFrame] = PARTS, **values: Any) -> dict[str, SiteEntry]:
    made = {}
    for site, part in parts.items():
        path = folder / f"{site}.csv"
        part.to_csv(path, index=False)
        made[site] = SiteEntry.model_validate({"data": {"table": {"file": str(path)}}, **values})
    return made


def count(folder: Path, of: JobConfig | None = None, **values: Any) -> federation.Result:
    folder.mkdir(exist_ok=True)
    return federation.run_job(of or job(), entries=entries(folder, **values), folder=folder / "run")


def told(result: federation.Result) -> TableStatistics:
    assert result.outcome.statistics is not None
    return result.outcome.statistics


@pytest.fixture(scope="module")
def loose(tmp_path_factory: pytest.TempPathFactory) -> federation.Result:
    return count(tmp_path_factory.mktemp("loose"), **LOOSE)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> federation.Result:
    return count(tmp_path_factory.mktemp("strict"), policy={"min_class_count": 5})


def test_totals_are_those_of_pandas_on_all_records(loose: federation.Result) -> None:
    """Secure sums over four sites, nothing withheld: the same as of one frame."""
    found, classes = told(loose), {"benign": "B", "malignant": "M"}
    assert found.silos == SITES
    seen: set[int] = set()
    assert found.all_records == Count(value=len(FRAME))
    for title, code in classes.items():
        part = FRAME[FRAME["diagnosis"] == code]
        assert found.records[title] == Count(value=len(part))
        assert found.shares[title] == pytest.approx(len(part) / len(FRAME), abs=1e-12)
        for item in found.columns:
            mine, values = item.classes[title], part[item.column]
            assert mine.missing.value == int(values.isna().sum())
            if item.kind == "number":
                expected, _ = np.histogram(values.dropna(), bins=item.edges)
                holders = [sum(_holds(item, place, code)) for place in range(len(item.names))]
                seen |= set(holders)
                for one, exact, silos in zip(mine.counts, expected.tolist(), holders, strict=True):
                    assert one == Count(value=None if silos in (1, 2) else exact), "fewer than three silos"
                assert mine.moments is not None and mine.moments.records == int(values.notna().sum())
                span = item.edges[-1] - item.edges[0]
                assert mine.moments.mean == pytest.approx(values.mean(), abs=span * found.grid)
                assert mine.moments.deviation == pytest.approx(values.std(), abs=2 * span * found.grid)
                for quantile in mine.quantiles:
                    assert quantile.low <= values.quantile(quantile.share) <= quantile.high
                    assert quantile.high - quantile.low <= 2 * span / 10 + 1e-9
            else:
                names = {"true": "yes", "false": "no"}
                expected = [int((values == names.get(name, name)).sum()) for name in item.names]
                assert [one.value for one in mine.counts] == expected
    assert {0, 4} <= seen and seen & {1, 2}
    table = pd.crosstab(FRAME["side"], FRAME["diagnosis"])
    side = next(item for item in found.columns if item.column == "side")
    for title, code in classes.items():
        assert [one.value for one in side.classes[title].counts] == table.loc[side.names, code].tolist()
    radius = found.columns[0].overall
    assert radius.moments is not None and radius.moments.records == len(FRAME)
    assert radius.moments.mean == pytest.approx(FRAME["radius"].mean(), abs=40 * found.grid)
    assert radius.moments.deviation == pytest.approx(FRAME["radius"].std(), abs=80 * found.grid)


@pytest.mark.whole
def test_plain_sums_give_the_same_bit_for_bit(loose: federation.Result, tmp_path: Path) -> None:
    plain = told(count(tmp_path, job(summation="plain"), **LOOSE))
    assert plain.columns == told(loose).columns and plain.records == told(loose).records


def test_small_cells_are_withheld_before_the_sum_and_never_zero(strict: federation.Result) -> None:
    found, codes = told(strict), {"benign": "B", "malignant": "M"}
    assert found.withheld and found.least == (5, 5)
    seen = 0
    for item in found.columns:
        for title, part in item.classes.items():
            for place, one in enumerate(part.counts):
                own = [_true(item, place, PARTS[site], codes[title]) for site in SITES]
                small = sum(0 < patients < 5 for _, patients in own)
                assert one.withheld >= small
                if one.value is not None and one.value + one.withheld:
                    assert one.value <= sum(records for records, _ in own)
                if small and one.value == 0:
                    raise AssertionError("a withheld cell shown as zero")
                seen += small
    assert seen > 10, "the table has small cells"


def _holds(item: Any, place: int, code: str) -> list[bool]:
    return [_true(item, place, PARTS[site], code)[0] > 0 for site in SITES]


def _true(item: Any, place: int, part: pd.DataFrame, code: str) -> tuple[int, int]:
    part = part[part["diagnosis"] == code]
    values = part[item.column]
    if item.kind == "number":
        last = place == len(item.names) - 1
        inside = (values >= item.edges[place]) & ((values < item.edges[place + 1]) | last)
    else:
        inside = values == {"true": "yes", "false": "no"}.get(item.names[place], item.names[place])
    return int(inside.sum()), part["patient"][inside].nunique()


def test_means_are_of_all_records_whatever_bins_are_withheld(strict: federation.Result) -> None:
    found = told(strict)
    radius = found.columns[0]
    assert any(not one.complete for one in radius.classes["malignant"].counts)
    for title, code in (("benign", "B"), ("malignant", "M")):
        values = FRAME[FRAME["diagnosis"] == code]["radius"]
        moments = radius.classes[title].moments
        fewest = min((part["diagnosis"] == code).sum() for part in PARTS.values())
        error = values.std() / math.sqrt(fewest) / 4  # each silo rounds its own to an eighth of that
        assert moments is not None and moments.mean == pytest.approx(values.mean(), abs=error)
        assert moments.deviation == pytest.approx(values.std(), abs=error)
        assert len(radius.classes[title].quantiles) == 3
        for quantile in radius.classes[title].quantiles:
            assert quantile.low <= values.quantile(quantile.share) <= quantile.high


def test_a_number_that_two_silos_tell_is_not_opened(tmp_path: Path) -> None:
    """The level `both` only at two sites, each with many records: the other one would subtract its own."""
    parts = {
        site: part.assign(side=np.where(place < 2, part["side"], "left"))
        for place, (site, part) in enumerate(PARTS.items())
    }
    for site in SITES[:2]:
        parts[site].loc[parts[site].index[:60], "side"] = "both"
    found = told(count(tmp_path, parts=parts, policy={"min_class_count": 5}))
    side = next(item for item in found.columns if item.column == "side")
    for part in side.classes.values():
        assert part.counts[2].value is None and part.counts[2].withheld == 0


def test_what_all_other_silos_can_subtract_has_no_small_number(
    strict: federation.Result, tmp_path: Path
) -> None:
    """The total minus what three sites know of themselves is the fourth one's term: it could be published."""
    silos = {site: SiteEntry.model_validate(entry) for site, entry in entries(tmp_path).items()}
    layout = Layout(prepare(job()).layout.contract, 10)  # type: ignore[union-attr]
    from tightframe.config.site import open_data
    from tightframe.data.table.disclosure import term

    terms = {site: term(tabulate(open_data(job(), site, silos[site]), layout), 5) for site in SITES}  # type: ignore[arg-type]
    found = told(strict)
    for item, place in zip(found.columns, layout.places, strict=True):
        for label, part in enumerate(item.classes.values()):
            for cell, one in enumerate((*part.counts, part.missing)):
                if one.value is None:
                    continue
                others = sum(int(terms[site].cells[label, place.start + cell]) for site in SITES[1:])
                left = one.value - others
                assert left == 0 or left >= 5
                assert left == terms["site-1"].cells[label, place.start + cell]


def test_its_files_and_words(strict: federation.Result) -> None:
    outcome = strict.outcome
    folder = outcome.folder
    assert outcome.ended == "counted"
    written = TableStatistics.read(folder)
    assert written == told(strict)
    assert not (folder / "model.safetensors").exists() and not (folder / "model.json").exists()
    assert [(row.kind, row.phase) for row in outcome.rows] == [("statistics", 0), ("statistics", 1)]
    screen = outcome.screen()
    assert "COUNTED: " in screen and "4 of 4 took part in the statistics" in screen and "withheld" in screen
    page = Page.of(folder).text
    for word in ("Table 1", "mean (deviation)", "withheld at", "never shown as zero", "Counted."):
        assert word in page, word


def test_a_repeat_is_the_same_and_another_way_of_counting_is_refused(tmp_path: Path) -> None:
    """Another binning, another minimum or another contract are equations in what was withheld."""
    entry, looser = SiteEntry(), SiteEntry.model_validate({"policy": {"min_class_count": 2}})
    narrower = json.loads(json.dumps(CONTRACT))
    narrower["columns"][0]["high"] = 39
    first = release_profile(prepare(job()), entry)
    assert first is not None
    journal = History([ProfileUsed("d", first, "a")])
    journal.check_profile("d", release_profile(prepare(job(seed=4, job_name="again")), entry) or ())
    for other, at in (
        (job(statistics={"bins": 20}), entry),
        (job(), looser),
        (job(dataset_options={"contract": narrower}), entry),
    ):
        with pytest.raises(ReleaseProfileError):
            journal.check_profile("d", release_profile(prepare(other), at) or ())
    # The training that follows, by the same contract, needs nobody's consent.
    values = job().model_dump(mode="json")
    del values["statistics"]
    trained = {**values, "method": "fedavg", "model": "mlp", "model_options": {"widths": [4]}, "rounds": 2}
    journal.check_profile("d", release_profile(prepare(trained), entry) or ())


def test_without_one_silo_nothing_is_opened(tmp_path: Path) -> None:
    """Counts are of all enrolled silos or of nobody."""
    of, sites = job(), entries(tmp_path)
    sessions = {
        site: SiloSession(
            SiloContext(
                site,
                of,
                sites[site],
                tmp_path / "run" / site,
                job_id=runs.JOB_ID,
                identity=partial(simulated_identity, runs.JOB_ID, site, production=False),
            )
        )
        for site in SITES
    }
    identity = ServerIdentity(runs.JOB_ID, simulated_anchor(runs.JOB_ID, production=False), simulated=True)
    line = runs.Wire(
        sessions,
        silent=lambda task, site, request: (
            task == "contribute" and site == "site-4" and request["phase"] == 1
        ),
    )
    coordinator = Coordinator(prepare(of), tmp_path / "run" / "server", identity=identity)
    with pytest.raises(RunError, match="TF-510: statistics could not be opened"):
        coordinator.run(line)
    assert not (tmp_path / "run" / "server" / "statistics.json").exists()
    outcome = json.loads((tmp_path / "run" / "server" / "outcome.json").read_text())
    assert "could not be opened" in outcome["reason"]


@pytest.mark.whole
@pytest.mark.parametrize("noisy", [False, True])
def test_a_silo_that_cannot_count_ends_the_job_or_still_adds_its_noise(
    noisy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact numbers without its own would be less than the next job's by its own."""
    from tightframe.privacy.releases.noise import NoisyRelease

    counted, drawn = table_statistics.tabulate, []
    share = NoisyRelease.share

    def failing(data: Any, layout: Layout) -> Any:
        if "site-2" in data.source:
            raise ValueError("a record that nobody can count")
        return counted(data, layout)

    def noted(self: NoisyRelease, *given: Any) -> Any:
        drawn.append(given)
        return share(self, *given)

    monkeypatch.setattr(table_statistics, "tabulate", failing)
    monkeypatch.setattr(NoisyRelease, "share", noted)
    if not noisy:
        with pytest.raises(RunError, match="could not add its own") as caught:
            count(tmp_path, job(), **LOOSE)
        assert caught.value.code == "TF-510" and not list(tmp_path.rglob("statistics.json"))
        return
    found = told(count(tmp_path, private(), **LOOSE))
    others = pd.concat([PARTS[site] for site in SITES if site != "site-2"])
    exact = int((others["diagnosis"] == "M").sum())
    assert found.failed == 0 and len(drawn) == 3 * len(SITES)
    low, high = found.records["malignant"].interval or (0, 0)
    assert low - 10 <= exact <= high + 10
    assert not charges_of(tmp_path / "run", "site-2"), "noise alone is no release"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rounds": 2}, "rounds: Expected 0 with `statistics`"),
        ({"method": "fedavg"}, "method: Expected 'statistics'"),
        ({"model": "mlp"}, "model: Expected 'identity'"),
        ({"statistics": None}, "method: 'statistics' trains nothing"),
        ({"personalise": True}, "personalise: not possible with `statistics`"),
        ({"class_rules": "off"}, "class_rules: Expected 'on'"),
        ({"weights": "exact"}, "weights: Expected 'uniform' with `statistics`"),
        ({"statistics": {"bins": 1}}, "statistics.bins"),
        ({"privacy": {"evaluation": "noisy"}}, "privacy.evaluation: Expected 'local' with `statistics`"),
        (
            {"dataset": "fed_heart_disease", "dataset_options": {}},
            "statistics: Expected the data set 'table'",
        ),
        ({"sites": SITES[:2], "min_sites": 2}, "secure sums need at least 3 silos"),
    ],
)
def test_what_contradicts_it_is_listed(changes: dict[str, Any], word: str) -> None:
    values = {**job().model_dump(mode="json"), **changes}
    with pytest.raises(JobError) as caught:
        prepare(values)
    assert word in str(caught.value)


def test_other_jobs_hashes_stay() -> None:
    trained = runs.job()
    assert "statistics" not in trained.model_dump(mode="json")


def test_a_sites_rules_hold_as_for_any_job() -> None:
    policy = SiteEntry.model_validate({"policy": {"profile": "standard", "pinned_only": False}}).policy
    policy.resolve(production=True).check(job(), submitter=None)
    policy.resolve(production=True).check_method(prepare(job()).setting.config, job())
    for rules, of, word in (
        ({"required_privacy": True}, job(), "required_privacy"),
        ({"allowed_methods": ["fedavg"]}, job(), "allowed_methods"),
        ({}, job(summation="plain"), "require_secure_sum"),
        ({}, job(privacy={"epsilon": 9.0}), "epsilon_cap"),
    ):
        made = SiteEntry.model_validate({"policy": {"profile": "standard", "pinned_only": False, **rules}})
        with pytest.raises(TightframeError, match=word):
            made.policy.resolve(production=True).check(of, submitter=None)


def private(**changes: Any) -> JobConfig:
    return job(privacy={"epsilon": 8.0, "spare_rounds": 0, **changes}, whole_sums=True)


def test_with_privacy_every_number_is_noisy_charged_and_has_limits(tmp_path: Path) -> None:
    result = count(tmp_path, private(), **LOOSE)
    found = told(result)
    assert found.noisy and found.epsilon == 8.0 and found.noise_deviation is not None
    assert [row.kind for row in result.outcome.rows] == ["statistics"]
    deviation, misses, limits = found.noise_deviation, 0, 0
    for item in found.columns:
        for title, code in (("benign", "B"), ("malignant", "M")):
            part = FRAME[FRAME["diagnosis"] == code]
            mine, values = item.classes[title], part[item.column]
            for place, one in enumerate(mine.counts):
                exact = _true(item, place, part, code)[0]
                assert one.value is not None and one.interval is not None and one.withheld == 0
                assert abs(one.value - exact) < 6 * deviation + 1
                misses += not one.interval[0] <= exact <= one.interval[1]
                limits += 1
            if item.kind == "number":
                moments = mine.moments
                assert moments is not None and moments.mean_interval and moments.deviation_interval
                misses += not moments.mean_interval[0] <= values.mean() <= moments.mean_interval[1]
                misses += not moments.deviation_interval[0] <= values.std() <= moments.deviation_interval[1]
                limits += 2
                for quantile in mine.quantiles:
                    misses += not quantile.low <= values.quantile(quantile.share) <= quantile.high
                    limits += 1
    assert misses <= 0.15 * limits, (misses, limits)
    assert "noise of differential privacy" in Page.of(result.outcome.folder).text
    plan = prepare(private()).privacy
    assert plan is not None and plan.statistics is not None
    # The Gaussian mechanism's exact delta (Balle and Wang, 2018), of sensitivity over noise mu.
    mu, normal = 1 / plan.statistics.config.noise_multiplier, NormalDist().cdf
    delta = normal(mu / 2 - 8.0 / mu) - math.exp(8.0) * normal(-mu / 2 - 8.0 / mu)
    assert 0.9e-5 < delta <= 1.0e-5
    for site in SITES:
        (charge,) = charges_of(tmp_path / "run", site)
        assert (charge.purpose, charge.event) == ("statistics", plan.statistics.events[0])


@pytest.mark.whole
def test_limits_of_noisy_numbers_hold_as_often_as_they_say(tmp_path: Path) -> None:
    """Four hundred releases of one table, with numpy's noise in place of ours; each kind of limit apart."""
    from tightframe.config.site import open_data

    setup = prepare(private())
    assert setup.layout is not None
    data: Any = open_data(private(), "site-1", entries(tmp_path, {"site-1": FRAME})["site-1"])
    exact = {
        f"statistics/table/{kind}": values / 2**20
        for kind, values in table_statistics.in_units(tabulate(data, setup.layout)).items()
    }
    area = FRAME[FRAME["diagnosis"] == "M"]["area"].dropna()
    stream, deviation = np.random.default_rng(5), 8.0
    held: dict[str, list[bool]] = {"records": [], "cells": [], "mean": [], "deviation": [], "quantiles": []}
    for _ in range(400):
        noisy = {name: values + stream.normal(0, deviation, values.shape) for name, values in exact.items()}
        records, columns = table_summary.noisy(noisy, setup.layout, deviation)
        low, high = records["malignant"].interval or (0, 0)
        held["records"].append(low <= int((FRAME["diagnosis"] == "M").sum()) <= high)
        part = columns[1].classes["malignant"]
        counts, _ = np.histogram(area, bins=columns[1].edges)
        for one, count in zip(part.counts, counts.tolist(), strict=True):
            low, high = one.interval or (0, 0)
            held["cells"].append(low <= count <= high)
        assert part.moments is not None
        for name, value in (("mean", area.mean()), ("deviation", area.std())):
            limits = getattr(part.moments, f"{name}_interval")
            held[name].append(limits[0] <= value <= limits[1])
        held["quantiles"].append(
            all(one.low <= area.quantile(one.share) <= one.high for one in part.quantiles)
        )
    assert {name for name, values in held.items() if np.mean(values) < 0.95} == set()


@pytest.mark.whole
def test_noise_is_drawn_after_the_charge_and_not_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightframe.privacy.releases.noise import NoisyRelease
    from tightframe.rounds.silo.view import LocalSilo

    order: list[str] = []
    charge, share = LocalSilo.charge, NoisyRelease.share

    def charged(self: LocalSilo, *given: Any, **values: Any) -> None:
        order.append("charge")
        charge(self, *given, **values)

    def drawn(self: NoisyRelease, *given: Any) -> Any:
        order.append("draw")
        return share(self, *given)

    monkeypatch.setattr(LocalSilo, "charge", charged)
    monkeypatch.setattr(NoisyRelease, "share", drawn)
    count(tmp_path, private(), **LOOSE)
    assert order == ["charge", "draw", "draw", "draw"] * 4


@pytest.mark.parametrize("neighbours", ["record", "patient"])
def test_one_record_or_patient_changes_the_totals_by_the_sensitivity_at_most(
    tmp_path: Path, neighbours: str
) -> None:
    from tightframe.config.site import open_data

    of = private(neighbours=neighbours).model_dump(mode="json")
    setup = prepare({**of, "dataset_options": {"contract": {**CONTRACT, "survival": SURVIVAL}}})
    assert setup.privacy is not None and setup.privacy.statistics is not None and setup.layout is not None
    config = setup.privacy.statistics.config

    def totals(part: pd.DataFrame, name: str) -> np.ndarray:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        entry = entries(folder, {"site-1": part})["site-1"]
        data: Any = open_data(setup.job, "site-1", entry)
        table = tabulate(data, setup.layout)  # type: ignore[arg-type]
        if neighbours == "patient":
            table = table.one_of_each_patient()
        return np.concatenate([value.ravel() for value in table_statistics.in_units(table).values()])

    whole = followed(FRAME).loc[PARTS["site-1"].index]
    whole.iloc[4, whole.columns.get_loc("radius")] = 0.0  # the most that a number can add
    whole.iloc[4, whole.columns.get_loc("area")] = 3000.0
    before = totals(whole, "whole")
    largest = 0
    for patient in whole["patient"].unique()[:12]:
        mine = whole["patient"] == patient
        rest = whole[~mine] if neighbours == "patient" else whole.drop(whole.index[mine][0])
        change = before - totals(rest, "rest")
        largest = max(largest, int((change.astype(object) ** 2).sum()))
    assert 0 < largest <= config.squared_sensitivity
    assert largest > 0.8 * config.squared_sensitivity, "and the bound is close"


def test_which_record_a_patient_counts_with_does_not_depend_on_other_patients(tmp_path: Path) -> None:
    """Without a column of records, those of equal values are told apart by their order in the file."""
    contract = {key: value for key, value in CONTRACT.items() if key != "record"}
    from tightframe.config.site import open_data

    of = private(neighbours="patient").model_dump(mode="json")
    setup = prepare({**of, "dataset_options": {"contract": contract}})
    layout, stream = setup.layout, np.random.default_rng(0)
    assert layout is not None
    part = PARTS["site-1"].drop(columns="id")
    part = part.iloc[stream.integers(6, size=80)].reset_index(drop=True)  # six rows of values, 40 patients
    part["patient"] = [f"p{number}" for number in np.repeat(np.arange(40), 2)]

    def counted(records: pd.DataFrame, name: str) -> dict[str, bytes]:
        (tmp_path / name).mkdir()
        entry = entries(tmp_path / name, {"site-1": records})["site-1"]
        data: Any = open_data(setup.job, "site-1", entry)
        one = tabulate(data, layout).one_of_each_patient()
        patients = np.unique(records["patient"].astype(str))
        return {patients[owner]: row.tobytes() for owner, row in zip(one.owners, one.cells, strict=True)}

    whole = counted(part, "whole")
    for gone in part["patient"].unique()[:8]:
        rest = counted(part[part["patient"] != gone], f"without-{gone}")
        assert rest == {patient: row for patient, row in whole.items() if patient != gone}


def test_patients_without_a_column_are_refused_by_name() -> None:
    lacking = {key: value for key, value in CONTRACT.items() if key != "patient"}
    with pytest.raises(JobError, match="its contract has no column of patients"):
        prepare(
            job(privacy={"neighbours": "patient"}, dataset_options={"contract": lacking}).model_dump(
                mode="json"
            )
        )


def test_the_command_writes_a_job_that_checks(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(CONTRACT))
    words = ["--statistics", str(path), "--sites", "a,b,c", "-o", str(tmp_path / "job")]
    made = CliRunner().invoke(app, ["jobs", "export", *words])
    assert made.exit_code == 0, made.output
    assert "statistics of Breast masses" in made.stdout
    written = folders.prepared(folders.read_job(tmp_path / "job"))
    assert written.roster == ("a", "b", "c") and written.rounds == 0 and written.weights == "uniform"
    assert folders.check_folder(tmp_path / "job") == []
    assert str(folders.traffic(tmp_path / "job"))
    noisy = [*words[:-1], str(tmp_path / "noisy"), "--set", "privacy.epsilon=2"]
    assert CliRunner().invoke(app, ["jobs", "export", *noisy]).exit_code == 0
    of = folders.prepared(folders.read_job(tmp_path / "noisy"))
    assert of.privacy is not None and of.privacy.spare_rounds == 0 and of.whole_sums
    wrong = CliRunner().invoke(app, ["jobs", "export", *words, "--rounds", "3"])
    assert wrong.exit_code == 2 and "omit --rounds" in wrong.output


SURVIVAL = {"time": "days", "event": "died", "high": 1000, "unit": "days"}


def followed(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with times, longer for benign masses, and deaths."""
    stream = np.random.default_rng(3)
    benign = frame["diagnosis"] == "B"
    times = np.clip(stream.exponential(np.where(benign, 700, 300)), 1, 1000).round()
    died = (stream.random(len(frame)) < 0.7) & (times < 1000)
    return frame.assign(days=times, died=np.where(died, "yes", "no"))


@pytest.mark.whole
def test_survival_is_scipys_on_all_records(tmp_path: Path) -> None:
    """One site counts weeks; a class is withheld where one of its cells is."""
    frame = followed(FRAME)
    parts = {site: followed(FRAME).loc[part.index] for site, part in PARTS.items()}
    made = entries(tmp_path, parts, **LOOSE)
    parts["site-2"].assign(days=lambda part: part["days"] / 7).to_csv(tmp_path / "site-2.csv", index=False)
    table = {**made["site-2"].data["table"], "units": {"days": {"unit": "weeks", "factor": 7.0}}}
    made["site-2"] = SiteEntry.model_validate({"data": {"table": table}, **LOOSE})
    options = {"contract": {**CONTRACT, "survival": SURVIVAL}}
    of_all = job(dataset_options=options)
    found = told(federation.run_job(of_all, entries=made, folder=tmp_path / "run")).survival
    assert found is not None and found.ends == [250, 500, 750, 1000]
    ended = np.ceil(frame["days"] / 250)
    groups = []
    for title, code in (("benign", "B"), ("malignant", "M")):
        chosen, curve = frame["diagnosis"] == code, found.curves[title]
        died = frame["died"] == "yes"
        groups.append(CensoredData(uncensored=ended[chosen & died], right=ended[chosen & ~died]))
        assert curve is not None
        np.testing.assert_allclose(curve.survival, ecdf(groups[-1]).sf.evaluate([1, 2, 3, 4]))
        assert curve.at_risk == [int((chosen & (ended >= end)).sum()) for end in (1, 2, 3, 4)]
    wanted = logrank(*groups)
    assert found.log_rank == pytest.approx(wanted.statistic**2) and found.degrees == 1
    assert found.p == pytest.approx(wanted.pvalue, rel=1e-6)
    assert "Log-rank test of equal curves" in (tmp_path / "run" / "server" / "report.html").read_text()
    assert prepare(statistics_job(dataset_options=options)).layout is not None
    assert TableStatistics.read(tmp_path / "run" / "server").survival == found

    strict = entries(tmp_path, parts, policy={"min_class_count": 5})
    few = job(dataset_options=options, statistics={"time_bins": 20})
    withheld = told(federation.run_job(few, entries=strict, folder=tmp_path / "strict")).survival
    assert withheld is not None and withheld.curves["malignant"] is None and withheld.p is None


def test_curves_and_their_test_end_before_the_first_withheld_cell_as_if_all_were_censored_there() -> None:
    """One late cell is withheld: what is opened anyway says who is at risk until then."""
    layout = Layout(Contract.model_validate({**CONTRACT, "survival": SURVIVAL}), 10, (250, 500, 750, 1000))
    frame = followed(FRAME)
    ended = np.ceil(frame["days"] / 250).astype(int)
    of_classes, records, groups = {}, {}, []
    for title, code in (("benign", "B"), ("malignant", "M")):
        chosen, died = frame["diagnosis"] == code, frame["died"] == "yes"
        cells = [
            int((chosen & (died == event) & (ended == end)).sum()) for event in (1, 0) for end in (1, 2, 3, 4)
        ]
        counts = [Count(value=cell) for cell in cells]
        if code == "M":
            counts[2], counts[7] = Count(value=None, withheld=2), Count(value=1, withheld=1)
        of_classes[title] = OfClass(counts=counts, missing=Count(value=0))
        records[title] = Count(value=sum(cells))
        seen = chosen & died & (ended <= 2)
        groups.append(CensoredData(uncensored=ended[seen], right=np.minimum(ended, 3)[chosen & ~seen]))
    column = ColumnStatistics(
        column="t", kind="category", names=[], classes=of_classes, overall=of_classes["benign"]
    )
    found = table_summary.survival(layout, records, [column])
    assert found is not None and found.until == 500 and found.curves["benign"] is not None
    wanted, cut = logrank(*groups), found.curves["malignant"]
    assert found.log_rank == pytest.approx(wanted.statistic**2) and found.p == pytest.approx(wanted.pvalue)
    assert len(found.curves["benign"].survival) == 4 and cut is not None
    np.testing.assert_allclose(cut.survival, ecdf(groups[1]).sf.evaluate([1, 2]))
    assert found.lacks == ["curve of malignant up to 500 days: a cell of the next bin is withheld"]
    # A class that a silo leaves out, or a withheld first cell, leaves no curve.
    some = {**records, "malignant": records["malignant"].model_copy(update={"withheld": 1})}
    none = table_summary.survival(layout, some, [column])
    assert none is not None and none.curves["malignant"] is None and none.p is None
    assert none.lacks == ["no curve of malignant: a cell of the first bin is withheld"]


def test_bins_of_time_have_ends_of_their_own_and_later_times_may_be_censored(tmp_path: Path) -> None:
    """Against pandas; a time at an end lies before it."""
    frame = followed(FRAME)
    frame.loc[0, "days"], frame.loc[1, "days"] = 90, 1600
    frame.to_csv(tmp_path / "table.csv", index=False)
    timed = {**SURVIVAL, "high": 500, "beyond": "censor"}
    of_all = statistics_job(dataset_options={"contract": {**CONTRACT, "survival": timed}})
    layout = prepare({**of_all, "statistics": {"time_ends": [90, 200]}}).layout
    assert layout is not None and layout.ends == (90, 200, 500)
    data = open_site(TableSite(file=tmp_path / "table.csv"), TableOptions(contract=layout.contract))
    table = tabulate(data, layout)
    found = np.bincount(table.cells[:, -1], minlength=6)
    bins = pd.cut(frame["days"].clip(upper=500), [0, 90, 200, 500])
    died = (frame["died"] == "yes") & (frame["days"] <= 500)
    assert found[:3].tolist() == bins[died].value_counts(sort=False).tolist()
    assert found[3:].tolist() == bins[~died].value_counts(sort=False).tolist()
    plain = Contract.model_validate({**CONTRACT, "survival": SURVIVAL})
    assert "beyond" not in plain.model_dump()["survival"] and plain.sha256() != layout.contract.sha256()
    for wrong, said in (([90, 500], "below the contract's longest time"), ([200, 90], "ascending")):
        with pytest.raises(JobError, match=rf"(?s)TF-101.*time_ends.*{said}"):
            prepare({**of_all, "statistics": {"time_ends": wrong}})
    with pytest.raises(JobError, match=r"(?s)TF-101.*time_ends.*survival"):
        prepare(statistics_job(statistics={"time_ends": [90]}))


def test_of_750_records_at_four_sites_the_default_bins_leave_curves_and_ten_do_not() -> None:
    """And the preview tells each site's part of it; cells that go with a small one are late ones."""
    stream = np.random.default_rng(11)
    contract = Contract.model_validate({**CONTRACT, "survival": SURVIVAL})
    reached: dict[int, list[float]] = {4: [], 10: []}
    for _ in range(4):
        count = 750 // 4
        labels = stream.integers(0, 2, count)
        times, leaves = stream.exponential(np.where(labels, 0.6, 0.9)), stream.exponential(1.0, count)
        ends = np.minimum(np.minimum(times, leaves), 1.0)
        data = TableData(
            np.zeros((count, len(contract.features)), np.float32), labels, np.zeros(count, np.int64),
            [str(row) for row in range(count)], None, source="made", missing=np.zeros((count, 4), np.bool_),
            survival=np.stack([ends, (times <= np.minimum(leaves, 1.0)).astype(float)], axis=1),
        )  # fmt: skip
        told = preview(data, contract, 5).curves
        for bins, of in reached.items():
            of += [curve[bins] for curve in told.values()]
    assert min(reached[4]) >= 500 and min(reached[10]) <= 200, reached


def test_a_time_with_its_event_is_proposed_as_survival(tmp_path: Path) -> None:
    """As a note, which a contract can take as it is; not where two columns could be the time."""
    frame = followed(FRAME)
    notes = []
    for name, table in (("one", frame), ("two", frame.assign(follow_up=frame["days"] + 1)), ("none", FRAME)):
        table.to_csv(path := tmp_path / f"{name}.csv", index=False)
        made = propose(path, {"label": "diagnosis", "record": "id", "patient": "patient"})
        notes.append([note for note in made.notes if "Kaplan" in note])
    assert notes[1:] == [[], []] and len(notes[0]) == 1
    found = json.loads("{" + re.search(r'add (".*\}) for', notes[0][0]).group(1) + "}")["survival"]  # type: ignore[union-attr]
    assert (found["time"], found["event"]) == ("days", "died") and found["high"] >= frame["days"].max()
    Contract.model_validate({**CONTRACT, "survival": found})


@pytest.mark.parametrize(
    ("survival", "said"),
    [
        ({"event": "censored"}, "at least two levels, each once"),
        ({"time": "t" * 120, "event": "e" * 120}, "1 to 200 printable characters"),
        ({"time": "a", "event": "b"}, r"got \['a, b'\]"),
    ],
)
def test_names_of_which_no_cells_can_be_made_are_refused(survival: dict[str, str], said: str) -> None:
    column = {"column": "a, b", "kind": "boolean"}
    contract = {**CONTRACT, "columns": [*CONTRACT["columns"], column], "survival": {**SURVIVAL, **survival}}
    with pytest.raises(JobError, match=f"(?s)TF-101.*statistics: .*{said}"):
        prepare(statistics_job(dataset_options={"contract": contract}))


def test_times_break_the_contract_as_other_columns_do_and_have_noisy_curves_with_privacy(
    tmp_path: Path,
) -> None:
    frame = followed(FRAME)
    frame.loc[0, "days"], frame.loc[1, "died"] = -3, "perhaps"
    frame.to_csv(tmp_path / "table.csv", index=False)
    contract = Contract.model_validate({**CONTRACT, "survival": SURVIVAL})
    site = TableSite(file=tmp_path / "table.csv")
    with pytest.raises(DataError, match="TF-215") as caught:
        open_site(site, TableOptions(contract=contract))
    assert "days: outside 0 to 1000 days: 1 row (2)" in str(caught.value)
    assert "died: a code that is no boolean of the contract: 1 row (3)" in str(caught.value)
    plain = Contract.model_validate(CONTRACT)
    assert "survival" not in plain.model_dump() and contract.sha256() != plain.sha256()
    with pytest.raises(ValueError, match="'radius' as time and not among `columns`"):
        Contract.model_validate({**CONTRACT, "survival": {**SURVIVAL, "time": "radius"}})
    noisy = job(dataset_options={"contract": contract.model_dump(mode="json")}, privacy={"epsilon": 4})
    made = entries(tmp_path, {site: followed(FRAME).loc[part.index] for site, part in PARTS.items()})
    found = told(federation.run_job(noisy, entries=made, folder=tmp_path / "run"))
    curves = found.survival
    assert found.columns[-1].column == "days, died" and curves is not None and curves.noisy
    ended = np.ceil(followed(FRAME)["days"] / 250)
    died = followed(FRAME)["died"] == "yes"
    for title, code in (("benign", "B"), ("malignant", "M")):
        chosen, curve = FRAME["diagnosis"] == code, curves.curves[title]
        assert curve is not None
        groups = CensoredData(uncensored=ended[chosen & died], right=ended[chosen & ~died])
        wanted = ecdf(groups).sf.evaluate(range(1, len(curve.survival) + 1))
        np.testing.assert_allclose(curve.survival, wanted, atol=0.25)  # of noise of some five records
    assert curves.p is not None and curves.degrees == 1
    page = Page.of(tmp_path / "run" / "server").text
    assert "Noisy survival" in page and "include sampling and the noise" in page
    assert TableStatistics.read(tmp_path / "run" / "server").survival == curves
    # All of it is the one release of all columns, times among them.
    plan = prepare(noisy).privacy
    assert plan is not None and plan.statistics is not None
    assert plan.statistics.config.columns == len(CONTRACT["columns"]) + 1
    (charge,) = charges_of(tmp_path / "run", "site-1")
    assert (charge.purpose, charge.event) == ("statistics", plan.statistics.events[0])


def test_noise_that_leaves_too_few_leaves_no_curve_and_says_why() -> None:
    layout = Layout(Contract.model_validate({**CONTRACT, "survival": SURVIVAL}), 10, (250, 500, 750, 1000))
    totals = {f"statistics/table/{kind}": np.zeros(shape) for kind, shape in shapes(layout).items()}
    place = layout.places[-1]
    for label, records in enumerate((800, 40)):
        totals["statistics/table/records"][label] = records
        totals["statistics/table/cells"][label, place.start : place.missing] = records / 8
    found = table_summary.noisy_survival_of(totals, layout, 8.0)
    assert found is not None and found.curves["benign"] is not None and found.curves["malignant"] is None
    assert (
        found.p is None
        and found.untested == "too few of malignant are left after the first bin for the noise"
    )
    assert found.lacks[-1] == "no curve of malignant: too few are left for the noise"
    assert found.as_json()["untested"] == found.untested
