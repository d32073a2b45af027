"""Early import of the silo's code, while a simulated silo's process waits for its parent.

Without ``-t`` the simulator starts a process for every task and polls whether it is ready; the process
is ready after half a second, and then waits. The engine's only hook before that is the name of a package
with decomposers (serialisers of objects). This package has none: it starts importing, in a thread, what
every task needs, and shortens the engine's pauses. ``FederationController`` names it, in the simulator only.
"""

from __future__ import annotations

import threading
from importlib import import_module

from tightframe.flare.simulation import quickened


def _load() -> None:
    import_module("tightframe.flare.executor")


quickened.shorten(quickened.SILO_PAUSES)
threading.Thread(target=_load, name="tightframe-warm", daemon=True).start()
