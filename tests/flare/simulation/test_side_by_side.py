"""A simulation without a number of threads runs all silos at once; with one, as many as were asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.private.fed.app.simulator import simulator_runner

from tightframe.flare import controller
from tightframe.flare.simulation import quickened

ENGINE = ["/env/bin/nvflare", "simulator", "jobs/fed3r_isic"]


class Runner(simulator_runner.SimulatorClientRunner):  # type: ignore[misc]
    """The engine's, which notes its threads in place of starting silos, and waits until all are there."""

    def __init__(self, silos: int) -> None:
        args = SimpleNamespace(workspace="", set=None, threads=1, end_run_for_all=False)
        super().__init__("", args, [SimpleNamespace(name=str(n)) for n in range(silos)], {}, None, {})
        self.seen: list[int] = []

    def run_client_thread(self, num_of_threads: int, *rest: Any, **more: Any) -> None:
        self.seen.append(num_of_threads)

    def _shutdown_client(self, client: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the change of the engine's class back after each test."""
    original = simulator_runner.SimulatorClientRunner.run
    monkeypatch.setattr(simulator_runner.SimulatorClientRunner, "run", original)


def _threads(silos: int = 3) -> list[int]:
    runner = Runner(silos)
    runner.run(None)
    return runner.seen


def test_without_a_number_each_silo_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _threads() == [1], "the engine's own default"
    monkeypatch.setattr("sys.argv", ENGINE)
    controller.FederationController(job_name="any")  # as the engine builds it, before silos start
    assert _threads() == [3, 3, 3]


@pytest.mark.parametrize(
    "command",
    [
        [*ENGINE, "-t", "1"],
        [*ENGINE, "-t1"],
        [*ENGINE, "--threads=1"],
        [*ENGINE, "-gpu", "0"],
        ["python", "-m", "tightframe.flare.simulation.simulator", "jobs/fed3r_isic"],
        ["/env/bin/nvflare", "job", "submit"],
        ["pytest"],
    ],
)
def test_what_was_chosen_stays(command: list[str]) -> None:
    assert not quickened.run_side_by_side(command)
    assert _threads() == [1]


def test_a_process_without_the_simulator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, quickened.SIMULATOR)
    assert not quickened.run_side_by_side(ENGINE)
