"""What fails at a silo while it trains is a term like any other: it changes nothing, and carries a flag."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.rounds.sums import test_release
from tests.support.runs import FOUR, asked, job, missed, run

from tightframe.errors import ContributionError, DataError, JobError, RunError, TightframeError, TrainingError
from tightframe.learning.halves import NORMALISER
from tightframe.learning.model_update import BROADCAST, BUFFER
from tightframe.learning.one_sum.feature_sums import RECORDS
from tightframe.learning.one_sum.temperature import LOSSES
from tightframe.phases import Cohort, Contribution, Field, Phase, Schema, ServerState
from tightframe.privacy.accounting import BudgetError
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.plan import advance
from tightframe.rounds.riders import class_rules, epsilon, evaluation, failures
from tightframe.rounds.run_state import state_sha256
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.silo.private_view import PrivateSilo
from tightframe.rounds.silo.view import LocalSilo
from tightframe.rounds.sums.common import Peers
from tightframe.rounds.sums.plain import PlainServer
from tightframe.rounds.sums.simulated_identity import simulated_identity

HIDDEN: tuple[Exception, ...] = (
    TrainingError("not finite", code="TF-301"),
    TrainingError("out of memory", code="TF-302"),
    ContributionError("over its bound", code="TF-402"),
    DataError("patient 4711.jpg cannot be read", code="TF-206"),
    RuntimeError("CUDA error"),
    MemoryError(),
    OSError("the disk is away"),
)
TOLD: tuple[TightframeError, ...] = (
    RunError("aborted", code="TF-504"),
    BudgetError("spent"),
    TightframeError("stopped", code="TF-730"),
)


OPTIONS = {**test_release.IN, **test_release.OUT}
FLAG = Field(failures.FAILED, (), bound=1.0 + failures.LACKING, bits=0)
STATIC = Field("evaluation/steps", (), static=True)
MIXED = Schema((Field("update/weight", (2,)), STATIC, Field("buffer/mean", (2,), static=True)))


def static(name: str, *shape: int, **more: Any) -> Field:
    return Field(name, shape, static=True, **more)


UPDATE, FLAGGED = Field("update/weight", (2,)), static(failures.FAILED, bound=1.0 + failures.LACKING, bits=0)


def names(fields: tuple[Field, ...]) -> list[str]:
    return [item.name for item in fields]


def contributor(folder: Path, **values: Any) -> Contributor:
    identity = partial(simulated_identity, "a", "site-1", production=False)  # signs what noise is charged
    of = job(summation="plain", **values)
    return Contributor(SiloContext("site-1", of, None, folder, job_id="a", identity=identity))


def term(made: Contributor) -> Any:
    (exchange,) = made.setup.plan.round(1)
    return made.contribute(asked(made.setup, exchange), Peers(dict.fromkeys(FOUR, 4.0)))


@pytest.mark.parametrize("error", HIDDEN, ids=lambda error: type(error).__name__ + str(error)[:9])
def test_a_failure_leaves_in_the_form_of_any_other_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    made = contributor(tmp_path)
    whole = term(made)

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(LocalSilo, "fit", fails)
    failed = term(made)
    assert failed.fields == whole.fields and failed.basis == whole.basis and failed.follows
    assert {group: len(data) for group, data in failed.term.items()} == {
        group: len(data) for group, data in whole.term.items()
    }
    assert "nothing can be contributed" in caplog.text and failures.reason(error) in caplog.text


@pytest.mark.parametrize("error", TOLD, ids=lambda error: error.code)
def test_what_no_record_decides_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: TightframeError
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    made = contributor(tmp_path)
    monkeypatch.setattr(LocalSilo, "fit", fails)
    with pytest.raises(TightframeError) as caught:
        term(made)
    assert caught.value is error


def test_a_failed_silo_changes_nothing_but_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone in a sum it leaves every tensor as it is: running statistics, which are no differences, too.

    Its evaluation stays: at another learning rate it would not have failed, and the difference be its own.
    """
    made = contributor(tmp_path, min_sites=3)
    setup = made.setup
    (exchange,) = setup.plan.round(1)
    monkeypatch.setattr(LocalSilo, "fit", lambda *_, **__: torch.ones(1) / 0 + None)  # a TypeError
    phase, sums = exchange.carrying(True), PlainServer(exchange.carrying(True).schema)
    sums.add("site-1", term(made).term)
    totals = codec.decode(phase.schema, sums.open(), parties=4)
    assert totals[failures.FAILED] == 1
    assert {name for name, total in totals.items() if np.any(total)} <= {
        failures.FAILED,
        *(name for name in totals if name.startswith(("buffer/", "evaluation/", "classes/"))),
    }
    assert totals["evaluation/test/confusion"].sum() > 0 and totals["classes/holders"].any()
    state: ServerState = setup.initial_state()
    others = {name: total if name != failures.FAILED else np.array(0.0) for name, total in totals.items()}
    after = advance(phase, state, others, Cohort(1, {"site-1": 4.0}, 4.0)).state
    for name, value in state.model.items():
        torch.testing.assert_close(after.model[name], value)


def test_a_silo_whose_update_cannot_be_encoded_is_evaluated_all_the_same(tmp_path: Path) -> None:
    tested = []
    for bound in (8.0, 1e-9):
        made = contributor(tmp_path / str(bound), update_bound=bound, update_norm=None)
        (exchange,) = made.setup.plan.round(1)
        phase, sums = exchange.carrying(True), PlainServer(exchange.carrying(True).schema)
        sums.add("site-1", term(made).term)
        totals = codec.decode(phase.schema, sums.open(), parties=4)
        assert totals[failures.FAILED] == (bound < 1)
        tested.append(totals["evaluation/test/scores"])
    assert np.array_equal(*tested)


@pytest.mark.parametrize("method", ["fednova", "fedcurv"])
def test_what_training_alone_makes_is_lacking_and_the_number_of_its_steps_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Steps follow from the records; squared gradients of a model that cannot be encoded are not used."""
    opened = []
    for bound, fails in ((8.0, False), (1e-9, False), (8.0, True)):
        made = contributor(tmp_path / f"{bound}{fails}", method=method, update_bound=bound, update_norm=None)
        if fails:
            monkeypatch.setattr("tightframe.learning.loop.fit", lambda *_, **__: torch.ones(1) / 0 + None)
        (exchange,) = made.setup.plan.round(1)
        phase, sums = exchange.carrying(True), PlainServer(exchange.carrying(True).schema)
        sums.add("site-1", term(made).term)
        opened.append(codec.decode(phase.schema, sums.open(), parties=4))
    whole, over, failed = opened
    if method == "fednova":
        assert over[failures.FAILED] == 0  # a direction is bounded by 1e6, whatever the update
        assert failed[failures.FAILED] == 1 and failed["normaliser"] == whole["normaliser"] > 0
    else:
        assert over[failures.FAILED] == failed[failures.FAILED] == 1 + failures.LACKING
        assert (np.abs(over["fisher/head.weight"]) > 1e3 * np.abs(whole["fisher/head.weight"]).max()).any()


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(item.getMessage() for item in caplog.records if item.levelno == logging.WARNING)


@pytest.mark.whole
def test_the_run_goes_on_without_it_and_ends_with_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit = LocalSilo.fit
    broken: set[str] = {"site-2"}

    def fails(self: LocalSilo, *given: Any, **named: Any) -> Any:
        if self.name in broken:
            raise MemoryError
        return fit(self, *given, **named)

    monkeypatch.setattr(LocalSilo, "fit", fails)
    result, line = run(job(rounds=1, update_norm=100.0), tmp_path / "one")
    (row,) = [row for row in result.outcome.rows if row.kind == "train"]
    assert row.silos == FOUR and row.dropped == {} and row.counts == {"failed_silos": 1}
    assert "1 silo of 4 could not contribute" in caplog.text and "norms" not in warnings(caplog)
    assert row.update_norms is not None and sum(item.silos for item in row.update_norms.histogram) == 3
    monkeypatch.setattr(LocalSilo, "fit", fit)
    _, whole = run(job(rounds=1, update_norm=100.0), tmp_path / "whole")
    sizes = [
        {(site, len(answer["secure"])) for task, site, request, answer in item.seen if task == "contribute"}
        for item in (line, whole)
    ]
    assert sizes[0] == sizes[1], "whatever happened"
    monkeypatch.setattr(LocalSilo, "fit", fails)
    broken.add("site-3")
    with pytest.raises(RunError, match=r"^TF-513: "):
        run(job(rounds=1), tmp_path / "two")


@pytest.mark.whole
@pytest.mark.parametrize("error", [*HIDDEN, *TOLD], ids=lambda error: type(error).__name__ + str(error)[:9])
def test_a_baseline_that_fails_is_told_by_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A server may ask for it after the run, of one hospital alone."""
    made = contributor(tmp_path, local_baseline_epochs=1)
    term(made)
    monkeypatch.setattr("tightframe.rounds.silo.own_report.begun", lambda context: True)

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(LocalSilo, "fit", fails)
    if error in TOLD:
        with pytest.raises(TightframeError) as caught:
            made.baseline()
        assert caught.value is error
    else:
        assert made.baseline() == {}
        assert failures.reason(error) in caplog.text


def test_with_privacy_there_is_no_flag() -> None:
    private = prepare(job(method="fedavg", weights="uniform", privacy={"epsilon": 8.0}))
    for exchange in private.plan:
        assert failures.FAILED not in exchange.phase.schema


@pytest.mark.parametrize("honest", [1, 3])
def test_with_privacy_a_failed_silo_adds_its_share_of_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: int
) -> None:
    """Which the others' records rely on: the noise promised is that of t - c honest silos, failed or not."""
    made = contributor(
        tmp_path, method="fedmr", weights="uniform", rounds=1, privacy={"epsilon": 8.0, "evaluation": "noisy"}
    )
    plan = made.setup.privacy
    assert plan is not None and plan.evaluation is not None

    def fails(*_: Any, **__: Any) -> Any:
        raise TrainingError("not finite", code="TF-301")

    monkeypatch.setattr(PrivateSilo, "fit", fails)
    found: dict[str, list[Any]] = {"class_sums": [], "evaluation": []}
    for exchange in (*made.setup.plan.round(1), *made.setup.plan.ending()):
        phase = exchange.carrying(True)
        if exchange.closing:
            monkeypatch.setattr(evaluation, "count_at", fails)
        state = made.setup.initial_state()
        message = asked(made.setup, exchange, state) | {"state": state_sha256(state)}
        total = None if exchange.training else missed(made.setup, exchange)
        if exchange.training:
            message.pop("state_bytes", None)
        sums = PlainServer(phase.schema)
        weights = dict.fromkeys(FOUR, 4.0)
        sums.add("site-1", made.contribute(message, Peers(weights, honest), total=total).term)
        totals = codec.decode(phase.schema, sums.open(), parties=4)
        for item in phase.schema.fields:
            if item.mechanism in found:
                found[item.mechanism].append(totals[item.name].ravel())
    for config, mechanism in ((plan.class_sums, "class_sums"), (plan.evaluation.config, "evaluation")):
        units = np.concatenate(found[mechanism]) * config.grid
        assert units.size > 300
        assert float(np.var(units)) == pytest.approx(config.share_variance(honest), rel=0.3)


class Noise:
    """A release whose noise says of which one it is, and for how many shares."""

    def __init__(self, number: int) -> None:
        self._number = number

    def share(self, shape: tuple[int, ...], shares: int) -> Any:
        return np.full(shape, 100 * self._number + shares)

    def as_numbers(self, units: Any) -> Any:
        return units.astype(float)


def test_with_privacy_each_noisy_total_has_a_failed_silos_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the noise of that total is less than what was charged for."""
    plan: Any = SimpleNamespace(
        class_sums=Noise(1),
        frozen=SimpleNamespace(config=SimpleNamespace(part=lambda name: {"frozen_sums": Noise(2)}[name])),
        evaluation=SimpleNamespace(config=Noise(3)),
        statistics=SimpleNamespace(config=Noise(4)),
        gradients=Noise(5),
        training_shares=lambda honest: 10 * honest,
    )
    noisy = ("class_sums", "frozen_sums", "evaluation", "statistics", "gradient_sum")
    told = {epsilon.BINS: torch.ones(2)}
    monkeypatch.setattr(epsilon, "told", lambda silo: told)
    silo: Any = SimpleNamespace(honest=2)
    for more in ((), (Field(epsilon.BINS, (2,)),)):
        schema = Schema((*(Field(name, (2,), mechanism=name) for name in noisy), UPDATE, *more))
        made = failures.with_noise(failures.neutral(schema, {}), schema, plan, silo).tensors
        assert [made[name].tolist() for name in noisy] == [
            [number] * 2 for number in (102, 202, 302, 402, 520)
        ]
        assert not made[UPDATE.name].any() and set(made) == set(names(schema.fields))
        assert not more or made[epsilon.BINS].all()


def test_with_privacy_a_failed_silos_term_has_no_flag() -> None:
    """The schema has none, and no field but the schema's is in a term."""
    fields = (Field("update/weight", (2,)), Field(failures.FAILED, (), static=True))
    for schema in (Schema(fields[:1]), Schema(fields)):
        made = failures.without_update(schema, {}, {}).tensors
        assert sorted(made) == sorted(item.name for item in schema.fields)
        assert not made["update/weight"].any()


def test_a_failed_silo_sends_buffers_back_as_it_received_them_and_nothing_else() -> None:
    names = (BUFFER + "mean", BUFFER + "other", "update/weight")
    schema = Schema(tuple(Field(name, (2,)) for name in names))
    received = {BROADCAST + "mean": torch.tensor([1.0, 2.0]), BROADCAST + "update/weight": torch.ones(2)}
    made = failures.neutral(schema, received).tensors
    assert [made[name].tolist() for name in names] == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert all(item.dtype == torch.float64 for item in made.values())


def test_without_a_failed_silo_nothing_is_noted() -> None:
    def nothing(*_: Any) -> Any:
        raise AssertionError("Expected no training.")

    phase = failures.attach(
        Phase("train", Schema((Field("update/weight", (2,)),)), nothing, nothing, nothing), job()
    )
    cohort, state = Cohort(1, dict.fromkeys("abcd", 1.0), 1.0), ServerState({})
    for failed, notes in ((0.0, {}), (1.0, {failures.NOTE: 1})):
        reading = phase.read(state, {failures.FAILED: np.array(failed)}, cohort)
        assert (dict(reading.notes), len(reading.warnings)) == (notes, len(notes))


def test_what_a_failed_silo_lacks_of_its_records_is_random_and_nothing_else() -> None:
    schema = MIXED + Schema((FLAG,))
    for made, flag in (({}, 1.0 + failures.LACKING), ({"evaluation/steps": torch.tensor(3.0)}, 1.0)):
        found = failures.without_update(schema, {}, made)
        assert float(found.tensors[failures.FAILED]) == flag
        assert float(found.tensors["evaluation/steps"]) == (3.0 if made else 0.0)
        term = codec.encode(schema, found.tensors, share=1.0, parties=4)
        blinded = failures.blinded(schema, term)
        assert blinded["update"] == term["update"]
        before, after = (codec.unpack(schema, "static", item["static"]) for item in (term, blinded))
        assert (before["evaluation/steps"] != after["evaluation/steps"]).all() == bool(flag > 1)
        assert np.array_equal(before["buffer/mean"], after["buffer/mean"])
    other = failures.without_update(schema, {}, {"steps": torch.tensor(3.0)})  # of a model that trained
    assert float(other.tensors[failures.FAILED]) == 1.0 + failures.LACKING
    again = failures.without_update(
        schema, {}, {"evaluation/steps": torch.tensor(0.0), failures.FAILED: torch.tensor(1025.0)}
    )
    assert float(again.tensors[failures.FAILED]) == 1025.0, "what was random stays so"


@pytest.mark.parametrize(
    ("flags", "fields", "needed", "left"),
    [
        (1.0, MIXED, True, {"update/weight", "evaluation/steps", "buffer/mean"}),
        (1.0 + failures.LACKING, MIXED, True, {"update/weight"}),
        (1.0 + failures.LACKING, Schema((STATIC,)), True, "TF-510"),
        (1.0 + failures.LACKING, Schema((STATIC,)), False, set()),
        (5.0, MIXED, True, "TF-526"),
        (4.0 * failures.LACKING + 5.0, MIXED, True, "TF-526"),
        (5.0 * failures.LACKING, MIXED, True, "TF-526"),
        (-1.0, MIXED, True, "TF-526"),
        (1.0 - failures.LACKING, MIXED, True, "TF-526"),
        (2.0, MIXED, True, "TF-513"),
    ],
)
def test_numbers_of_records_that_a_silo_lacks_are_not_used(
    flags: float, fields: Schema, needed: bool, left: set[str] | str
) -> None:
    def nothing(*_: Any) -> Any:
        raise AssertionError("Expected no training.")

    phase = failures.attach(
        Phase("train", fields, nothing, nothing, nothing), job(min_sites=3), needed=needed
    )
    totals = {item.name: np.ones(item.shape) for item in fields.fields} | {failures.FAILED: np.array(flags)}
    cohort, state = Cohort(1, dict.fromkeys("abcd", 1.0), 1.0), ServerState({})
    if isinstance(left, str):
        with pytest.raises(RunError, match=rf"^{left}: "):
            phase.read(state, totals, cohort)
    else:
        assert set(phase.read(state, totals, cohort).totals) == left


@pytest.mark.parametrize(("withdraws", "code"), [(None, "TF-625"), (object(), "TF-523")])
def test_what_to_look_for_in_the_logs_is_of_the_jobs_kind(withdraws: Any, code: str) -> None:
    def nothing(*_: Any) -> Any:
        raise AssertionError("Expected no training.")

    of = job(min_sites=3).model_copy(update={"withdraw": withdraws})
    phase = failures.attach(Phase("train", Schema((STATIC,)), nothing, nothing, nothing), of)
    totals = {STATIC.name: np.ones(STATIC.shape), failures.FAILED: np.array(1.0 + failures.LACKING)}
    with pytest.raises(RunError) as caught:
        phase.read(ServerState({}), totals, Cohort(1, dict.fromkeys("abcd", 1.0), 1.0))
    assert [other in str(caught.value) for other in ("TF-625", "TF-523")] == [
        code == "TF-625",
        code == "TF-523",
    ]


@pytest.mark.parametrize("flag", [FLAG, FLAGGED], ids=["beside an update", "beside counts"])
def test_what_is_of_a_silos_records_alone_trains_nothing(flag: Field) -> None:
    """The difference of two totals of it, in one of which a silo's part is missing, is that part."""
    trained = [static(f"{prefix}of-one-run") for prefix in failures.TRAINED]
    numbers = [static("counts", 3, per_class=True), static("evaluation/steps")]
    fields = (*numbers, static("sums", 3, 4, per_class=True), *trained, flag)
    assert names(failures.of_records(Schema(fields))) == ["counts", "evaluation/steps", "sums"]
    assert names(failures.of_records(Schema((*fields, UPDATE)))) == ["counts", "evaluation/steps"]


def test_a_failed_silos_term_keeps_what_needs_no_training() -> None:
    made_of = [RECORDS, LOSSES, NORMALISER, "evaluation/steps", "statistics/values"]
    kept = [*map(static, made_of), static("counts", 3, per_class=True)]
    fields = (*kept, static("products", 3, products=2), static("step"))
    for schema, trains in ((Schema((*fields, FLAGGED)), False), (Schema((*fields, UPDATE, FLAG)), True)):
        made = {item.name: torch.ones(item.shape) for item in schema.fields if item.name != failures.FAILED}
        tensors = failures.without_update(schema, {}, made).tensors
        full = {name for name, tensor in tensors.items() if tensor.any()}
        assert full == {*names(tuple(kept)), failures.FAILED, *([] if trains else ["step"])}
        assert float(tensors[failures.FAILED]) == (1.0 + failures.LACKING if trains else 1.0)


@pytest.mark.parametrize("beside", [True, False], ids=["products", "no products"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_sums_of_features_that_a_failed_silo_lacks_are_random(beside: bool, value: float) -> None:
    """Those by class beside products are of the same records; alone they are of the received model."""
    products, sums = static("products", 8, products=2), static("sums", 2, 4, per_class=True)
    features = static("features", 2, 4, features=2)
    counts = static("counts", 2, per_class=True)
    schema = Schema((UPDATE, *([products] if beside else []), features, sums, counts, FLAG))
    made = {item.name: torch.full(item.shape, value, dtype=torch.float64) for item in schema.fields}
    made[failures.FAILED] = torch.tensor(1.0)
    term = codec.encode(schema, made, share=1.0, parties=4)
    blinded = failures.blinded(schema, term)
    before, after = (codec.unpack(schema, "static", item["static"]) for item in (term, blinded))
    random = {name for name in before if not np.array_equal(before[name], after[name])}
    expected = {"products", "features", "sums"} if beside else {"features"}
    assert random == (expected if value == 0.0 else set())


@pytest.mark.parametrize(
    ("total", "lacks"), [({}, False), ({failures.FAILED: 4.0}, False), ({failures.FAILED: 1025.0}, True)]
)
def test_one_silo_that_lacks_its_numbers_is_enough(total: dict[str, float], lacks: bool) -> None:
    assert failures.lacking({name: np.array(value) for name, value in total.items()}) == lacks


def test_which_errors_can_depend_on_records() -> None:
    told = [*TOLD, *(TightframeError("", code=code) for code in failures.TOLD)]
    assert all(map(failures.hidden, HIDDEN)) and not any(map(failures.hidden, told))


def test_what_stops_a_silo_is_told_although_the_rest_could_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check_moments", "note_moments"):
        monkeypatch.setattr(failures, name, lambda *_: None)
    calls = []

    def contribute(*_: Any) -> Contribution:
        calls.append(1)
        if len(calls) == 1:
            raise TOLD[0]
        return Contribution({})

    def nothing(*_: Any) -> Any:
        raise AssertionError("Expected no training.")

    silo: Any = SimpleNamespace(
        without_training=nullcontext, context=SimpleNamespace(name="site-1", log=logging.getLogger())
    )
    phase = failures.attach(Phase("train", MIXED, nothing, contribute, nothing), job())
    with pytest.raises(TightframeError) as caught:
        phase.contribute(silo, {}, {})
    assert caught.value is TOLD[0]
    assert set(phase.contribute(silo, {}, {}).tensors) == {failures.FAILED}


def test_what_training_does_not_touch_is_made_again_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(error: Exception | None, schema: Schema = MIXED) -> tuple[list[str], list[float]]:
        calls: list[str] = []

        def contribute(*_: Any) -> Contribution:
            calls.append("contribute")
            if error is not None:
                raise error
            return Contribution({"evaluation/steps": torch.tensor(3.0), "update/weight": torch.ones(2)})

        @contextmanager
        def without_training() -> Iterator[None]:
            calls.append("without training")
            yield

        def nothing(*_: Any) -> Any:
            raise AssertionError("Expected no training.")

        silo: Any = SimpleNamespace(without_training=without_training)
        made = failures.untrained(silo, Phase("train", schema, nothing, contribute, nothing), {}, {}).tensors
        assert not made["update/weight"].any()
        return calls, [float(made.get("evaluation/steps", 0.0)), float(made[failures.FAILED])]

    monkeypatch.setattr(class_rules, "own_classes", lambda *_: {"evaluation/steps": torch.tensor(4.0)})
    assert without(None) == (["without training", "contribute"], [3.0, 1.0])
    assert without(HIDDEN[0])[1] == [4.0, 1.0], "by the records alone"
    assert without(HIDDEN[0], Schema((UPDATE,))) == ([], [0.0, 1.0]), "there is nothing to make"
    with pytest.raises(TightframeError) as caught:
        without(TOLD[0])
    assert caught.value is TOLD[0]


def test_the_silos_log_has_where_what_nobody_expected_happened(caplog: pytest.LogCaptureFixture) -> None:
    context: Any = SimpleNamespace(name="site-1", log=logging.getLogger("tightframe.silo"))
    for error in (HIDDEN[0], HIDDEN[4]):
        failures.note(context, error)
    assert [record.exc_info is None for record in caplog.records] == [True, False]


def test_the_silos_log_has_an_errors_own_code() -> None:
    told = failures.reason(TrainingError("no room", code="TF-302"))
    assert told.startswith("TF-302 (") and told.endswith("): no room"), "the code is there once"
    assert failures.reason(RuntimeError("CUDA error")).startswith("TF-503 (")


@pytest.mark.parametrize("name", [name for name, (value, _) in OPTIONS.items() if value is not None])
def test_a_failed_silo_sends_all_numbers_of_its_records_whatever_the_option(name: str) -> None:
    """Otherwise it would cost all silos every static total of its round, its evaluation too.

    A new rider's field is either made without training (``failures._of_received``) or of it (``TRAINED``).
    """
    try:
        setup = prepare(test_release.job_with({**test_release.BASE.get(name, {}), name: OPTIONS[name][0]}))
    except JobError:
        return
    schemas = [phase.schema for exchange in setup.plan if exchange.training for phase in exchange.phases]
    for schema in schemas:
        kept = failures._kept_fields(schema)
        assert [item.name for item in failures.of_records(schema) if item not in kept] == []
