"""One simulation at a time in a workspace; what an earlier run has left is kept; a replaced run says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightframe.errors import RunError, WorkspaceError
from tightframe.flare.simulation import workspace
from tightframe.flare.simulation.workspace import RESULTS, AtWork, Lock, Run, check_run, hold, keep_results

HOLDER = """
import sys, time
from pathlib import Path
from tightframe.flare.simulation.workspace import hold
with hold(Path(sys.argv[1]), "their_job"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (workspace.HELD, workspace.RUN, workspace.AT_WORK):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def finished(folder: Path, text: str = "{}", *, at: float | None = None) -> None:
    """A run's results in a workspace."""
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    (folder / "site-1").mkdir(exist_ok=True)
    (folder / "local").mkdir(exist_ok=True)
    outcome = folder / RESULTS / "outcome.json"
    outcome.write_text(text)
    if at is not None:
        os.utime(outcome, (at, at))


def test_a_held_workspace_names_its_holder_and_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    there = tmp_path / "ws"
    command = [sys.executable, "-c", HOLDER, str(there)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(WorkspaceError, match=f"their_job, started 20.*, process {process.pid}") as caught:
            hold(there, "ours").__enter__()
        assert caught.value.code == "TF-103" and "--workspace" in str(caught.value)
        process.send_signal(signal.SIGKILL)
    with hold(there, "ours"):
        assert not Lock(there, "another").take()
        with hold(there, "ours"):  # its own processes are asked nothing
            pass
    assert Lock(there, "another").take()


def test_an_earlier_run_is_kept_and_the_oldest_beyond_the_bound_removed(tmp_path: Path) -> None:
    there = tmp_path / "ws"
    (there / "local").mkdir(parents=True)
    (there / "local" / "tightframe.json").write_text("mine")
    assert keep_results(there) == (None, [])
    kept = []
    for number in range(3):
        finished(there, f'{{"run": {number}}}', at=1_700_000_000 + 60 * number)
        folder, removed = keep_results(there, most=2)
        assert (
            folder is not None and (folder / RESULTS / "outcome.json").read_text() == f'{{"run": {number}}}'
        )
        assert (folder / "site-1").is_dir() and folder.parent == tmp_path / "ws.runs"
        assert removed == ([] if number < 2 else kept[:1])
        kept.append(folder)
    assert [path.exists() for path in kept] == [False, True, True]
    assert sorted(path.name for path in there.iterdir()) == ["local"]
    finished(there)
    assert keep_results(there, most=0) == (None, []) and (there / RESULTS).is_dir()


def test_runs_that_left_nothing_are_removed_before_a_trained_one(tmp_path: Path) -> None:
    there = tmp_path / "ws"
    trained, failed = '{"trained": true}', '{"trained": false}'
    texts = [trained, failed, failed, "broken", failed, trained, trained]
    kept = []
    for number, text in enumerate(texts):
        finished(there, text, at=1_700_000_000 + 60 * number)
        if number == 2:
            (there / RESULTS / "checkpoint.safetensors").touch()
        kept.append(keep_results(there, most=4)[0])
    there_still = [number for number, path in enumerate(kept) if path is not None and path.exists()]
    assert there_still == [2, 3, 5, 6], "those without a round first, then the oldest"


def test_two_runs_of_one_second_are_both_kept(tmp_path: Path) -> None:
    folders = set()
    for _ in range(2):
        finished(tmp_path / "ws", at=1_700_000_000)
        folders.add(keep_results(tmp_path / "ws")[0])
    assert len(folders) == 2 and all(path is not None and path.is_dir() for path in folders)


def test_a_run_whose_workspace_was_replaced_says_so_at_server_and_silo(tmp_path: Path) -> None:
    first = Run(tmp_path / "ws", "first")
    first.check()
    check_run()  # what a silo's process looks at
    second_mark = tmp_path / "ws" / "server" / ".tightframe_run"
    second_mark.write_text("of another run")
    for look in (first.check, check_run):
        with pytest.raises(RunError, match=r"^TF-104: .*replaced this run's workspace"):
            look()
    second_mark.unlink()
    with pytest.raises(RunError, match="TF-104"):
        first.check()
    first.end()
    check_run()  # nothing is looked at outside of simulations


def test_a_plain_simulation_holds_its_workspace_from_inside(tmp_path: Path) -> None:
    run = Run(tmp_path / "ws", "plain")
    with pytest.raises(WorkspaceError, match=f"job plain, .* process {os.getpid()}"):
        hold(tmp_path / "ws", "ours").__enter__()
    run.end()
    with hold(tmp_path / "ws", "ours"):
        inside = Run(tmp_path / "ws", "ours")  # of the holder itself
        inside.check()
        inside.end()


def test_a_silo_says_how_far_it_is_only_where_somebody_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AtWork("site-1")("training", 1, 2)
    monkeypatch.setenv(workspace.AT_WORK, str(tmp_path))
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    told = AtWork("site-1")
    told("training", 1, 2)
    told("training", 2, 2)  # too soon
    from tightframe_app.jobs import at_work

    assert at_work.read(tmp_path) == {"site-1": {"what": "training", "done": 1, "of": 2}}
    assert at_work.plain(at_work.read(tmp_path)) == "at work: site-1: training, batch 1 of 2"
    (tmp_path / "site-2.json").write_text("cut off")
    told.end()
    assert at_work.read(tmp_path) == {} and at_work.plain({}) == ""
