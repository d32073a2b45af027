"""A first round that a silo trains by itself: of every method, with privacy too, and without a trace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.attacks.malicious_server import HEART, Records, hearts, identity
from tests.support.ledgers import charges_in

from tightframe import methods
from tightframe.config.job import JobConfig, parse_job
from tightframe.config.site import SiteEntry
from tightframe.files import locked_folder
from tightframe.privacy.ledger.ledger import ledger_path
from tightframe.rounds.context import SiloContext
from tightframe.rounds.riders import failures
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo import rehearsal
from tightframe.rounds.silo.rehearsal import rehearse
from tightframe.rounds.silo.view import RequestedSum
from tightframe.rounds.state_files import REHEARSAL

NAMES = ("hospital-1", "hospital-2", "hospital-3", "hospital-4")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> dict[str, Records]:
    return hearts(4)


def rehearsed(job: JobConfig, data: dict[str, Records], folder: Path) -> tuple[dict[str, float], SiloContext]:
    context, setup = context_of(job, data, folder), prepare(job)
    return dict(rehearse(context, setup, CPU, RequestedSum(NAMES, 2), setup.initial_state())), context


def context_of(job: JobConfig, data: dict[str, Records], folder: Path) -> SiloContext:
    name = NAMES[0]
    context = SiloContext(
        name,
        job,
        SiteEntry(),
        folder,
        records=data[name],
        job_id="a",
        identity=lambda: identity(name),
        ledger_dir=folder / "l",
    )
    context.state_folder.mkdir(parents=True)
    return context


def job_of(method: str, **values: Any) -> JobConfig:
    own = {
        "method": method,
        "rounds": methods.get(method).rounds or 2,
        "training": {"epochs": 1, "momentum": 0.0},
    }
    return parse_job(
        {**HEART, "sites": list(NAMES), "min_sites": 4, "model_options": {"widths": [8]}, **own, **values}
    )


@pytest.mark.parametrize("method", [item.name for item in methods.METHODS])
def test_every_phase_of_a_first_round_is_timed_and_nothing_is_left(
    method: str, data: dict[str, Records], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "note", lambda context, error: pytest.fail(str(error)))
    job = job_of(method)
    seconds, context = rehearsed(job, data, tmp_path)
    plan = prepare(job).plan
    before = {f"{item.kind}-{item.index}" for item in plan.beginning()}
    assert set(seconds) == {str(index) for index in range(len(plan.round(1)))} | before
    assert all(value > 0 for value in seconds.values())
    assert not list(context.state_folder.iterdir())


@pytest.mark.parametrize("method", ["fedmr", "fedcgs"])
def test_with_privacy_nothing_is_charged(method: str, data: dict[str, Records], tmp_path: Path) -> None:
    private = {"epsilon": 60.0, "noise_multiplier": 2.0}
    job = job_of(method, privacy=private, weights="uniform", update_norm=None)
    seconds, context = rehearsed(job, data, tmp_path)
    plan = prepare(job).plan
    assert len(seconds) == len([*plan.beginning(), *plan.round(1)])
    assert not list(context.state_folder.iterdir())
    assert charges_in(ledger_path(tmp_path / "l", context.name)) == []


def test_only_what_a_killed_process_has_left_is_deleted(data: dict[str, Records], tmp_path: Path) -> None:
    job = job_of("fedavg")
    context = context_of(job, data, tmp_path)
    left, at_work = (context.state_folder / f"{REHEARSAL}{name}" for name in ("left", "at-work"))
    for folder in (left, at_work):
        folder.mkdir()
        (folder / "own.safetensors").write_bytes(b"of records")
    with locked_folder(at_work):
        rehearse(context, prepare(job), CPU, RequestedSum(NAMES, 2), prepare(job).initial_state())
        assert list(context.state_folder.iterdir()) == [at_work]


def test_a_process_limit_in_a_rehearsal_is_said_as_that(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError, match="no process left"), rehearsal._folder(tmp_path):
        raise BlockingIOError("no process left")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_deletes_before_it_is_locked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def mkdtemp(**given: Any) -> str:
        made.append(Path(tempfile.mkdtemp(**given)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr(rehearsal, "tempfile", SimpleNamespace(mkdtemp=mkdtemp))
    with rehearsal._folder(tmp_path) as folder:
        assert folder == made[1] and folder.is_dir()
