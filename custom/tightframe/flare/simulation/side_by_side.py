"""All silos of a simulation side by side, where the engine's command names no number of threads.

``nvflare simulator JOB`` without ``-t`` has one silo at work at a time, and for each task a new process with
two pauses of a second: three seconds a task, of which a secure sum of six silos has 18. No value of a job
asks for more. The engine builds our controller in the simulator's own process before it starts the silos, so
the controller can raise the number there, as ``-t`` would. Results are the same to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


def prepare(command: Sequence[str] | None = None) -> bool:
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
