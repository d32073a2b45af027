"""The soak's parts without the engine: what it plans, measures and concludes, and that each leak fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MEMORY = ("rss", "private", "in_use", "objects")
SILOS = ("server", "site-1")
KEPT = 30_000_000
PLAIN = {"rss": 1000, "private": 700, "in_use": 600, "objects": 10, "timers": 0, "workers": 0, "pid": 1}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in (BENCHMARKS.parent, BENCHMARKS):  # the first is for a process that a test starts
        monkeypatch.syspath_prepend(str(folder))
    import soak

    return soak


@pytest.fixture
def verdict(benchmark: ModuleType) -> ModuleType:
    return sys.modules["soak_verdict"]


@pytest.fixture
def parts(benchmark: ModuleType) -> ModuleType:
    return sys.modules["soak_parts"]


def _series(verdict: ModuleType, **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """Rounds 5 to 10 of two processes, nothing of which changes; but for one in the last three."""
    whole = {**PLAIN, **dict.fromkeys(verdict.COUNTED, 3)}
    series = {name: [{"after": number, **whole} for number in range(5, 11)] for name in SILOS}
    for sample in series["site-1"][-3:]:
        sample |= changes
    return series


def _failed(verdict: ModuleType, series: dict[str, Any]) -> list[bool | None]:
    return [item.passed for item in verdict.findings(series, SILOS, 5, 10, 0.05)]


def test_what_stays_the_same_passes(verdict: ModuleType) -> None:
    assert _failed(verdict, _series(verdict)) == [True, True, True]
    assert _failed(verdict, _series(verdict, rss=1050, objects=99, timers=99, workers=99)) == [
        True,
        True,
        True,
    ]


def test_memory_that_grows_fails_and_is_named(verdict: ModuleType) -> None:
    series = _series(verdict, rss=1051)
    assert _failed(verdict, series) == [False, True, True]
    assert "+5.1% (site-1)" in verdict.findings(series, SILOS, 5, 10, 0.05)[0].told


def test_what_comes_and_goes_passes(verdict: ModuleType) -> None:
    series = _series(verdict)
    series["site-1"][-1] |= {"rss": 1200, "threads": 5, "files": 4}
    assert _failed(verdict, series) == [True, True, True]


@pytest.mark.parametrize(
    "key", ["files", "sockets", "others", "ports", "threads", "pools", "overdue", "children", "written"]
)
def test_one_more_of_anything_fails_and_is_named(verdict: ModuleType, key: str) -> None:
    series = _series(verdict, **{key: 4})
    assert _failed(verdict, series) == [True, False, True]
    assert f"site-1 {key} 3 to 4" in verdict.findings(series, SILOS, 5, 10, 0.05)[1].told
    assert key in verdict.COUNTED and len(verdict.COUNTED) == 9


def test_another_process_in_a_silos_place_fails(verdict: ModuleType) -> None:
    assert _failed(verdict, _series(verdict, pid=2)) == [True, True, False]


def test_what_was_not_measured_does_not_pass(verdict: ModuleType) -> None:
    series = _series(verdict)
    del series["site-1"][-1]
    assert _failed(verdict, series) == [None, None, None]
    assert "not measured" in verdict.table(series, 5, 10).splitlines()[-1]
    del series["site-1"]
    assert _failed(verdict, series) == [None, None, None]


def test_a_plan_has_one_fault_a_round_at_most_and_every_kind(verdict: ModuleType) -> None:
    sites = ["a", "b", "c"]
    faults = verdict.plan(7, 51, sites, 0.6, 40)
    rounds = [fault.round for fault in faults]
    assert len(rounds) == 30 == len(set(rounds)) and min(rounds) > 1 and max(rounds) <= 51
    kinds = Counter(fault.kind for fault in faults)
    quick = {"pause": 6, "raise": 6, "nan": 6, "lost": 6}
    assert kinds == {**quick, "late": 3, "freeze": 3} and set(kinds) == {"pause", *verdict.CODES}
    assert {fault.site for fault in faults} == set(sites)
    for fault in faults:
        assert (fault.seconds > 40) == (fault.kind in ("late", "freeze"))
    assert faults == verdict.plan(7, 51, sites, 0.6, 40) != verdict.plan(8, 51, sites, 0.6, 40)


def test_rounds_are_held_against_the_plan(verdict: ModuleType) -> None:
    late = verdict.Fault(2, "site-1", "contribute", "late", 42.0)
    unseen = [
        verdict.Fault(1, "site-1", "reveal", "late", 42.0),
        verdict.Fault(3, "b", "contribute", "pause", 1),
    ]
    drops: list[dict[str, str]] = [{}, {"site-1": "TF-502"}, {}]
    rows = [{"kind": "train", "round": number, "dropped": drop} for number, drop in enumerate(drops, 1)]
    assert verdict.as_planned(rows, [late, *unseen], 3).passed
    assert not verdict.as_planned(rows, unseen, 3).passed, "somebody is missing of whom the plan says nothing"
    assert not verdict.as_planned(rows[:2], [late], 3).passed, "a round is missing"
    rows[1]["dropped"] = {"site-1": "TF-503"}
    found = verdict.as_planned(rows, [late], 3)
    assert not found.passed and "round 2" in found.told


def test_whatever_is_left_behind_fails(verdict: ModuleType) -> None:
    assert [item.passed for item in verdict.left_behind([], [])] == [True, True]
    assert [item.passed for item in verdict.left_behind(["7 python, ports 8002"], [])] == [False, True]
    assert [item.passed for item in verdict.left_behind([], ["pymp-1"])] == [True, False]


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own: tests of the engine leave timers behind in theirs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _before_and_during(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    import soak_parts

    before = soak_parts.numbers(folder)
    stop = threading.Event()
    waiting = threading.Thread(target=stop.wait)
    timer = threading.Timer(60, print)
    with (
        (folder / "one").open("w"),
        # A process has one of these from its first error on; a second one is a leak.
        (folder / "error_log.txt").open("w"),
        (folder / "error_log.txt").open("a"),
        socket.create_server(("127.0.0.1", 0)),
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(2):
            pool.submit(stop.wait)
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        waiting.start()
        timer.start()
        kept = os.urandom(KEPT)
        during = soak_parts.numbers(folder)
        assert child.stdin is not None
        child.communicate()
        stop.set()
        timer.cancel()
        waiting.join()
        timer.join()
    assert len(kept) == KEPT
    return before, during


def test_a_process_counts_what_it_holds(parts: ModuleType, tmp_path: Path) -> None:
    before, during = _alone(_before_and_during, tmp_path)
    for key in ("rss", "private", "in_use"):
        assert 0.9 * KEPT < during[key] - before[key] < 2 * KEPT, key
    more = {key: during[key] - before[key] for key in before if key not in MEMORY}
    assert more == {
        "files": 2,
        "sockets": 1,
        "others": 1,  # the pipe to the child
        "ports": 1,
        "threads": 1,
        "timers": 1,
        "workers": 2,
        "pools": 1,
        "children": 1,
        "written": 1,
    }


def _overdue(folder: Path) -> list[int]:
    import soak_parts

    probe = soak_parts.Probe("site-1", folder, folder, [])
    timer = threading.Timer(60, print)
    timer.start()
    try:
        found = [probe._overdue(now) for now in (0.0, 89.0, 91.0)]
    finally:
        timer.cancel()
        timer.join()
    return [*found, probe._overdue(100.0)]


def test_a_timer_is_overdue_when_it_has_been_there_too_long(parts: ModuleType, tmp_path: Path) -> None:
    assert _alone(_overdue, tmp_path) == [0, 0, 1, 0]


def test_a_round_is_noted_once(parts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / parts.SAMPLES).mkdir()
    probe = parts.Probe("site-1", tmp_path, tmp_path, [])
    for message in (
        {"kind": "train", "round": 1},
        {"kind": "train", "round": 1},
        {"kind": "statistics", "round": 0},
        {"kind": "closing", "round": 8},
    ):
        probe.contribute(message, 8)
    lines = (tmp_path / parts.SAMPLES / "site-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["after"] for line in lines] == [0, 8]
    assert all(json.loads(line)["pid"] == os.getpid() for line in lines)


@pytest.fixture
def run(benchmark: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """A run whose engine is a process that waits for its end, and leaves another one behind."""
    made = benchmark.Run(tmp_path / "run")
    environment = os.environ | {benchmark.MARK: made._mark}
    script = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True); input()"
    made._engine = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    yield made
    made.stop()
    made._engine.stdin.close()


def test_a_process_that_outlives_the_run_is_found_and_ended(
    benchmark: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "GRACE_SECONDS", 0.5)
    assert _soon(lambda: len(run.processes()) == 2)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        run._engine.communicate(b"\n")
        (told,) = run.left()
        assert told.endswith(" sleep")
        assert _soon(lambda: not run.processes()) and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_is_stopped_for_as_long_as_it_asks(
    run: Any, parts: ModuleType, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=lambda: now[0]))
    process = psutil.Process(run._engine.pid)
    asked = run._folder / parts.PAUSES / "site-1"
    asked.write_text(json.dumps([process.pid, 0.3]))
    run._pause()
    assert not asked.exists() and _soon(lambda: process.status() == psutil.STATUS_STOPPED)
    now[0] += 0.29
    run._pause()
    assert process.status() == psutil.STATUS_STOPPED, "its time is not over"
    now[0] += 0.02
    run._pause()
    assert _soon(lambda: process.status() != psutil.STATUS_STOPPED)


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1), (None, 1)])
def test_the_exit_code_tells(
    benchmark: ModuleType,
    verdict: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    passed: bool | None,
    code: int,
) -> None:
    report = {"machine": "", "samples": _series(verdict), "faults": [], "traced": {}}
    found = [verdict.Finding("one", True, ""), verdict.Finding("two", passed, "")]
    monkeypatch.setattr(benchmark, "measure", lambda args, folder: (report, found))
    monkeypatch.setattr(sys, "argv", ["soak.py", "--rounds", "10", "--out", str(tmp_path / "soak.json")])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == code
    assert (tmp_path / "soak.json").is_file() and (tmp_path / "soak.png").stat().st_size > 1000
    assert "two" in capsys.readouterr().out


def _soon(happens: Any) -> bool:
    until = time.monotonic() + 60
    while not happens() and time.monotonic() < until:
        time.sleep(0.05)
    return bool(happens())
