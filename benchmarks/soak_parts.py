"""Parts of `soak.py` inside the engine's processes: measurements after every round, and planned faults.

A component at the server and an executor at the silos, so that each process measures itself at the same
point of every round: when its `contribute` begins and only the remains of the round before are there.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import time
import tracemalloc
from concurrent.futures.thread import _threads_queues  # worker -> queue of its pool
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from tightframe.flare import MESSAGE
from tightframe.flare.executor import SiloExecutor
from tightframe.results.files import BEST, CARD, MODEL
from tightframe.securesum.messages import AgreementRequest, Receipt, RevealRequest

PAUSES, SAMPLES = "pauses", "samples"
HELP_SECONDS = 60.0
"""Seconds within which the benchmark's main process must pause a silo that requests it."""
LEAK_BYTES = 2_000_000
TIMER_SECONDS = 90.0
"""Age in seconds at which a timer is overdue: the engine keeps one for 60 s after each received message."""
ONCE = {
    MODEL,
    CARD,
    BEST,
    "error_log.txt",
    "log_fl.txt",
}
"""Files that appear once, at some event: an evaluation, the end, the first error."""


def numbers(files: Path) -> dict[str, int]:
    """Return the resources that this process holds, after a forced collection.

    Threads are counted separately from timers, which end by themselves, and from workers of thread pools,
    which are started on demand up to each pool's limit; pools are counted instead.

    Args:
        files: the folder whose files are counted.
    """
    gc.collect()
    process = psutil.Process()
    memory = process.memory_full_info()
    waiting, queues = len(timers()), [*_threads_queues.values()]
    names = [name for _, _, entries in os.walk(files) for name in entries]
    listening = [item for item in process.net_connections("inet") if item.status == psutil.CONN_LISTEN]
    return {
        "rss": memory.rss,
        "private": memory.uss,
        "in_use": allocated(),
        "objects": len(gc.get_objects()),
        **descriptors(),
        "ports": len(listening),
        "threads": process.num_threads() - waiting - len(queues),
        "timers": waiting,
        "workers": len(queues),
        "pools": len({id(queue) for queue in queues}),
        "children": len(process.children(recursive=True)),
        "written": len(names) - len(ONCE.intersection(names)),
    }


class _MallInfo(ctypes.Structure):
    """The ``struct mallinfo2`` of glibc."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


def allocated() -> int:
    """Return the bytes that are allocated and not freed, inside and outside of glibc's arenas.

    Resident memory beyond that is code, stacks, Python's own small objects, and memory that the allocator
    keeps for reuse.
    """
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def timers() -> list[threading.Timer]:
    """Return the timers that wait in this process, each in its own thread."""
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def descriptors() -> dict[str, int]:
    """Return the numbers of open files, sockets and other descriptors (pipes, event queues)."""
    counts = {"files": 0, "sockets": 0, "others": 0}
    once = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
        kind = "files" if target.startswith("/") else "sockets" if target.startswith("socket:") else "others"
        counts[kind] += 1
        once |= ONCE & {Path(target).name}
    return counts | {"files": counts["files"] - len(once)}


class Probe:
    """Writes one process's measurements, once for each round.

    Args:
        name: of the process.
        folder: of the benchmark; a line for each round goes into its ``samples``.
        files: this process's own folder, whose files are counted.
        trace: rounds after which to save a memory snapshot.
    """

    def __init__(self, name: str, folder: Path, files: Path, trace: list[int]) -> None:
        self._name, self._folder, self._files, self._trace = name, folder, files, trace
        self._seen: set[int] = set()
        self._timers: dict[int, float] = {}  # native thread -> when it was first seen
        self._lock = threading.Lock()
        if trace:
            tracemalloc.start(8)

    def contribute(self, message: dict[str, Any], rounds: int) -> None:
        """Write the measurements at the start of a round's first sum, or of the closing."""
        kind, number = message.get("kind"), message.get("round")
        if kind == "closing":
            after = rounds
        elif kind == "train" and isinstance(number, int):
            after = number - 1
        else:
            return
        with self._lock:
            if after in self._seen:
                return
            self._seen.add(after)
            line = {"process": self._name, "pid": os.getpid(), "after": after, **numbers(self._files)}
            line["overdue"] = self._overdue(time.monotonic())
            if after in self._trace:
                tracemalloc.take_snapshot().dump(str(self._folder / f"{self._name}-{after}.trace"))
            with (self._folder / SAMPLES / f"{self._name}.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")

    def _overdue(self, now: float) -> int:
        """Return the number of timers that were first seen so long ago that they should have ended."""
        waiting = {thread.native_id for thread in timers() if thread.native_id is not None}
        self._timers = {number: self._timers.get(number, now) for number in waiting}
        return sum(now - seen > TIMER_SECONDS for seen in self._timers.values())


class ServerProbe(FLComponent):
    """Writes the server's measurements when the first silo has fetched a round's task.

    Args:
        soak: ``folder``, ``rounds``, ``trace``.
    """

    def __init__(self, soak: dict[str, Any]) -> None:
        super().__init__()
        self._soak = soak
        self._probe: Probe | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Measure when a silo fetches a task."""
        if event_type == EventType.START_RUN:
            files = Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))
            self._probe = Probe("server", Path(self._soak["folder"]), files, self._soak["trace"])
        if event_type == EventType.AFTER_TASK_DATA_FILTER and self._probe is not None:
            data = fl_ctx.get_prop(FLContextKey.TASK_DATA)
            if fl_ctx.get_prop(FLContextKey.TASK_NAME) == "contribute" and data is not None:
                self._probe.contribute(data.get(MESSAGE) or {}, self._soak["rounds"])


class SoakExecutor(SiloExecutor):
    """The executor, with this process's measurements and the planned faults.

    Args:
        soak: ``folder``, ``rounds``, ``trace``; ``faults``, each with ``round``, ``site``, ``task``, ``kind``
            and ``seconds``; ``leaky``, a site that keeps memory, a file and a thread of every round.
        job: the values of the job.
    """

    def __init__(self, soak: dict[str, Any], **job: Any) -> None:
        # Otherwise the first round would import torch, six times at once, within the server's timeout.
        from tightframe.rounds.silo import contribute as contribution  # noqa: F401

        super().__init__(**job)
        self._soak = soak
        self._folder = Path(soak["folder"])
        self._probe: Probe | None = None
        self._kept: list[Any] = []

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Measure, then do the task, with the fault planned for it."""
        site, message = fl_ctx.get_identity_name(), shareable.get(MESSAGE) or {}
        if task_name == "contribute":
            self._measure(site, message, fl_ctx)
        kind, seconds = self._planned(site, task_name, message)
        if kind in ("pause", "freeze"):
            self._be_paused(site, seconds)
        if kind == "late":
            time.sleep(seconds)
        if kind in ("raise", "nan"):
            return self._broken(kind, task_name, shareable, fl_ctx, abort_signal)
        reply = super().execute(task_name, shareable, fl_ctx, abort_signal)
        return Shareable() if kind == "lost" else reply

    def _measure(self, site: str, message: dict[str, Any], fl_ctx: FLContext) -> None:
        if self._probe is None:
            files = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
            self._probe = Probe(site, self._folder, files, self._soak["trace"])
        if site == self._soak["leaky"]:
            self._leak()
        self._probe.contribute(message, self._soak["rounds"])

    def _leak(self) -> None:
        """Leak memory, a file and a thread, which the verdict must find."""
        stop = threading.Event()
        threading.Thread(target=stop.wait, daemon=True).start()
        descriptor = os.open("/proc/self/status", os.O_RDONLY)
        self._kept.append((os.urandom(LEAK_BYTES), stop, descriptor))

    def _planned(self, site: str, task: str, message: dict[str, Any]) -> tuple[str | None, float]:
        number = _round(task, message)
        for fault in self._soak["faults"]:
            if (fault["site"], fault["task"], fault["round"]) == (site, task, number):
                return fault["kind"], fault["seconds"]
        return None, 0.0

    def _be_paused(self, site: str, seconds: float) -> None:
        """Request that the main process stops this one by SIGSTOP and continues it; return after that."""
        request = self._folder / PAUSES / site
        request.with_suffix(".new").write_text(json.dumps([os.getpid(), seconds]), encoding="utf-8")
        request.with_suffix(".new").rename(request)
        until = time.monotonic() + HELP_SECONDS + seconds
        while request.exists():
            if time.monotonic() > until:
                raise TimeoutError(
                    "Expected the benchmark to pause and continue this process, but it did not."
                )
            time.sleep(0.02)

    def _broken(
        self, kind: str, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Train as usual, on records that cannot be read or are not numbers."""
        session = self._session
        if session is None:
            return make_reply("EXECUTION_EXCEPTION")
        import torch

        data = session.context.data
        records = data.records

        def broken(fold: Any, *, augment_seed: int | None = None) -> Any:
            if kind == "raise":
                raise OSError("the disk is gone")
            good = records(fold, augment_seed=augment_seed)
            return [(torch.full_like(good[i][0], float("nan")), good[i][1]) for i in range(len(good))]

        data.records = broken  # type: ignore[method-assign]
        try:
            return super().execute(task_name, shareable, fl_ctx, abort_signal)
        finally:
            del data.records  # restores the class's own, without a reference cycle through this frame


def _round(task: str, message: dict[str, Any]) -> int | None:
    """Return the training round that a task belongs to; None for other tasks."""
    if task == "contribute":
        return message["round"] if message.get("kind") == "train" else None
    if task not in ("agree", "reveal"):
        return None
    kind = RevealRequest if task == "reveal" else AgreementRequest
    receipts: tuple[Receipt, ...] = kind.from_bytes(message["secure"]).receipts
    sum_id = receipts[0].sum_id
    return sum_id.round if sum_id.phase.startswith("train") else None
