"""What exact evaluations tell of records, held against enumeration and against integer programming."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from tests.support.attacks.malicious_server import HEART

from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.learning.few_records.record_values import count_values
from tightframe.learning.one_sum import temperature
from tightframe.phases import Field
from tightframe.rounds import evaluation_bits
from tightframe.rounds.evaluation_bits import Evaluations
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.checks.evaluations import _smaller
from tightframe.rounds.sums.common import ADVICE
from tightframe.securesum.site.journal import History, Most

COLUMNS, RECORDS = 7, 60
ROWS = np.array(list(itertools.product((0.0, 1.0), repeat=COLUMNS)), dtype=np.float32)
STANDARD = PolicyBlock(profile="standard").resolve(production=True)


@functools.cache
def setup(bins: int = 32, models: int = 11, **changes: Any) -> JobSetup:
    columns = [{"column": f"c{place}", "kind": "boolean"} for place in range(COLUMNS)]
    label = {"column": "ill", "classes": [{"code": "0"}, {"code": "1"}]}
    contract = {"title": "Ward", "columns": columns, "label": label, "record": "id"}
    job = {
        "dataset": "table",
        "dataset_options": {"contract": contract},
        "sites": ["a", "b", "c"],
        "min_sites": 3,
        "rounds": 10,
        "evaluation": {"score_bins": bins, "models": models},
    }
    return prepare(parse_job({**HEART, **job, **changes}))


def told(at: JobSetup, labels: NDArray[np.int64], bits: float = COLUMNS, **more: Any) -> Evaluations:
    folds = {"validation": labels, "test": labels}
    return evaluation_bits.of_job(at, STANDARD, folds, np.full(2, bits / 24), **more)  # type: ignore[arg-type]


def test_a_histogram_costs_as_many_bits_as_it_has_answers() -> None:
    for records, cells in itertools.product(range(5), (2, 3, 4)):
        answers = {
            tuple(sorted(Counter(each).items())) for each in itertools.product(range(cells), repeat=records)
        }
        assert 2 ** evaluation_bits.answers(records, cells) == pytest.approx(len(answers))


def test_a_fold_holds_as_many_bits_as_there_are_tables_of_its_rows() -> None:
    """Of three columns, two records of one class and three of the other: 36 times 120 tables."""
    rows = range(2**3)
    tables = [len(list(itertools.combinations_with_replacement(rows, number))) for number in (2, 3)]
    held = told(setup(), np.array([0, 0, 1, 1, 1]), 3).held
    assert tables == [36, 120] and 2**held.test == pytest.approx(36 * 120)
    assert held.validation == held.test


def test_all_that_a_job_opens_of_a_fold_is_counted() -> None:
    labels = np.array([0] * 20 + [1] * 10)
    scores = math.log2(math.comb(20 + 31, 31) * math.comb(10 + 31, 31))
    each = scores + math.log2(30 * 16 + 2)  # a sum of losses in whole steps
    found = told(setup(), labels)
    in_all = [found.in_all.models, found.in_all.validation, found.in_all.test]
    assert in_all == pytest.approx([11, 11 * each, 11 * each]), "the start, too"
    parts = math.ceil(each / found.held.test * 10**6)  # of each sum, as the journal has them
    assert found.wanted == (11, 11 * parts, 11 * parts) and found.most == (11, 500_000, 500_000)
    assert set(found.told) == {*(("train", number, 0) for number in range(1, 11)), ("closing", 10, 0)}
    assert told(setup(models=1), labels).wanted == (1, parts, parts)
    assert told(setup(), labels, untold=("validation",)).wanted == (11, 0, 11 * parts)
    given, moments = {"initial_model_sha256": "0" * 64}, {"model_options": {"standardise": True}}
    assert [told(setup.__wrapped__(**each), labels).in_all.models for each in (given, moments)] == [11, 11]
    # With an odd number of bins who is above a half does not follow from the scores.
    odd = told(setup(bins=3), labels).in_all.test - 11 * math.log2(30 * 16 // (32 / 3) + 2)
    assert odd == pytest.approx(11 * math.log2(math.comb(22, 2) * math.comb(12, 2) * 21 * 11))
    personal = told(setup(personalise=True), labels).in_all
    assert personal.test == pytest.approx(found.in_all.test + 3 * math.log2(33))


def test_what_jobs_tell_of_a_fold_adds_up_as_shares_however_each_counts_it() -> None:
    labels = np.array([0] * 20 + [1] * 10)
    narrow, wide = (told(setup(bins=8, models=3), labels, bits) for bits in (20, 200))
    assert narrow.in_all == wide.in_all and wide.held.test > 8 * narrow.held.test
    history = History([narrow.entry("ward", "a", place) for place in narrow.told])
    share = math.fsum(each.test for each in narrow.told.values()) / narrow.held.test
    assert history.evaluated("ward")[2] == pytest.approx(share * 10**6, abs=3)
    nothing = told(setup(), labels, 0.0)
    assert nothing.held.test < 1e-9 and not nothing.fits(nothing.most)


def test_a_field_of_which_nobody_knows_what_it_tells_is_no_evaluation() -> None:
    for name in ("evaluation/test/calibration", "evaluation/train/confusion"):
        field = Field(name, (2,), bound=1.0)
        with pytest.raises(ValueError, match=name):
            evaluation_bits._of_field(field, setup(), {"test": np.zeros(9, np.int64)}, set())


def test_a_heads_losses_at_a_grid_of_temperatures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole nats that fall, then rise: of five temperatures all such sequences are enumerated."""
    labels = np.array([0] * 20 + [1] * 10)
    job = {"method": "fedncm", "rounds": 1, "weights": "exact", "model": "identity"}
    found = told(setup(models=1, **job), labels).in_all
    alone = told(setup(models=1), labels).in_all
    assert 100 < found.validation - alone.validation < 120
    assert found.test == pytest.approx(alone.test)
    monkeypatch.setattr(temperature, "GRID", temperature.GRID[:5])
    falls_then_rises = sum(
        all(np.diff(each[: place + 1]) <= 0) and all(np.diff(each[place:]) >= 0)
        for each in itertools.product(range(4), repeat=5)
        for place in range(5)
    )
    assert falls_then_rises <= 2 ** temperature.reported_bits(2, 2) < 4 * falls_then_rises


class Ward:
    """Sixty records of seven yes/no columns, and scores of all rows by models trained round by round."""

    def __init__(self, seeds: int) -> None:
        stream = np.random.default_rng(1)
        rates, weight = stream.uniform(0.2, 0.6, COLUMNS), stream.normal(size=COLUMNS)

        def draw(number: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            rows = (stream.random((number, COLUMNS)) < rates).astype(np.float32)
            ill = stream.random(number) < 1 / (1 + np.exp(-(rows - rates) @ weight))
            return rows, ill.astype(np.int64)

        trained, (self.rows, self.labels) = draw(400), draw(RECORDS)
        self.scores = [each for seed in range(seeds) for each in _rounds(seed, *trained)]

    def table(self, label: int) -> NDArray[np.float64]:
        """How many records of a class have each possible row: what nobody is told."""
        places = self.rows[self.labels == label].astype(int) @ 2 ** np.arange(COLUMNS)[::-1]
        return np.bincount(places, minlength=len(ROWS)).astype(float)

    def shared(self, models: int, bins: int) -> float:
        """Solve for a table with the same histograms that has as few records of the true rows as it can."""
        fewest = 0.0
        for label in (0, 1):
            true = self.table(label)
            places = [np.minimum((each * bins).astype(int), bins - 1) for each in self.scores[-models:]]
            equations = np.vstack([np.eye(bins)[each].T for each in places])
            counts = equations @ true
            solved = milp(
                (true > 0).astype(float),
                constraints=LinearConstraint(equations, counts, counts),
                integrality=np.ones(len(ROWS)),
                bounds=Bounds(0, RECORDS),
                options={"time_limit": 20.0},
            )
            fewest += solved.mip_dual_bound if models > 1 else solved.fun
        return fewest / RECORDS


def _rounds(seed: int, rows: NDArray[np.float32], labels: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Train a network in ten rounds; return its scores of all possible rows before and after each."""
    stream, scores = torch.Generator().manual_seed(seed), []
    inputs, targets, every = torch.from_numpy(rows), torch.from_numpy(labels), torch.from_numpy(ROWS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    steps = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(11):
        with torch.no_grad():
            scores.append(torch.softmax(net(every), 1)[:, 1].double().numpy())
        for batch in torch.randperm(len(inputs), generator=stream).split(32):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs[batch]), targets[batch]).backward()
            steps.step()
    return scores


def test_what_is_refused_gives_the_records_and_what_is_allowed_does_not() -> None:
    """Integer programming: two seeds' jobs pin every record; what fits leaves tables that share few."""
    ward = Ward(seeds=2)
    values = count_values([(torch.from_numpy(ward.rows), torch.from_numpy(ward.labels))], 2, (), 5)
    assert (values * 24).tolist() == pytest.approx([COLUMNS, COLUMNS])
    job, small = told(setup(), ward.labels), told(setup(bins=8, models=1), ward.labels)
    assert not job.fits(job.most) and small.fits(small.most)
    assert ward.shared(22, 32) > 0.99
    assert ward.shared(1, 8) < 0.1


@pytest.mark.parametrize("most", [32, 8, 0])
def test_bins_other_than_earlier_jobs_had_are_said_to_need_consent(most: int) -> None:
    class Planned:
        def __init__(self, at: JobSetup) -> None:
            self.bins = at.job.evaluation.score_bins
            self.wanted = (at.job.evaluation.models, 10_000 * self.bins, 20_000 * self.bins)

        def fits(self, left: Most) -> bool:
            return self.bins <= most

    said = _smaller(setup(), Planned, Most(None, None, None))  # type: ignore[arg-type]
    if not most:
        assert said == (
            "no smaller `evaluation` would fit, and no job can leave it out; "
            '{"models": 1, "score_bins": 2} would disclose least, 2.0% of what the validation records hold, '
            "4.0% of what the test records hold"
        )
        assert "xport" not in ADVICE["TF-627"], "there is nothing to export so"
        return
    assert f'"score_bins": {most}}} would fit: export' in said and "tells less" not in said
    assert ("TF-617" in said) == (most < 32)


def test_of_two_smaller_evaluations_the_one_that_tells_less_is_named() -> None:
    class Planned:
        def __init__(self, at: JobSetup) -> None:
            models, bins = at.job.evaluation.models, at.job.evaluation.score_bins
            self.wanted = (models, models * bins * 1000, models * bins * 1000)

        def fits(self, left: Most) -> bool:
            return self.wanted[1] <= 64_000

    said = _smaller(setup(models=3), Planned, Most(None, None, None))  # type: ignore[arg-type]
    two, three = '{"models": 2, "score_bins": 32}', '{"models": 3, "score_bins": 2}'
    assert said.startswith(f'"evaluation": {two} or {three} ({three} discloses less) would fit: export')
