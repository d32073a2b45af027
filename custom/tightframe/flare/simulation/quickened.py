"""Changes to the engine's simulator, in its own processes: all silos side by side, and short pauses.

``nvflare simulator JOB`` without ``-t`` has one silo at work at a time, and for each task a new process with
two pauses of a second: three seconds a task, of which a secure sum of six silos has 18. No value of a job
asks for more. The engine builds our controller in the simulator's own process before it starts the silos, so
the controller can raise the number there, as ``-t`` would. Results are the same to the bit.

It looks once a second whether server and silos have started, every three seconds whether the run has ended,
and then waits three more for messages under way. A silo that has no work asks twice a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIMULATOR = "nvflare.private.fed.app.simulator.simulator_runner"
CHOSEN = ("-t", "--t", "-g", "--g")
"""Beginnings of the flags that choose how many silos work at once, or on which GPUs."""


def unchosen(command: Sequence[str]) -> bool:
    """Check whether a command line is the engine's simulator without a number of threads, and without GPUs.

    >>> unchosen(["/env/bin/nvflare", "simulator", "jobs/fed3r_isic"])
    True
    >>> unchosen(["/env/bin/nvflare", "simulator", "jobs/fed3r_isic", "-t", "1"])
    False
    """
    return (
        len(command) > 1
        and Path(command[0]).name == "nvflare"
        and command[1] == "simulator"
        and not any(item.startswith(CHOSEN) for item in command[2:])
    )


def run_side_by_side(command: Sequence[str] | None = None) -> bool:
    """Let the engine's simulator in this process run all silos at once, if nobody chose; return whether.

    Args:
        command: of the process; its own by default.
    """
    engine: Any = sys.modules.get(SIMULATOR)
    if engine is None or not unchosen(sys.argv if command is None else command):
        return False
    runner = engine.SimulatorClientRunner
    run = runner.run

    def side_by_side(self: Any, gpu: Any) -> None:
        self.args.threads = len(self.federated_clients)
        run(self, gpu)

    runner.run = side_by_side
    return True


SIMULATOR_PAUSES: Mapping[str, float] = {
    SIMULATOR: 0.1,
    "nvflare.private.fed.server.fed_server": 0.5,
    "nvflare.fuel.f3.mpm": 0.1,
}
"""Longest pause, in seconds, of modules in the simulator's own process; the first is in no other one."""
SILO_PAUSES: Mapping[str, float] = {"__main__": 0.2}
"""The same in a silo's process: of the program."""


class _Clock:
    """Module ``time`` with pauses of a limited length."""

    def __init__(self, longest: float) -> None:
        self._longest = longest

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Pause for so many seconds, or the longest pause."""
        time.sleep(min(seconds, self._longest))


def shorten(pauses: Mapping[str, float]) -> bool:
    """Shorten pauses of the engine in this process, if it has all of the modules; return whether."""
    modules = [vars(sys.modules[name]) for name in pauses if name in sys.modules]
    if len(modules) < len(pauses) or not all("time" in module for module in modules):
        return False
    for module, longest in zip(modules, pauses.values(), strict=True):
        module["time"] = _Clock(longest)
    return True
