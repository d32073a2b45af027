"""Work on records of which others see how long it takes: what is measured, and what comes before it."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.rounds.test_frozen_encoder import REST, TRAIN, seen, silos, values
from tests.support.runs import asked, missed

from tightframe.config.job import parse_job
from tightframe.config.policy import PolicyBlock
from tightframe.config.site import SiteEntry
from tightframe.data.heart import HeartOptions
from tightframe.data.heart.twin import open_twin
from tightframe.errors import RunError
from tightframe.learning.few_records.products import COUNTED, ENOUGH, ROWS, Sizes
from tightframe.phases import ServerState
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.pace import Pace, Work
from tightframe.rounds.run_state import start_state, state_bytes
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo import contribute
from tightframe.rounds.silo.contribute import WITHDRAWAL, Contributor
from tightframe.rounds.silo.rehearsal import rehearse
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.common import Peers
from tightframe.securesum.messages import Total

__all__ = ["seen"]
NAME = "b"
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 1.0}
FROZEN: dict[str, Any] = {
    "summation": "secure",
    "model": "small_cnn",
    "model_options": {"widths": [8, 8]},
    "encoder": "frozen",
    "answer_grid": 0.0,
    "update_norm": 100.0,
}


def context_of(
    folder: Path, *, production: bool = True, policy: PolicyBlock | None = None, **changes: Any
) -> SiloContext:
    return SiloContext(
        NAME,
        parse_job(values(**changes)),
        SiteEntry(state_dir=str(folder), feature_cache="kept", policy=policy or PolicyBlock()),
        run_dir=folder / "run",
        records=silos()[NAME],
        production=production,
    )


def asked_late(
    setup: JobSetup, state: ServerState, kind: str = "train", index: int = 0
) -> tuple[Message, Total]:
    """Ask a silo for a term on a state that it missed, as what follows from a total without it."""
    exchange = setup.plan.find(kind, 2 if kind == "train" else 0, index)
    return asked(setup, exchange, state), missed(setup, exchange)


class Spy:
    """Notes which records are encoded before a silo is seen at work, and from which start it rehearses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoded: Counter[str]) -> None:
        self.before: list[int] = []
        self.starts: list[ServerState] = []
        working = Pace.working

        @contextmanager
        def spied(pace: Pace, *args: Any, **named: Any) -> Iterator[Work]:
            self.before.append(encoded["records"])
            with working(pace, *args, **named) as work:
                yield work

        def rehearsed(*args: Any) -> Any:
            self.starts.append(args[-1])
            return rehearse(*args)

        monkeypatch.setattr(Pace, "working", spied)
        monkeypatch.setattr(contribute, "rehearse", rehearsed)


@pytest.fixture
def spy(seen: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch, seen)


def named_start() -> bytes:
    """Weights that a job names: those of an untrained network, moved."""
    drawn = prepare(values(**{**FROZEN, "encoder": "random"})).initial_state().model
    return save({name: value * 1.5 + 0.01 for name, value in drawn.items()})


@pytest.mark.parametrize("fails", [False, True])
def test_features_come_before_it_and_a_rehearsal_begins_with_the_named_start(
    tmp_path: Path, spy: Spy, seen: Counter[str], fails: bool
) -> None:
    """Whatever state a silo is sent, and however far its work gets: every record is encoded once before."""
    weights = named_start()
    context = context_of(tmp_path, **FROZEN, initial_model_sha256=hashlib.sha256(weights).hexdigest())
    silo = Contributor(context)
    start = start_state(silo.setup, weights)[0]
    factor = float("nan") if fails else 2.0
    model = {
        name: value * factor if name.startswith("head") else value for name, value in start.model.items()
    }
    message, total = asked_late(silo.setup, ServerState(model))
    silo.contribute(message | {"start": weights}, Peers(WEIGHTS), total=total)
    every = TRAIN + 2 * REST
    assert spy.before == [every] and seen["records"] == every
    assert [state_bytes(item) for item in spy.starts] == [state_bytes(start)]
    kept = sorted(path.name.split("-")[0] for path in tmp_path.rglob("features/**/*.safetensors"))
    assert kept == ["test", "train", "validation"], "by one encoder, the job's"
    assert not context.pace.lacks("0") and context.pace.floor > 0


def test_a_rehearsal_stores_no_features_of_its_own(tmp_path: Path, spy: Spy) -> None:
    """The pooled moments that a standardising model has in a rehearsal are of this silo's records alone."""
    options = {"model": "mlp", "model_options": {"widths": [8], "standardise": True}, "encoder": "random"}
    hearts = {"dataset": "fed_heart_disease", "dataset_options": {}}
    context = context_of(tmp_path, **{**FROZEN, **options, **hearts})
    context.records = open_twin(0, HeartOptions())
    silo = Contributor(context)
    message, total = asked_late(silo.setup, silo.setup.initial_state())
    silo.contribute(message, Peers(WEIGHTS), total=total)
    assert len(spy.starts) == 1
    assert len(list(tmp_path.rglob("features/**/*.safetensors"))) == 3


def test_what_comes_before_the_rounds_has_a_floor_too(tmp_path: Path, spy: Spy) -> None:
    """Which classes a server says that others hold decides how many records a silo sums."""
    policy = PolicyBlock(minimum_cohort=1)  # a start takes four hospitals
    context = context_of(tmp_path, policy=policy, **{**FROZEN, "encoder": "random", "start": "fed3r"})
    silo = Contributor(context)
    assert [item.kind for item in silo.setup.plan.beginning()] == ["before"] * 4
    assert context.pace.lacks("before-2")
    start = silo.setup.initial_state()
    keys = (COUNTED, ROWS, ENOUGH)
    enough = {key: torch.full((8,), 1e6, dtype=torch.float64) for key in keys}
    counted = start.evolve(extra={**start.extra, **enough})
    message, total = asked_late(silo.setup, counted, "before", 2)
    silo.contribute(message, Peers(WEIGHTS, sizes=Sizes(1e6, 0.0)), total=total)
    assert len(spy.starts) == 1 and not context.pace.lacks("before-2") and context.pace.floor > 0


def test_a_withdrawal_that_did_not_begin_with_this_silo_is_refused(tmp_path: Path) -> None:
    context = context_of(tmp_path, **{**FROZEN, "encoder": "random"})
    silo = Contributor(context)
    view = silo._silo(silo.setup.plan.round(1)[0], {}, Peers(WEIGHTS), ServerState({}))
    with pytest.raises(RunError, match=r"^TF-523: .*first exchange of the withdrawal"):
        silo._measure(WITHDRAWAL, view, {})
    with context.pace.working("0/before-0/0", WITHDRAWAL, known=True) as work:
        work.whole = True
    silo._measure(WITHDRAWAL, view, {})


@pytest.mark.parametrize(
    ("production", "grid", "summation", "held"),
    [
        (True, 0.0, "secure", True),
        (True, None, "secure", True),
        (False, 0.5, "secure", True),
        (False, None, "secure", False),
        (True, None, "plain", False),
    ],
)
def test_where_answers_are_held_back(
    tmp_path: Path, production: bool, grid: float | None, summation: str, held: bool
) -> None:
    changes = {**FROZEN, "encoder": "random", "answer_grid": grid, "summation": summation}
    assert context_of(tmp_path, production=production, **changes).pace.on == held


def test_work_goes_on_where_numbers_next_to_zero_count_as_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path, **{**FROZEN, "encoder": "random", "threads": 2})
    silo, found = Contributor(context), []
    small = torch.full((1 << 20,), 1e-40)
    term = Contributor._term

    def looked(*args: Any) -> Any:
        found.append(int(((small * 1.0).view(torch.int32) != 0).sum()))
        return term(*args)

    monkeypatch.setattr(Contributor, "_term", looked)
    assert int(((small * 1.0).view(torch.int32) != 0).sum()) == len(small)
    silo.contribute(asked(silo.setup, silo.setup.plan.round(1)[0]), Peers(WEIGHTS))
    assert found == [0]


def test_an_aborted_run_waits_for_a_whole_second_and_not_for_the_grid(tmp_path: Path) -> None:
    aborted = threading.Event()
    context = context_of(tmp_path, **{**FROZEN, "encoder": "random", "answer_grid": 60.0})
    session = SiloSession(replace(context, stopped=aborted.is_set, log=logging.getLogger("test")))
    threading.Timer(0.2, aborted.set).start()
    started = time.monotonic()
    session._wait(started)
    assert 0.99 <= time.monotonic() - started < 2.0
