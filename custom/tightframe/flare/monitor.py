"""Tells the engine's consoles where a run stands: ``show_stats`` and the command ``tightframe.status``.

Everything comes from ``results.status``: totals and facts of the protocol, which the server has anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from tightframe.results.status import Status

GROUP = "tightframe"
"""Of the statistics, beside the engine's own groups."""
COMMAND = "tightframe.status"
"""Of the console's ``app_command JOB tightframe.status``, and of the FLARE API's ``do_app_command``."""

_watched: dict[str, Callable[[], Status]] = {}
_with_engine: list[str] = []  # the engine's registry is of the process, and takes no name twice


def watch(engine: Any, job_id: str, status: Callable[[], Status]) -> None:
    """Answer for a run from now on.

    Args:
        engine: of the server's job process.
        job_id: of the run, as the engine knows it.
        status: gives where the run stands; called from the engine's threads.
    """
    _watched[job_id] = status
    if COMMAND not in _with_engine:
        engine.register_app_command(COMMAND, answer)
        _with_engine.append(COMMAND)


def forget(job_id: str) -> None:
    """The run is over; nobody answers for it any more."""
    _watched.pop(job_id, None)


def add_stats(event_type: str, fl_ctx: FLContext) -> None:
    """Add the run's group to the statistics, if that is what an event asks for.

    Raises:
        TypeError: if the engine hands over another collector than it promises.
    """
    if event_type != InfoCollector.EVENT_TYPE_GET_STATS:
        return
    collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
    status = _watched.get(fl_ctx.get_job_id())
    if collector is None or status is None:
        return
    if not isinstance(collector, GroupInfoCollector):
        raise TypeError(f"Expected the engine's GroupInfoCollector, but got {type(collector).__name__}.")
    collector.set_info(group_name=GROUP, info=status().as_json())


def answer(topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
    """Answer the console's command with the same values as the statistics; nothing can be asked with it."""
    status = _watched.get(fl_ctx.get_job_id())
    return {} if status is None else status().as_json()
