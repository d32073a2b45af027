"""Runs killed at a write: what left a silo is charged for ever, a resumed run ends as the unbroken one."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.jobs import HEART
from tests.support.ledgers import charges_in
from tests.support.runs import FOUR, JOB_ID, Wire, coordinator, heart

from tightframe import federation
from tightframe.config.job import JobConfig, parse_job
from tightframe.privacy import accounting
from tightframe.privacy.training import portions
from tightframe.results.files import CHECKPOINT
from tightframe.rounds.context import SiloContext
from tightframe.rounds.server import resume
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums.simulated_identity import simulated_identity

JOB = parse_job({**HEART, "method": "scaffold", "rounds": 2})
PRIVATE: dict[str, Any] = {
    "model_options": {"widths": [4]},
    "sites": FOUR,
    "rounds": 2,
    "weights": "uniform",
    "training": {**HEART["training"], "batch_size": 512},
    "privacy": {"epsilon": 20.0, "noise_multiplier": 1.5},
}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without what takes a second a silo and is tested elsewhere."""
    monkeypatch.setattr(accounting, "_prv", lambda *_: None)
    monkeypatch.setattr(portions, "check_per_record", lambda *_, **__: None)
    caplog.set_level(logging.CRITICAL)


@contextmanager
def writes(at: Callable[[int], None]) -> Iterator[None]:
    """Call ``at`` with its number before a file is made to last, gets a name, or loses one."""
    number = 0
    names = ("fsync", "replace", "link", "unlink")
    true = {name: getattr(os, name) for name in names}

    def counted(name: str, *given: Any, **named: Any) -> Any:
        nonlocal number
        number += 1
        at(number)
        return true[name](*given, **named)

    with pytest.MonkeyPatch.context() as patched:
        for name in names:
            patched.setattr(os, name, partial(counted, name))
        yield


def run_job(wanted: JobConfig, **named: Any) -> federation.Result:
    return federation.run_job(wanted, data={site: heart(site) for site in wanted.roster}, **named)


def count(run: Callable[[], object]) -> int:
    """Return how many writes a run makes."""
    seen = [0]
    with writes(seen.append):
        run()
    return seen[-1]


def die_at(number: int, run: Callable[[], object]) -> None:
    """Run in a process of its own, with server and silos, which is killed before its write of this number."""

    def die(now: int) -> None:
        if now == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        try:
            with writes(die):
                run()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def spread(whole: int, points: int) -> list[int]:
    """Return numbers from 1 to ``whole``, evenly spread."""
    return [1 + whole * place // points for place in range(points)]


@pytest.mark.whole
def test_a_run_killed_at_any_write_goes_on_as_the_unbroken_one(tmp_path: Path) -> None:
    results = []
    total = count(lambda: results.append(run_job(JOB, folder=tmp_path / "whole")))
    (whole,) = results
    resumed = 0
    for number in spread(total, 3):
        broken = tmp_path / str(number)
        die_at(number, partial(run_job, JOB, folder=broken))
        stored, job, stopped = broken / "server" / CHECKPOINT, JOB, None
        if stored.exists():
            job, stopped, resumed = resume.next_job(stored), broken, resumed + 1
        found = run_job(job, folder=tmp_path / f"{number}-again", stopped=stopped)
        for one, other in ((found.state.model, whole.state.model), (found.state.extra, whole.state.extra)):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert 0 < resumed < 3, "some are begun anew"


@pytest.mark.whole
def test_what_left_a_silo_before_it_was_killed_is_charged_for_ever(tmp_path: Path) -> None:
    job = parse_job({**HEART, **PRIVATE})
    data = {site: heart(site) for site in FOUR}

    def run(folder: Path, name: str, sent: int | None = None) -> None:
        def session(site: str) -> SiloSession:
            places = {"ledger_dir": folder / "ledgers", "journal_dir": folder / "ledgers" / site}
            identity = partial(simulated_identity, JOB_ID, site, production=False)
            place, records = folder / name / site, data[site]
            return SiloSession(
                SiloContext(site, job, None, place, records=records, job_id=name, identity=identity, **places)
            )

        class Tells(Wire):
            def exchange(self, task: str, requests: Any, accept: Any) -> Any:
                def tell(site: str, answer: Any) -> None:
                    if sent is not None and task == "contribute" and requests[site]["kind"] == "train":
                        os.write(sent, f"{site} {requests[site]['round']}\n".encode())
                    accept(site, answer)

                return super().exchange(task, requests, tell)

        coordinator(job, folder / name, job_id=name).run(Tells({site: session(site) for site in FOUR}))

    def charged(folder: Path) -> list[tuple[str, str, str]]:
        every = {site: folder / "ledgers" / "privacy" / site / "ledger.sqlite" for site in FOUR}
        found = {site: charges_in(path) for site, path in every.items() if path.exists()}
        return [(site, item.job_id, item.purpose) for site, items in found.items() for item in items]

    total, left = count(partial(run, tmp_path / "whole", JOB_ID)), 0
    for number in spread(total, 3)[1:]:
        folder = tmp_path / str(number)
        read, sent = os.pipe()
        die_at(number, partial(run, folder, JOB_ID, sent))
        os.close(sent)
        with os.fdopen(read) as stream:
            terms = [line.split() for line in stream]
        before = charged(folder)
        assert {(site, JOB_ID, f"round {done} training") for site, done in terms} <= set(before)
        left += len(terms)
        run(folder, "anew")
        after = charged(folder)
        assert [item for item in after if item[1] == JOB_ID] == before
        assert sum(item[1] == "anew" for item in after) == 4 * 3, "two trainings and the class sums"
    assert left, "some terms had left"
