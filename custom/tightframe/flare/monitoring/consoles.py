"""Report a run's status to the engine's consoles: ``show_stats`` and the command ``tightframe.status``.

Everything comes from ``results.status``: totals and protocol facts that the server holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from tightframe.results.status import Status

GROUP = "tightframe"
"""Name of the run's group in the statistics, beside the engine's own groups."""
COMMAND = "tightframe.status"
"""Topic of the console's ``app_command JOB tightframe.status`` and of the FLARE API's ``do_app_command``."""

_watched: dict[str, Callable[[], Status]] = {}
_with_engine: list[str] = []  # the engine keeps one registry per process, which takes each name once


def watch(engine: Any, job_id: str, status: Callable[[], Status]) -> None:
    """Start answering status queries about a run.

    Args:
        engine: of the server's job process.
        job_id: of the run, as the engine knows it.
        status: returns the run's status; called from the engine's threads.
    """
    _watched[job_id] = status
    if COMMAND not in _with_engine:
        engine.register_app_command(COMMAND, answer)
        _with_engine.append(COMMAND)


def forget(job_id: str) -> None:
    """Stop answering status queries about a run."""
    _watched.pop(job_id, None)


def add_stats(event_type: str, fl_ctx: FLContext) -> None:
    """Add the run's group to the statistics, if the event asks for statistics.

    Raises:
        TypeError: if the engine passes another type of collector than it documents.
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
    """Answer the console's command with the same values as the statistics; ``data`` is ignored."""
    status = _watched.get(fl_ctx.get_job_id())
    return {} if status is None else status().as_json()
