"""Pooled statistics through whole runs, against numpy over all silos' records; FedAvg's focal loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import log_loss
from tests.support.jobs import SMALL
from tests.support.runs import FOUR, JOB_ID, Wire, coordinator

from tightframe import methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.errors import RunError
from tightframe.methods import fedavg
from tightframe.phases import (
    ADMITTED,
    CLASS_COUNTS,
    FEATURE_MEAN,
    FEATURE_STD,
    Cohort,
    Fold,
    Phase,
    Setting,
    Statistic,
)
from tightframe.rounds import moments
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.phases import statistics
from tightframe.rounds.plan import STATISTICS
from tightframe.rounds.server.coordinator import Result
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.simulated_identity import simulated_identity

# Training records of each class at each silo; real ones, so that a class counts from five on.
COUNTS = np.array(
    [
        [9, 6, 5, 4, 12, 0, 7, 1],
        [7, 0, 5, 4, 3, 0, 8, 9],
        [6, 8, 5, 4, 9, 0, 6, 6],
        [5, 0, 5, 4, 7, 0, 5, 0],
    ]
)
# By hand: class 1 has two holders, 3 none with five records, 4 three (one has three records), 7 two.
POOLED_UNDER_THE_RULES = [27, 0, 20, 0, 28, 0, 26, 0]
POOLED = [27, 14, 20, 16, 31, 0, 26, 16]


class Made:
    """Records of given classes: noise whose mean and spread differ from silo to silo and channel."""

    synthetic = False
    source = "made for a test"

    def __init__(self, silo: int, counts: NDArray[np.int64]) -> None:
        rng = np.random.default_rng(silo)
        self._labels = {
            "train": rng.permutation(np.repeat(np.arange(8), counts)),
            "validation": np.arange(8),
            "test": np.arange(8),
        }
        scale, offset = np.array([1.0, 0.1, 3.0])[:, None, None], np.array([2.0, -0.5, 0.0])[:, None, None]
        self.inputs = {
            fold: (rng.normal(size=(len(labels), 3, 16, 16)) * scale + offset * (silo + 1)).astype(np.float32)
            for fold, labels in self._labels.items()
        }

    def labels(self, fold: Fold) -> Any:
        return self._labels[fold]

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Any:
        return list(zip(torch.from_numpy(self.inputs[fold]), self._labels[fold].tolist(), strict=True))

    def check(self, progress: Any = None) -> None:
        """Nothing can be missing."""


DATA = {site: Made(index, COUNTS[index]) for index, site in enumerate(FOUR)}


def job(**changes: Any) -> JobConfig:
    base = {"sites": FOUR, "min_sites": 3, "method_options": {"loss": "focal"}}
    return parse_job({**SMALL, **base, **changes})


def run(
    of: JobConfig, folder: Path, *, entries: Mapping[str, SiteEntry] | None = None, **wire: Any
) -> tuple[Result, Wire]:
    sessions = {
        site: SiloSession(
            SiloContext(
                site,
                of,
                (entries or {}).get(site),
                folder / site,
                records=DATA[site],
                job_id=JOB_ID,
                identity=partial(simulated_identity, JOB_ID, site, production=False),
            )
        )
        for site in of.roster
    }
    line = Wire(sessions, **wire)
    return coordinator(of, folder).run(line), line


def asking_for(*names: Statistic) -> methods.Method:
    """FedAvg, but it asks for these statistics, and does nothing with them."""
    return replace(methods.get("fedavg"), name="asking", statistics=lambda setting: names)


def equal(one: Result, other: Result) -> bool:
    return all(torch.equal(one.state.model[name], other.state.model[name]) for name in one.state.model)


# ---------------------------------------------------------------- class counts


@pytest.mark.whole
@pytest.mark.parametrize("summation", ["plain", "secure"])
@pytest.mark.parametrize(
    ("rules", "pooled"), [("on", POOLED_UNDER_THE_RULES), ("off", POOLED)], ids=["class rules", "off"]
)
def test_class_counts_are_numpys(tmp_path: Path, summation: str, rules: str, pooled: list[int]) -> None:
    result, _ = run(job(summation=summation, class_rules=rules), tmp_path)
    held = COUNTS >= 5
    expected = np.where(held & (held.sum(0) >= 3), COUNTS, 0).sum(0) if rules == "on" else COUNTS.sum(0)
    assert expected.tolist() == pooled, "the numbers by hand"
    assert result.state.extra[CLASS_COUNTS].tolist() == pooled


@pytest.mark.whole
def test_a_sites_own_minimum_counts(tmp_path: Path) -> None:
    """With four records as the least, class 3 has four holders; one that asks for ten has fewer."""
    entries = {site: SiteEntry(policy=PolicyBlock(min_class_count=4)) for site in FOUR}
    result, _ = run(job(), tmp_path, entries=entries)
    assert result.state.extra[CLASS_COUNTS].tolist() == [27, 0, 20, 16, 28, 0, 26, 0]
    entries["site-1"] = SiteEntry(policy=PolicyBlock(min_class_count=10))
    result, _ = run(job(), tmp_path / "stricter", entries=entries)
    assert result.state.extra[CLASS_COUNTS].tolist() == [18, 0, 15, 12, 28, 0, 19, 0]


def test_under_the_class_rules_a_first_sum_tells_the_holders_only(tmp_path: Path) -> None:
    _, line = run(job(summation="plain"), tmp_path)
    terms = {
        (request["phase"], site): np.frombuffer(answer["term"]["static"], "<u8") / 2.0**24
        for task, site, request, answer in line.seen
        if task == "contribute" and request["kind"] == STATISTICS
    }
    assert sorted({phase for phase, _ in terms}) == [0, 1]
    for index, site in enumerate(FOUR):
        flags = (COUNTS[index] >= 5).astype(float).tolist()
        assert terms[0, site].tolist() == [0.0] * 8 + flags + [0.0], (
            "no count before it is known who holds what"
        )
        offered = np.array(POOLED_UNDER_THE_RULES) > 0
        counts = np.where(offered & (COUNTS[index] >= 5), COUNTS[index], 0)
        assert terms[1, site].tolist() == counts.tolist() + flags + [0.0], "and no failure"


def test_methods_that_need_nothing_ask_for_nothing(tmp_path: Path) -> None:
    of = job(method_options={})
    assert prepare(of).statistics_phases() == ()
    result, line = run(of, tmp_path)
    assert CLASS_COUNTS not in result.state.extra
    assert all(request.get("kind") != STATISTICS for _, _, request, _ in line.seen)


@pytest.mark.parametrize(
    ("names", "class_rules", "sums"),
    [
        (("class_counts",), True, 2),
        (("class_counts",), False, 1),
        (("feature_moments",), True, 2),
        (("feature_moments",), False, 1),
        (("class_counts", "feature_moments"), True, 2),
        ((), True, 0),
    ],
)
def test_a_second_sum_only_for_what_the_class_rules_hold_back(
    names: tuple[Statistic, ...], class_rules: bool, sums: int
) -> None:
    setting = prepare(job()).setting
    phases = statistics.phases(setting, names, class_rules=class_rules)
    assert len(phases) == sums
    assert all(item.static for phase in phases for item in phase.schema.fields), "a second cohort tells more"


# ---------------------------------------------------------------- moments of the inputs


@pytest.mark.whole
@pytest.mark.parametrize("summation", ["plain", "secure"])
def test_moments_are_numpys_over_all_records_of_classes_under_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, summation: str
) -> None:
    both = asking_for("class_counts", "feature_moments")
    monkeypatch.setattr(methods, "METHODS", [*methods.METHODS, both])
    result, _ = run(job(method="asking", method_options={}, summation=summation), tmp_path)
    known = np.array(POOLED_UNDER_THE_RULES) > 0
    counts = [np.where(known, COUNTS[index], 0) for index in range(len(DATA))]
    counted = [own[silo.labels("train")] >= 5 for own, silo in zip(counts, DATA.values(), strict=True)]
    each = [silo.inputs["train"][kept] for silo, kept in zip(DATA.values(), counted, strict=True)]
    pooled = np.concatenate(each).astype(np.float64)
    np.testing.assert_allclose(result.state.extra[FEATURE_MEAN], pooled.mean((0, 2, 3)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(result.state.extra[FEATURE_STD], pooled.std((0, 2, 3)), rtol=0, atol=1e-6)
    assert result.state.extra[CLASS_COUNTS].tolist() == POOLED_UNDER_THE_RULES


class Silo:
    """What the statistics see of a silo."""

    def __init__(
        self,
        inputs: NDArray[np.float32],
        least: int = 1,
        *,
        times: Sequence[int] | None = None,
        patients: Sequence[int] | None = None,
        sums_columns: bool = False,
    ) -> None:
        self._inputs, self.min_class_count, self.sums_columns = inputs, least, sums_columns
        self._times = [1] * len(inputs) if times is None else times
        known = None if patients is None else np.array(patients)
        labels = np.zeros(len(inputs), np.int64)
        self.context = SimpleNamespace(
            data=SimpleNamespace(source="made", groups=lambda fold: known, labels=lambda fold: labels)
        )

    def times_in_moments(self, admitted: torch.Tensor | None) -> torch.Tensor:
        return torch.tensor(self._times, dtype=torch.float64)

    def batches(self, fold: Fold, *, augment: bool, shuffle: bool, epoch: int = 0) -> Any:
        assert (fold, augment, shuffle) == ("train", False, False)
        for part in np.array_split(self._inputs, 3) if len(self._inputs) else ():
            yield torch.from_numpy(part), torch.zeros(len(part), dtype=torch.int64)


@pytest.mark.parametrize("shape", [(5,), (2, 4), (3, 4, 4)], ids=["table", "series", "image"])
def test_moments_are_of_the_first_axis_whatever_a_record_is(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    constant = np.zeros(shape)
    constant[0] = 7.0
    silos = [(rng.normal(size=(n, *shape)) * (constant == 0) + constant).astype(np.float32) for n in (30, 7)]
    setting = replace(prepare(job()).setting, input_shape=shape)
    *_, phase = statistics.phases(setting, ("feature_moments",), class_rules=True)
    terms = [phase.contribute(Silo(inputs), {}, {}).tensors for inputs in silos]  # type: ignore[arg-type]
    totals = {name: sum(np.asarray(term[name]) for term in terms) for name in terms[0]}
    cohort = Cohort(1, {"large": 30.0, "small": 7.0}, 30.0)
    state = phase.update(prepare(job()).initial_state(), totals, cohort)
    pooled = np.concatenate(silos).astype(np.float64).reshape(37, shape[0], -1)
    np.testing.assert_allclose(state.extra[FEATURE_MEAN], pooled.mean((0, 2)), rtol=0, atol=1e-9)
    expected = [1.0, *pooled.std((0, 2))[1:]]  # a constant column is not scaled, as by scikit-learn
    np.testing.assert_allclose(state.extra[FEATURE_STD], expected, rtol=0, atol=1e-6)
    none = {name: np.zeros_like(total) for name, total in totals.items()}
    warnings = [phase.read(state, given, cohort).warnings for given in (totals, none)]
    assert warnings[0] == () and "inputs are not standardised" in warnings[1][0]


def pooled_moments(columns: list[NDArray[np.float32]], least: int) -> tuple[torch.Tensor, torch.Tensor]:
    setting = replace(prepare(job()).setting, input_shape=columns[0].shape[1:])
    *_, phase = statistics.phases(setting, ("feature_moments",), class_rules=True)
    terms = [phase.contribute(Silo(inputs, least), {}, {}).tensors for inputs in columns]  # type: ignore[arg-type]
    totals = {name: sum(np.asarray(term[name]) for term in terms) for name in terms[0]}
    cohort = Cohort(1, {f"silo-{place}": float(len(item)) for place, item in enumerate(columns)}, 90.0)
    state = phase.update(prepare(job()).initial_state(), totals, cohort)
    return state.extra[FEATURE_MEAN], state.extra[FEATURE_STD]


def test_the_model_does_not_tell_what_one_patient_had() -> None:
    """A dose that is 0 for all others, and a level that few have, from mean and deviation in the model."""
    rng = np.random.default_rng(1)
    silos = [rng.normal(size=(count, 4)).astype(np.float32) for count in (90, 80, 70)]
    for place, inputs in enumerate(silos):
        inputs[:, 0] = 0.0
        inputs[:, 1] = rng.random(len(inputs)) < 0.4
        inputs[:, 2] = rng.random(len(inputs)) < (0.4 if place else 0.0)
    silos[1][7, 0], silos[0][3, 2] = 0.5499, 1.0
    (mean, std), exact = pooled_moments(silos, 5), pooled_moments(silos, 1)
    dose = (float(exact[1][0]) ** 2 + float(exact[0][0]) ** 2) / float(exact[0][0])
    assert dose == pytest.approx(0.5499, abs=1e-6), "exact ones do"
    assert float(mean[0]) == 0.0 and float(std[0]) == 1.0
    everybody = np.concatenate(silos).astype(np.float64)
    np.testing.assert_allclose(mean[[1, 3]], everybody.mean(0)[[1, 3]], atol=1e-9)
    assert float(mean[2]) * 240 == pytest.approx(everybody[90:, 2].sum(), abs=1e-6), "without the one there"


def moments_phase(shape: tuple[int, ...], *, uniform: bool = False) -> Phase:
    setting = replace(prepare(job()).setting, input_shape=shape)
    *_, phase = statistics.phases(setting, ("feature_moments",), class_rules=True, uniform=uniform)
    return phase


def term_of(phase: Phase, silo: Silo) -> list[float]:
    """What a silo adds: the number of values, the first column's sum and sum of squares."""
    made = phase.contribute(silo, {}, {}).tensors  # type: ignore[arg-type]
    names = (moments.VALUES, moments.SUMS, moments.SQUARES)
    return [float(made[name].reshape(-1)[0]) for name in names]


@pytest.mark.parametrize("shape", [(1,), (1, 2)], ids=["table", "series"])
def test_each_record_counts_as_often_as_it_is_told_to(shape: tuple[int, ...]) -> None:
    """In whichever batch it is."""
    inputs = np.ones(shape) * np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape(6, *[1] * len(shape))
    found = term_of(moments_phase(shape), Silo(inputs.astype(np.float32), times=[2, 0, 1, 0, 0, 3]))
    assert np.array(found) / np.prod(shape) == pytest.approx([6, 2 + 3 + 18, 2 + 9 + 108])
    assert moments.times_in_moments(1, 5).tolist() == [5]


@pytest.mark.parametrize("findings", [False, True])
def test_moments_are_of_the_classes_admitted_but_of_findings_of_all(findings: bool) -> None:
    """A record may have several findings, so that none is in sums of one alone."""
    setting = replace(prepare(job()).setting, input_shape=(1,), findings=findings)
    *_, phase = statistics.phases(setting, ("feature_moments",), class_rules=True)
    asked = list[torch.Tensor | None]()

    class Asked(Silo):
        def times_in_moments(self, admitted: torch.Tensor | None) -> torch.Tensor:
            asked.append(admitted)
            return super().times_in_moments(admitted)

    offer = torch.tensor([True, False])
    phase.contribute(Asked(np.ones((3, 1), np.float32)), {ADMITTED: offer}, {})  # type: ignore[arg-type]
    assert asked == [None if findings else offer]


@pytest.mark.parametrize("least", [1, 2, 5])
def test_a_silo_without_records_adds_no_moments(least: int) -> None:
    assert term_of(moments_phase((1,)), Silo(np.zeros((0, 1), np.float32), least)) == [0, 0, 0]


def test_a_value_is_few_patients_by_those_whose_records_count() -> None:
    phase, doses = moments_phase((1,)), np.array([[0.0]] * 30 + [[1.0]] * 6, np.float32)

    def told(least: int = 5, **more: Any) -> bool:
        return term_of(phase, Silo(doses, least, **more))[1] > 0

    assert told() and told(6) and not told(7)
    assert not told(times=[1] * 31 + [0] * 5), "the others' count does not hide it"
    assert not told(patients=[*range(30), *[30] * 6]), "six records of one patient"
    assert not told(2, patients=[*range(30), *[30] * 6])
    assert told(7, sums_columns=True), (
        "class sums of the column have them, and the difference would be theirs"
    )


@pytest.mark.parametrize(("records", "counted"), [(1023, 1023), (1025, 1020), (1020, 1020), (600, 1024)])
def test_no_few_records_count_otherwise_than_the_rest_with_uniform_weights(
    records: int, counted: int
) -> None:
    """Sums by class at silos of about 1,024 records less moments would be of these few."""
    times = moments.times_in_moments(records, moments.UNIFORM, 5)
    assert int(times.sum()) == counted
    assert all(many == 0 or many >= 5 for many in torch.bincount(times).tolist())


@pytest.mark.parametrize(("uniform", "most"), [(False, 2 * 11.0), (True, 11.0)])
def test_no_more_values_are_pooled_than_public_weights_allow(uniform: bool, most: float) -> None:
    """A hospital that counts for more sets mean and deviation, and with them the model's front end."""
    phase, cohort = moments_phase((1, 3), uniform=uniform), Cohort(1, {"a": 4.0, "b": 7.0}, 7.0)
    for excess, refused in ((0.0, False), (0.01, True)):
        totals = {
            moments.VALUES: np.array(3 * most + excess),
            **{name: np.ones(1) for name in (moments.SUMS, moments.SQUARES)},
        }
        if refused:
            with pytest.raises(RunError, match=r"^TF-526: "):
                phase.update(prepare(job()).initial_state(), totals, cohort)
        else:
            phase.update(prepare(job()).initial_state(), totals, cohort)


# ---------------------------------------------------------------- drop-outs


def drops(phase: int, attempts: tuple[int, ...]) -> Callable[[str, str, Message], bool]:
    """site-3 does not answer the statistics' sum of a phase, in these tries."""

    def silent(task: str, site: str, request: Message) -> bool:
        here = task == "contribute" and site == "site-3" and request["kind"] == STATISTICS
        return here and request["phase"] == phase and request["attempt"] in attempts

    return silent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(job(), tmp_path_factory.mktemp("undisturbed"))[0]


@pytest.mark.whole
@pytest.mark.parametrize("phase", [0, 1])
def test_a_sum_that_stays_shut_once_is_asked_again(undisturbed: Result, tmp_path: Path, phase: int) -> None:
    result, line = run(job(), tmp_path, silent=drops(phase, (0,)))
    assert result.state.extra[CLASS_COUNTS].tolist() == POOLED_UNDER_THE_RULES
    assert equal(result, undisturbed)
    asked = [
        (request["phase"], request["attempt"])
        for task, site, request, _ in line.seen
        if task == "contribute" and site == "site-1" and request["kind"] == STATISTICS
    ]
    assert asked == ([(0, 0), (0, 1), (1, 0)] if phase == 0 else [(0, 0), (1, 0), (1, 1)])


@pytest.mark.parametrize("phase", [0, 1])
def test_a_sum_that_stays_shut_twice_ends_the_run_with_nothing_trained(tmp_path: Path, phase: int) -> None:
    seen: list[str] = []

    def silent(task: str, site: str, request: Message) -> bool:
        seen.append(request.get("kind", task))
        return drops(phase, (0, 1))(task, site, request)

    with pytest.raises(RunError, match=r"^TF-510: .*dropped out twice: site-3: TF-502"):
        run(job(), tmp_path, silent=silent)
    assert STATISTICS in seen and "train" not in seen
    outcome = json.loads((tmp_path / "server" / "outcome.json").read_text())
    assert outcome["trained"] is False and outcome["rounds_done"] == 0 and "TF-510" in outcome["reason"]
    kept = {path.name for path in (tmp_path / "server").iterdir()}
    assert not [name for name in kept if name.endswith(".safetensors")], kept


def test_plain_sums_go_on_without_the_silo_that_drops_out(tmp_path: Path) -> None:
    """The server sees each term there anyway; counts are those of the others, under the same rules."""
    result, _ = run(job(summation="plain"), tmp_path, silent=drops(1, (0,)))
    others, offered = COUNTS[[0, 1, 3]], np.array(POOLED_UNDER_THE_RULES) > 0
    held = others >= 5
    expected = np.where(held & offered & (held.sum(0) >= 3), others, 0).sum(0)
    assert result.state.extra[CLASS_COUNTS].tolist() == expected.tolist() == [21, 0, 15, 0, 0, 0, 20, 0]


# ---------------------------------------------------------------- the focal loss


@pytest.mark.whole
@pytest.mark.parametrize("rules", ["on", "off"])
def test_focal_training_is_the_same_with_secure_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    used: list[list[float]] = []
    loss = fedavg.focal_loss

    def spy(
        logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, *, gamma: float
    ) -> torch.Tensor:
        used.append(weights.tolist())
        assert gamma == 1.5
        return loss(logits, labels, weights, gamma=gamma)

    monkeypatch.setattr(fedavg, "focal_loss", spy)
    options = {"loss": "focal", "focal_gamma": 1.5}
    secure, plain = (
        run(job(summation=kind, class_rules=rules, rounds=2, method_options=options), tmp_path / kind)[0]
        for kind in ("secure", "plain")
    )
    assert equal(secure, plain)
    assert [row.training for row in secure.outcome.rows] == [row.training for row in plain.outcome.rows]
    assert [row.evaluation for row in secure.outcome.rows] == [row.evaluation for row in plain.outcome.rows]
    rounds = [row for row in secure.outcome.rows if row.kind == "train"]
    assert all(set(row.training) == {"loss", "focal"} for row in rounds)
    pooled = np.array(POOLED_UNDER_THE_RULES if rules == "on" else POOLED, dtype=np.float64)
    known = pooled.sum() / pooled[pooled > 0]
    expected = np.full(8, known.max())
    expected[pooled > 0] = known
    assert used
    for weights in used:
        np.testing.assert_allclose(weights, expected, rtol=1e-6)
    other, _ = run(job(summation="plain", class_rules=rules, rounds=2, method_options={}), tmp_path / "other")
    assert not equal(plain, other), "the loss has an effect"


def test_class_weights_are_flambys() -> None:
    """FLamby's alpha on Fed-ISIC2019, to the four decimals of its source; the counts of its training fold."""
    counts = torch.tensor([3332, 9084, 2649, 712, 1950, 184, 201, 485], dtype=torch.float64)
    alpha = [5.5813, 2.0472, 7.0204, 26.1194, 9.5369, 101.0707, 92.5224, 38.3443]
    assert counts.sum() == 18597
    np.testing.assert_allclose(fedavg.class_weights(counts), alpha, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            [10.0, 30.0, 0.0],
            [4.0, 4 / 3, 4.0],
        ),  # what is withheld is unknown, not zero
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        ([5.0, 5.0, 5.0], [3.0, 3.0, 3.0]),
        ([1e-9, 8.0, 8.0], [2.0, 2.0, 2.0]),
    ],
)
def test_a_class_that_is_not_known_weighs_as_the_rarest(counts: list[float], expected: list[float]) -> None:
    weights = fedavg.class_weights(torch.tensor(counts, dtype=torch.float64))
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def _case(seed: int = 1, scale: float = 3.0) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(40, 5)) * scale, rng.integers(0, 5, 40), rng.uniform(0.5, 100.0, 5)


def _focal(logits: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any], gamma: float) -> torch.Tensor:
    return fedavg.focal_loss(
        torch.tensor(logits, dtype=torch.float32),
        torch.from_numpy(labels),
        torch.tensor(weights, dtype=torch.float32),
        gamma=gamma,
    )


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_the_focal_loss_is_the_papers_formula(gamma: float) -> None:
    logits, labels, weights = _case()
    total = 0.0
    for row, label in zip(logits, labels, strict=True):  # eq. (5), one record after the other
        p = np.exp(row[label]) / np.exp(row).sum()
        total -= weights[label] * (1 - p) ** gamma * np.log(p)
    assert float(_focal(logits, labels, weights, gamma)) == pytest.approx(total / len(labels), rel=1e-5)


def test_with_gamma_zero_it_is_the_weighted_cross_entropy() -> None:
    logits, labels, weights = _case()
    found = float(_focal(logits, labels, weights, 0.0))
    by_torch = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(labels), weight=torch.from_numpy(weights), reduction="sum"
    )
    assert found == pytest.approx(float(by_torch) / len(labels), rel=1e-5)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    by_sklearn = log_loss(labels, probabilities, sample_weight=weights[labels], normalize=False)
    assert found == pytest.approx(by_sklearn / len(labels), rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.25, 0.5, 1.0, 2.0, 10.0])
def test_its_gradient_is_finite_where_a_record_is_certain(gamma: float) -> None:
    """p = 1 to the last bit, where (1 - p)^gamma has an infinite slope for gamma below one; and p = 0."""
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0], [17.0, 0.0], [0.3, 0.1]], requires_grad=True)
    loss = fedavg.focal_loss(logits, torch.tensor([0, 0, 0, 0]), torch.tensor([100.0, 1.0]), gamma=gamma)
    loss.backward()
    assert logits.grad is not None and bool(torch.isfinite(loss)) and bool(torch.isfinite(logits.grad).all())
    assert float(logits.grad[0].abs().max()) < 1e-6, "a record that is right has nothing to say"
    assert float(logits.grad[1].abs().max()) == pytest.approx(25.0, rel=1e-3), "one that is wrong has"


def test_setting_of_the_focal_loss_decides_what_is_asked_for() -> None:
    def names(loss: str) -> tuple[Statistic, ...]:
        setting: Setting = prepare(job(method_options={"loss": loss})).setting
        return fedavg.statistics(setting)

    assert names("focal") == ("class_counts",) and names("cross_entropy") == ()
