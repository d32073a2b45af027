"""Totals over almost the same records, subtracted: what one has and another lacks must not be few records.

Each sum goes by a rule on which records count, and two rules that differ in few records of one hospital tell
these to whoever reads both totals, with nobody lying. So a hospital's few records may change no total, and
nothing that it declares: then no combination of these numbers has them. What they do change is listed with
the threat that covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.attacks.malicious_server import STANDARD, Federation
from tests.support.tables import contract, statistics_job, write

from tightframe.config.site import SiteEntry
from tightframe.data.table import TableOptions, TableSite
from tightframe.data.table.silo import open_site
from tightframe.learning.few_records.products import Sizes
from tightframe.methods.fedrod import class_shares
from tightframe.phases import Cohort
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.declaration import applied_weights, tellers
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.sums.common import Peers
from tightframe.rounds.sums.plain import PlainServer

NAMES = [f"hospital-{number}" for number in range(1, 5)]
VICTIM, RARE = "hospital-2", 2
COLUMNS = [{"column": f"x{place}", "kind": "number", "unit": "u", "low": -4, "high": 4} for place in range(8)]
OPTIONS = {
    "contract": contract(
        columns=COLUMNS,
        label={
            "column": "outcome",
            "classes": [{"code": str(code), "title": f"class {code}"} for code in range(3)],
        },
        patient="patient",
        fold={"column": "fold"},
    )
}
HEADER = ["id", "patient", *(str(column["column"]) for column in COLUMNS), "outcome", "fold"]
RECORDS = {
    **{("train", code): number for code, number in enumerate((30, 30, 20))},
    **{("validation", code): number for code, number in enumerate((8, 8, 6))},
    **{("test", code): number for code, number in enumerate((12, 12, 8))},
}
NONE_TRAINED = {**RECORDS, ("train", RARE): 0}
NONE = {**NONE_TRAINED, ("validation", RARE): 0, ("test", RARE): 0}
Row = list[str]
Numbers = dict[tuple[Any, ...], np.ndarray]

KNOWN = {
    "training/": "S21",  # losses of all records, at the model before its steps
    "gradient/": "S21",  # of a model that records train: units and rows of few do not move
    "fisher": "S21",
    "fishr/": "S21",
    "norms/silos": "H5",
}
"""Start of the name of each total that few records change -> the threat that says what it tells."""
OF_EVALUATED = {**KNOWN, "evaluation/test/": "S12"}
COUNTS = ("/values", "/counts", "/rows", "/records")
"""Ends of the names of numbers of training records."""
SMALL: dict[str, Any] = {"model": "mlp", "model_options": {"widths": [2], "standardise": True}}
RAW: dict[str, Any] = {"model_options": {}}
STEP: dict[str, Any] = {"method_options": {"learning_rate": 1e-30}}
JOBS: dict[str, dict[str, Any]] = {
    "fedmr": {"personalise": True},
    "ccvr": {"method_options": {"covariance": "shared"}},
    "fed3r": RAW,
    "fednova": {"training": {"batch_size": 1}},
    "fedavg": {"method_options": {"loss": "focal"}, "start": "fedncm"},
    "fedproto": {**SMALL, "method_options": {"weighting": "records"}, "model_options": {"widths": [2]}},
    **{name: SMALL for name in ("fedavg_etf", "fedetf", "fedrod")},
    **{name: RAW for name in ("fedproc", "creff", "fednh", "fedcurv", "fedcgs")},
    **{name: STEP for name in ("fedsgd", "fedilc")},
}
"""Jobs by their methods, and what differs from the others' values."""
FAST = ("fedmr", "ccvr", "fed3r")
METHODS = [pytest.param(name, marks=() if name in FAST else pytest.mark.whole) for name in JOBS]


def made(seed: int, fold: str, label: int, number: int, spread: float = 1.0) -> Iterator[Row]:
    """Records of a class in a fold, each another patient's; all but one column vary by so much."""
    stream = np.random.default_rng([seed, label, len(fold)])
    for place in range(number):
        values = (stream.normal(label, 1.0, 8) * [1.0, *[spread] * 7]).clip(-4, 4)
        name = f"{fold}-{label}-{place}"
        yield [name, name, *(f"{value:.5f}" for value in values), str(label), fold]


def few(records: int, *, patients: int, fold: str = "train") -> list[Row]:
    """So many records of so many patients of the rare class, beside what ``made`` makes."""
    rows = list(made(99, fold, RARE, records))
    return [[f"few-{row[0]}", f"few-{fold}-{place % patients}", *row[2:]] for place, row in enumerate(rows)]


class Hospitals:
    """Tables of four hospitals; ``Hospitals.records`` changes one of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._written = folder, 0
        self._all = {name: self._table(self._rows(seed, RECORDS)) for seed, name in enumerate(NAMES)}

    def _rows(self, seed: int, numbers: Mapping[Any, int], spread: float = 1.0) -> list[Row]:
        return [
            row
            for (fold, label), number in numbers.items()
            for row in made(seed, fold, label, number, spread)
        ]

    def _table(self, rows: Sequence[Row]) -> Any:
        self._written += 1
        path = write(self._folder / f"{self._written}.csv", rows, HEADER)
        return open_site(TableSite(file=path), TableOptions.model_validate(OPTIONS))

    def records(
        self,
        numbers: Mapping[Any, int] = RECORDS,
        more: Sequence[Row] = (),
        *,
        spread: float = 1.0,
        others: Mapping[str, Mapping[Any, int]] | None = None,
    ) -> dict[str, Any]:
        """Each hospital's records, where one has so many of each class in each fold, and more."""
        tables = {
            name: self._table(self._rows(NAMES.index(name), own)) for name, own in (others or {}).items()
        }
        victim = self._table([*self._rows(NAMES.index(VICTIM), numbers, spread), *more])
        return {**self._all, **tables, VICTIM: victim}


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Hospitals:
    return Hospitals(tmp_path_factory.mktemp("tables"))


def job_of(method: str, **more: Any) -> dict[str, Any]:
    """A job whose training moves no model, with class sums of columns and their moments where it may."""
    values = {
        "dataset": "table",
        "dataset_options": OPTIONS,
        "method": method,
        "model": "identity",
        "model_options": {"standardise": True},
        "weights": "exact",
        "min_sites": len(NAMES),
        **JOBS.get(method, {}),
        **more,
    }
    still = {"learning_rate": 1e-30, "weight_decay": 0.0}
    return {**values, "training": {**still, **values.get("training", {})}}


def numbers_of(values: Mapping[str, Any], data: Mapping[str, Any], folder: Path) -> Numbers:
    """Sum all exchanges of a job, as secure sums do, and return what opens, and what hospitals declare."""
    job = Federation.job_of(values, NAMES)
    silos, declared = {}, {}
    for name in NAMES:
        site = SiteEntry(policy=STANDARD)
        context = SiloContext(name, job, site, folder / name, records=data[name], job_id="j", production=True)
        declared[name] = SiloSession(context)._read_records()
        context.state_folder.mkdir(parents=True, exist_ok=True)
        silos[name] = Contributor(context)
    weights = applied_weights(declared, job.max_weight_share)
    sizes = Sizes.of({name: item.weight for name, item in declared.items()}, 0)
    peers = Peers(weights, 3, tellers(declared.values()), sizes)
    told = {name: (item.weight, item.min_class_count, len(item.untold)) for name, item in declared.items()}
    opened: Numbers = {("declared", name): np.array(item, dtype=np.float64) for name, item in told.items()}
    setup = silos[NAMES[0]].setup
    state = setup.initial_state()
    for exchange in setup.plan:
        received = {name: item.clone() for name, item in exchange.phase.broadcast(state).items()}
        phase = exchange.phase_for(received)
        total = PlainServer(phase.schema)
        for name, silo in silos.items():
            view = silo._silo(exchange, {}, peers, state)
            check = partial(silo._check_own, view, exchange, phase, state, sizes)
            contribution, term, whole = silo._term(view, check, phase, received, weights)
            assert whole, "no hospital fails"
            if contribution.proposed_state is not None:
                silo._store.propose(exchange.sum_id(), contribution.proposed_state, "0" * 64)
                silo._store.commit(str(exchange.sum_id()), NAMES, "0" * 64)
            total.add(name, term)
        integers = total.open()
        decoded = codec.decode(phase.schema, integers, parties=len(NAMES))
        opened |= {(*exchange.place, name): np.asarray(item) for name, item in decoded.items()}
        state = exchange.advance(state, integers, Cohort.of(exchange.round, NAMES, weights)).state
    return opened


def changed(one: Numbers, other: Numbers, known: Mapping[str, str]) -> list[str]:
    """Return the numbers that differ, but for those that are known, with a float32's rounding."""
    assert one.keys() == other.keys()
    return [
        f"{place}: {one[place].ravel()[:4]}, {other[place].ravel()[:4]}"
        for place in one
        if not str(place[-1]).startswith(tuple(known))
        and not np.allclose(one[place], other[place], rtol=1e-5, atol=1e-5)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_few_patients_of_a_class_change_no_number(method: str, hospitals: Hospitals, tmp_path: Path) -> None:
    """Twelve records of four patients; and four of another fold of too few."""
    without = {place: 0 if place[0] == "validation" else number for place, number in NONE_TRAINED.items()}
    more = [*few(12, patients=4), *few(4, patients=4, fold="validation")]
    none, some = hospitals.records(without), hospitals.records(without, more)
    job = job_of(method)
    before, after = numbers_of(job, none, tmp_path / "none"), numbers_of(job, some, tmp_path / "some")
    assert not changed(before, after, KNOWN)


@pytest.mark.whole
@pytest.mark.parametrize(
    "more",
    [
        {"weights": "uniform"},
        {"max_weight_share": 0.26},
        {"prototype_sites": [name for name in NAMES if name != VICTIM]},
    ],
    ids=str,
)
def test_nor_by_other_weights_and_without_its_prototypes(
    more: dict[str, Any], hospitals: Hospitals, tmp_path: Path
) -> None:
    none, some = hospitals.records(NONE_TRAINED), hospitals.records(NONE_TRAINED, few(12, patients=4))
    job = job_of("fedmr", **more)
    before, after = numbers_of(job, none, tmp_path / "none"), numbers_of(job, some, tmp_path / "some")
    assert not changed(before, after, KNOWN)


def test_nor_do_few_test_records_of_a_class_that_a_hospital_lacks_change_its_accuracies(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    """Only the mean accuracy had them: less PM(V), they were left."""
    none, some = hospitals.records(NONE), hospitals.records(NONE, few(8, patients=4, fold="test"))
    job = job_of("fedmr")
    before, after = numbers_of(job, none, tmp_path / "none"), numbers_of(job, some, tmp_path / "some")
    assert not changed(before, after, OF_EVALUATED)


def test_statistics_of_a_table_tell_of_nobody_that_a_class_is_withheld_and_not_how_few(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    job = statistics_job(dataset_options=OPTIONS, update_norm=None, sites=NAMES)
    none, one, four = (
        numbers_of(job, hospitals.records(NONE, few(number, patients=4)), tmp_path / str(number))
        for number in (0, 1, 12)
    )
    assert not changed(one, four, {})
    assert {line.partition("/")[2].partition("'")[0] for line in changed(none, one, {})} == {
        f"table/{kind}/withheld" for kind in ("records", "cells", "moments")
    }


def test_nor_do_shares_by_which_a_hyper_network_makes_a_head(hospitals: Hospitals, tmp_path: Path) -> None:
    some = hospitals.records(NONE_TRAINED, few(12, patients=4))
    run = Federation(job_of("fedrod"), some, state=tmp_path)
    silo = LocalSilo(run.sessions[VICTIM].context, run.setup, torch.device("cpu"), 1)
    assert class_shares(silo).tolist() == [0.5, 0.5, 0.0]


def training_records(numbers: Numbers) -> dict[str, float]:
    """The numbers of training records in each sum of a job that has any."""
    counts = {str(place): float(item.sum()) for place, item in numbers.items() if place[-1].endswith(COUNTS)}
    return {place: number for place, number in counts.items() if number and "evaluation" not in place}


@pytest.mark.parametrize(
    "method", ["fedmr", *(pytest.param(name, marks=pytest.mark.whole) for name in ("ccvr", "fedavg"))]
)
def test_all_sums_of_a_job_are_of_the_same_records(method: str, hospitals: Hospitals, tmp_path: Path) -> None:
    """Where a class has two hospitals only, and of another one hospital has too few values once divided.

    Pooled moments showed seven of eight columns there to vary hardly: six patients were in the moments, and
    not in the class sums of the same columns.
    """
    two = {name: {**RECORDS, ("train", 0): 0} for name in (NAMES[2], NAMES[3])}
    own = {**RECORDS, ("train", RARE): 6}
    data = hospitals.records(own, spread=0.002, others=two)
    counts = training_records(numbers_of(job_of(method), data, tmp_path))
    assert set(counts.values()) == {3 * 30 + 30 + 6 + 3 * 20} and len(counts) > 1, counts


def test_what_is_known_is_in_the_threat_model() -> None:
    text = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text()
    assert all(f"\n- {threat} " in text for threat in OF_EVALUATED.values())
