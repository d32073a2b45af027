"""What fails at a silo while it trains is a term like any other: it changes nothing, and carries a flag."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.runs import FOUR, asked, job, missed, run

from tightframe.errors import ContributionError, DataError, RunError, TightframeError, TrainingError
from tightframe.learning.model_update import BROADCAST, BUFFER
from tightframe.phases import Cohort, Field, Phase, Schema, ServerState
from tightframe.privacy.accounting import BudgetError
from tightframe.rounds import codec
from tightframe.rounds.context import SiloContext
from tightframe.rounds.plan import advance
from tightframe.rounds.riders import evaluation, failures
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
    with pytest.raises(RunError) as caught:
        run(job(rounds=1), tmp_path / "two")
    assert caught.value.code == "TF-513"


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


def test_with_privacy_a_failed_silos_term_has_no_flag() -> None:
    """The schema has none, and no field but the schema's is in a term."""
    fields = (Field("update/weight", (2,)), Field(failures.FAILED, (), static=True))
    for schema in (Schema(fields[:1]), Schema(fields)):
        made = failures.neutral(schema, {}).tensors
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


FLAG = Field(failures.FAILED, (), bound=1.0 + failures.LACKING, bits=0)
STATIC = Field("evaluation/steps", (), static=True)
MIXED = Schema((Field("update/weight", (2,)), STATIC, Field("buffer/mean", (2,), static=True)))


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
        with pytest.raises(RunError) as caught:
            phase.read(state, totals, cohort)
        assert caught.value.code == left
    else:
        assert set(phase.read(state, totals, cohort).totals) == left


def test_the_silos_log_has_an_errors_own_code() -> None:
    assert failures.reason(TrainingError("not finite", code="TF-301")).startswith("TF-301 (")
    assert failures.reason(RuntimeError("CUDA error")).startswith("TF-503 (")
