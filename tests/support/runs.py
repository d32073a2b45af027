"""Small secure runs in this process, with a transport that can lose, alter and record messages."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.jobs import HEART, SMALL

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry, open_data
from tightframe.data.arrays import ArrayData
from tightframe.data.base import SiloData
from tightframe.errors import LATE
from tightframe.phases import Fold, ServerState
from tightframe.report import writing
from tightframe.rounds import context
from tightframe.rounds.context import Message, SiloContext
from tightframe.rounds.plan import Exchange
from tightframe.rounds.run_state import state_bytes, state_sha256
from tightframe.rounds.server.coordinator import Coordinator, Result
from tightframe.rounds.setup import JobSetup, prepare
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.common import Accept
from tightframe.rounds.sums.simulated_identity import simulated_anchor, simulated_identity
from tightframe.rounds.sums.transcripts import ServerIdentity
from tightframe.securesum.messages import SumId, Total

FOLDS: tuple[Fold, ...] = ("train", "validation", "test")
FOUR = ["site-1", "site-2", "site-3", "site-4"]
JOB_ID = "a-run"


def missed(setup: JobSetup, exchange: Exchange, slot: int = 0) -> Total:
    """Return a total without the silo that is asked, which therefore takes over the state sent with it.

    Args:
        setup: of the job.
        exchange: that the silo is asked for; the total is that of the one before it in the plan.
        slot: of the total.
    """
    places = [item.place for item in setup.plan]
    before = places[: places.index(exchange.place)][-1]
    return Total(slot, SumId.of(*before, 0), "a schema", ("another silo",), {}, bytes(32))


def asked(setup: JobSetup, exchange: Exchange, state: ServerState | None = None, **values: Any) -> Message:
    """Return a request for a silo's term in an exchange, with the state of the run that it rests on.

    Args:
        setup: of the job.
        exchange: of its plan.
        state: sent with the request; by default the one that the run starts with, which is not sent.
        values: further keys, or other values.
    """
    message: Message = {
        "kind": exchange.kind,
        "round": exchange.round,
        "phase": exchange.index,
        "attempt": 0,
        "opened": {},
        "state": state_sha256(setup.initial_state() if state is None else state),
        "before": "" if state is None else "0" * 64,
        "total": b"",
    }
    if state is not None:
        message["state_bytes"] = state_bytes(state)
    return message | values


@dataclass
class Wire(federation.LocalTransport):
    """``LocalTransport`` with a hand on the line.

    Attributes:
        sessions: the silos.
        silent: whether a silo does not answer a task (given its request).
        change: alters a request on its way to a silo.
        fresh: makes a silo's session anew for each task, as the simulator's processes are.
        seen: every (task, site, request, answer).
    """

    sessions: dict[str, SiloSession]
    silent: Callable[[str, str, Message], bool] = lambda task, site, request: False
    change: Callable[[str, str, Message], Message] = lambda task, site, request: request
    fresh: Callable[[str], SiloSession] | None = None
    seen: list[tuple[str, str, Message, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.sessions, logging.getLogger("tests"))

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        lost = {site: LATE for site, request in requests.items() if self.silent(task, site, request)}
        asked = {
            site: self.change(task, site, copy.deepcopy(request))
            for site, request in requests.items()
            if site not in lost
        }
        if self.fresh is not None:
            self.sessions.update({site: self.fresh(site) for site in asked})

        def take(site: str, answer: Message) -> None:
            self.seen.append((task, site, asked[site], answer))
            accept(site, answer)

        return {**lost, **super().exchange(task, asked, take)}


def job(**changes: Any) -> JobConfig:
    """A job of four silos, FedMR, two rounds, secure sums."""
    base = {"method": "fedmr", "sites": FOUR, "min_sites": 3, "rounds": 2, "summation": "secure"}
    return parse_job({**SMALL, **base, **changes})


class Few:
    """Every fifth record of a silo's twin, rendered once for all tests."""

    def __init__(self, whole: SiloData) -> None:
        self.synthetic, self.source = whole.synthetic, whole.source
        self._labels = {fold: whole.labels(fold)[::5] for fold in FOLDS}
        self._items: dict[Fold, list[Any]] = {}
        for fold in FOLDS:
            records = whole.records(fold)
            self._items[fold] = [records[i] for i in range(0, len(whole.labels(fold)), 5)]

    def labels(self, fold: Fold) -> Any:
        return self._labels[fold]

    def records(self, fold: Fold, *, augment_seed: int | None = None) -> Any:
        return self._items[fold]

    def check(self, progress: Any = None) -> None:
        """Nothing can be missing."""


@contextmanager
def few_twins() -> Iterator[None]:
    """Within, silos that are named have every fifth record of their pictures' twins."""
    opened = dict[tuple[str, str], Few]()

    def few(of: JobConfig, site: str, entry: SiteEntry | None) -> Any:
        if of.dataset != SMALL["dataset"] or (entry is not None and entry.data):
            return open_data(of, site, entry)
        key = site, repr(of.dataset_options)
        if key not in opened:
            opened[key] = Few(open_data(of, site, entry))
        return opened[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "open_data", few)
        yield


@functools.cache
def twin(site: str) -> Few:
    """A silo's few records at 16 px."""
    return Few(open_data(job(), site, None))


@functools.cache
def heart(site: str) -> ArrayData:
    """Every fifth record of a silo's heart disease twin."""
    whole, parts = open_data(parse_job({**HEART, "sites": FOUR}), site, None), dict[Fold, Any]()
    for fold in FOLDS:
        records: Any = whole.records(fold)
        chosen = range(0, len(whole.labels(fold)), 5)
        parts[fold] = np.stack([np.asarray(records[i][0]) for i in chosen]), whole.labels(fold)[::5]
    return ArrayData(parts, source="a fifth", num_classes=2)


def contexts(
    of: JobConfig,
    folder: Path,
    *,
    entries: Mapping[str, SiteEntry] | None = None,
    **changes: Any,
) -> dict[str, SiloContext]:
    return {
        site: SiloContext(
            site,
            of,
            (entries or {}).get(site),
            folder / site,
            records=twin(site),
            job_id=JOB_ID,
            identity=partial(simulated_identity, JOB_ID, site, production=False),
            write_page=writing.leave,
            **changes,
        )
        for site in of.roster
    }


def coordinator(of: JobConfig, folder: Path, *, job_id: str = JOB_ID) -> Coordinator:
    """The server's half; all silos have certificates under the root of ``JOB_ID``."""
    anchor = simulated_anchor(JOB_ID, production=False)
    identity = ServerIdentity(job_id, anchor, simulated=True, root_of=JOB_ID)
    return Coordinator(prepare(of), folder / "server", identity=identity, write_page=writing.leave)


def run(of: JobConfig, folder: Path, **wire: Any) -> tuple[Result, Wire]:
    """A whole run over a wire."""
    sessions = {site: SiloSession(context) for site, context in contexts(of, folder).items()}
    line = Wire(sessions, **wire)
    return coordinator(of, folder).run(line), line


def in_round(message: Message, number: int) -> bool:
    return message.get("kind") == "train" and message.get("round") == number
