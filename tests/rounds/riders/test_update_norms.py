"""Norms of updates as a histogram: numpy's norms of the silos' own terms, and models that do not change."""

from __future__ import annotations

import html
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.runs import FOUR as SITES
from tests.support.runs import in_round, job, run

from tightframe import federation
from tightframe.config.job import JobConfig
from tightframe.data.heart import HeartOptions
from tightframe.data.heart.twin import open_twin
from tightframe.phases import Cohort, Contribution, Field, Phase, Schema, ServerState
from tightframe.results.rows import Row, read_rows
from tightframe.rounds import codec
from tightframe.rounds.plan import advance
from tightframe.rounds.riders import failures, update_norms
from tightframe.rounds.setup import prepare

FOUR = tuple(SITES)


def plain(**changes: Any) -> JobConfig:
    return job(**{"method": "fedavg", "update_norm": 100.0, **changes})


def norms_sent(monkeypatch: pytest.MonkeyPatch, prefix: str = "update/") -> list[float]:
    """Norm of each term, by numpy, from what the codec is given; filled while silos train."""
    sent: list[float] = []
    honest = codec.encode

    def encode(schema: Schema, tensors: Any, **more: Any) -> Any:
        if parts := [
            tensors[item.name].numpy().ravel() for item in schema.fields if item.name.startswith(prefix)
        ]:
            sent.append(float(np.linalg.norm(np.concatenate(parts).astype(np.float64))))
        return honest(schema, tensors, **more)

    monkeypatch.setattr(codec, "encode", encode)
    return sent


def rounds_of(folder: Path) -> list[Row]:
    return [row for row in read_rows(folder / "server") if row.kind == "train"]


@pytest.mark.whole
@pytest.mark.parametrize("summation", ["secure", "plain"])
@pytest.mark.parametrize("norm", [100.0, 0.05])
def test_the_histogram_counts_the_silos_own_norms(
    summation: str, norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = norms_sent(monkeypatch)
    run(plain(summation=summation, update_norm=norm), tmp_path)
    told = [row.update_norms for row in rounds_of(tmp_path)]
    assert len(sent) == 8 and len(told) == 2
    for one, own in zip(told, (sent[:4], sent[4:]), strict=True):
        assert one is not None and one.limit == norm
        assert sum(item.silos for item in one.histogram) == 4
        for item in one.histogram:
            end = math.inf if item.up_to is None else item.up_to
            assert sum(item.above < length <= end for length in own) == item.silos
        above = sum(item.silos for item in one.histogram if item.up_to is None)  # the norm: rescaled to it
        assert above == sum(length > norm for length in own)
        assert (above > 0) == (norm < 1)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fednova", "feddyn"])
def test_a_norm_that_does_not_bind_changes_no_bit_of_the_model(method: str, tmp_path: Path) -> None:
    without, _ = run(plain(method=method, update_norm=None, summation="plain"), tmp_path / "without")
    within, _ = run(plain(method=method, summation="plain"), tmp_path / "with")
    assert without.state.model.keys() == within.state.model.keys()
    for name, item in without.state.model.items():
        assert torch.equal(item, within.state.model[name]), name
    assert all(row.update_norms is None for row in rounds_of(tmp_path / "without"))
    assert "update_norms" not in (tmp_path / "without" / "server" / "metrics.jsonl").read_text()
    assert all(row.update_norms is not None for row in rounds_of(tmp_path / "with"))


class Hospital:
    """Heart disease records, standardised by the hospital itself, as it was agreed; or forgotten."""

    synthetic = False

    def __init__(self, number: int, *, standardised: bool) -> None:
        self._data, self.source = open_twin(number, HeartOptions()), "records"
        inputs = torch.stack([torch.as_tensor(item) for item, _ in self._items("train")])
        self._mean, self._std = inputs.mean(0), inputs.std(0) + 1e-6
        if not standardised:
            self._mean, self._std = torch.zeros_like(self._mean), torch.ones_like(self._std)

    def _items(self, fold: Any) -> list[Any]:
        records = self._data.records(fold)
        return [records[index] for index in range(len(self.labels(fold)))]

    def labels(self, fold: Any) -> Any:
        return self._data.labels(fold)

    def records(self, fold: Any, *, augment_seed: int | None = None) -> Any:
        return [((item - self._mean) / self._std, label) for item, label in self._items(fold)]

    def check(self, progress: Any = None) -> None:
        """Nothing can be missing."""


HEART = {"dataset": "fed_heart_disease", "dataset_options": {}, "model": "mlp", "model_options": {}}


@pytest.mark.whole
def test_the_pull_of_one_silo_is_its_share_of_the_norm(tmp_path: Path) -> None:
    """Site-2 with right and with wrong records: both of its updates are within the norm, so the means differ
    by at most twice its share of it, and without a norm by far more."""

    def model(wrong: str | None, **bounds: Any) -> torch.Tensor:
        records = {site: Hospital(i, standardised=site != wrong) for i, site in enumerate(FOUR)}
        asked = plain(**HEART, summation="plain", rounds=1, weights="uniform", **bounds)
        trained = federation.run_job(
            asked, data=records, folder=tmp_path / f"{wrong}-{len(bounds)}"
        ).state.model
        return torch.cat([item.double().flatten() for _, item in sorted(trained.items())])

    bounded = float((model("site-2", update_norm=4.0) - model(None, update_norm=4.0)).norm())
    free: dict[str, Any] = {"update_norm": None, "update_bound": 1e6}
    unbounded = float((model("site-2", **free) - model(None, **free)).norm())
    assert 0.5 < bounded <= 2 * 4.0 / 4 * (1 + 1e-6)
    assert unbounded > 10 * bounded


@pytest.mark.parametrize("wrong", ["site-2", None])
@pytest.mark.usefixtures("pages")
def test_a_silo_with_wrong_records_stands_out_and_is_not_named(
    wrong: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = {site: Hospital(i, standardised=site != wrong) for i, site in enumerate(FOUR)}
    with caplog.at_level(logging.INFO, logger="tightframe"):
        federation.run_job(plain(**HEART, summation="plain"), data=records, folder=tmp_path)
    rows, page = rounds_of(tmp_path), html.unescape((tmp_path / "server" / "report.html").read_text())
    own = [item.getMessage() for item in caplog.records if "the update's norm is" in item.getMessage()]
    assert sorted(line.partition(":")[0] for line in own) == sorted(2 * FOUR)
    apart = [row.update_norms.apart for row in rows if row.update_norms is not None]
    warned = [item.getMessage() for item in caplog.records if item.levelno == logging.WARNING]
    told = [line for line in warned if "one silo's update has a norm" in line]
    if wrong is None:
        assert apart == [False, False] and not told
        assert "In no sum one silo's update stood out" in page
        return
    assert apart == [True, True] and len(told) == 2
    assert told[0].startswith(
        "round 1: one silo's update has a norm above 100, those of the 3 others are at most"
    )
    assert not any(site in line for line in told for site in FOUR)
    assert any(
        line.startswith(f"{wrong}:") and line.endswith("rescaled to 100 (update_norm)") for line in own
    )
    assert "In 2 sums one silo's update was more than four times as long" in page


@pytest.mark.whole
@pytest.mark.usefixtures("pages")
def test_the_histogram_stays_shut_after_a_drop_out(tmp_path: Path) -> None:
    """Two cohorts' histograms would tell the range of the silo between them."""
    run(plain(), tmp_path, silent=lambda task, site, request: site == "site-1" and in_round(request, 2))
    first, second = rounds_of(tmp_path)
    assert first.update_norms is not None and first.static_opened
    assert second.update_norms is None and not second.static_opened and second.dropped
    page = (tmp_path / "server" / "report.html").read_text()
    table = page[page.index("<h2>Norms of updates") :]
    assert 'class="missing"' in table[: table.index("</table>")]


@pytest.mark.parametrize(
    ("changes", "rides"),
    [
        ({"method": "fedavg"}, True),
        ({"method": "fedavg", "update_norm": None}, False),
        ({"method": "fedproto"}, False),  # sends no update
        ({"method": "fedavg", "weights": "uniform", "privacy": {}}, False),  # nothing covers an exact norm
        (
            {"method": "fedilc", "method_options": {"variant": "intra_arith"}, "training": {"epochs": 1}},
            True,
        ),
    ],
)
def test_it_rides_on_updates_with_a_norm_and_without_privacy(changes: dict[str, Any], rides: bool) -> None:
    (*_, last) = prepare(plain(**changes)).plan.round(1)
    assert all((update_norms.SILOS in phase.schema) == rides for phase in last.phases)
    if rides:
        assert last.phase.schema[update_norms.SILOS].group == "static"


@pytest.mark.whole
def test_gradients_that_a_method_scales_are_reported_in_the_jobs_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = norms_sent(monkeypatch, "gradient/")
    options = {"variant": "intra_arith"}
    run(plain(method="fedilc", method_options=options, training={"epochs": 1}, rounds=1), tmp_path)
    row = rounds_of(tmp_path)[-1]
    assert row.update_norms is not None and len(sent) == 4
    lowest, highest = row.update_norms.histogram[0].above, row.update_norms.histogram[-1].up_to
    assert highest is not None
    assert all(lowest < length / 2.0**12 <= highest for length in sent)


@given(st.lists(st.integers(0, 11), min_size=1, max_size=30))
def test_one_silo_is_apart_if_it_alone_lies_two_ranges_above_all_others(places: list[int]) -> None:
    total = np.bincount(places, minlength=12).astype(np.float64)
    told = update_norms.read_total(total, len(places), 100.0)
    *rest, top = sorted(places)
    assert told.apart == (len(places) >= 3 and top - max(rest) >= 2)
    assert sum(item.silos for item in told.histogram) == len(places)
    assert all(
        item.up_to is None or item.up_to == 100.0 * 4.0 ** (p - 10)
        for item, p in zip(told.histogram, sorted(set(places)), strict=True)
    )


@given(st.floats(0, 1e6))
def test_each_norm_has_one_range(length: float) -> None:
    counts = update_norms.one_hot(length / 100.0)
    assert counts.sum() == 1.0 and counts.shape == (12,)
    (only,) = update_norms.read_total(counts.numpy(), 1, 100.0).histogram
    assert only.above < length <= (only.up_to or math.inf) or (length == 0 and only.above == 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e200])
def test_an_update_that_is_not_finite_has_a_range_and_is_refused_elsewhere(value: float) -> None:
    tensors = [torch.tensor([1.0, value], dtype=torch.float64), torch.zeros(3)]
    assert update_norms.one_hot(update_norms.joint_norm(tensors) / 100.0).tolist().index(1.0) == 11


def train_phase() -> Phase:
    """A phase of one update, with its norms."""
    return update_norms.attach(
        Phase(
            "train",
            Schema((Field("update/w", (1,), norm=100.0),)),
            lambda state: {},
            lambda silo, received, state: Contribution({}),
            lambda state, totals, cohort: state,
        ),
        100.0,
    )


def totals_of(histogram: list[float]) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    return {"update/w": np.zeros(1), update_norms.SILOS: np.array(histogram + [0.0] * (12 - len(histogram)))}


@pytest.mark.parametrize("total", [[2.0, 1.0], [3.5, -0.5], [1.5, 1.5], [4.0, -1.0]])
def test_what_is_no_histogram_of_the_silos_is_told_and_not_used(total: list[float]) -> None:
    silos = 4 if total == [2.0, 1.0] else 3
    cohort = Cohort(5, {f"s{number}": 1.0 for number in range(silos)}, 1.0)
    reading = advance(train_phase(), ServerState({}), totals_of(total), cohort)
    assert update_norms.NOTE not in reading.notes and set(reading.totals) == {"update/w"}
    (line,) = reading.warnings
    assert line.startswith("round 5: the norms of updates are not used: Expected a histogram of")


@pytest.mark.parametrize(("failed", "used"), [(0.0, False), (1.0, True), (2.0, False)])
def test_a_silo_that_could_not_contribute_is_in_no_range(failed: float, used: bool) -> None:
    """The histogram of a round with a failed silo is that of the others, and still has to be one."""
    phase = failures.attach(train_phase(), plain(min_sites=2))
    totals = totals_of([2.0, 0.0, 0.0, 1.0]) | {failures.FAILED: np.array(failed)}
    reading = advance(phase, ServerState({}), totals, Cohort(5, dict.fromkeys(FOUR, 1.0), 1.0))
    told = reading.notes.get(update_norms.NOTE)
    assert (told is not None) == used
    assert any("the norms of updates are not used" in line for line in reading.warnings) != used
    if told is not None:
        assert sum(item.silos for item in told.histogram) == 3 and told.apart
