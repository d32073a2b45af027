"""Short pauses in a simulation, where the engine makes long ones for processes on many machines.

Its simulator looks once a second whether server and silos have started, every three seconds whether the run
has ended, and then waits three more for messages under way. A silo that has no work asks twice a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

SIMULATOR: Mapping[str, float] = {
    "nvflare.private.fed.app.simulator.simulator_runner": 0.1,
    "nvflare.private.fed.server.fed_server": 0.5,
    "nvflare.fuel.f3.mpm": 0.1,
}
"""Longest pause, in seconds, of modules in the simulator's own process; the first is in no other one."""
SILO: Mapping[str, float] = {"__main__": 0.2}
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
