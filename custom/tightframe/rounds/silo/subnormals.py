"""Flush subnormal numbers to zero while others can observe how long a silo works.

Some processors need a hundred times as long for them, and a model could produce them for chosen records. The
setting belongs to a thread, and a new thread inherits it: work runs in a thread of its own, whose worker
threads begin with the setting. The accounting of privacy keeps subnormals (``kept``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")
_here = threading.local()


def without(work: Callable[[], Result], threads: int) -> Result:
    """Do work in a thread that, with its worker threads, flushes subnormal numbers to zero.

    Args:
        work: to be done; its exceptions are raised here.
        threads: number of torch's threads within an operation.
    """
    import torch

    done: Future[Result] = Future()

    def begin() -> None:
        torch.set_flush_denormal(True)
        _here.flushed = True
        torch.set_num_threads(threads)  # each thread that starts operations has its own setting
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=begin, name="work on records", daemon=True).start()
    return done.result()


@contextmanager
def kept() -> Iterator[None]:
    """Keep subnormal numbers for a block, whatever the setting around it."""
    if not getattr(_here, "flushed", False):
        yield
        return
    import torch

    torch.set_flush_denormal(False)
    _here.flushed = False
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
        _here.flushed = True
