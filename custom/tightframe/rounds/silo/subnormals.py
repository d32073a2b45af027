"""Numbers next to zero (subnormals) count as zero while others see how long a silo works.

Some processors need a hundred times as long for them, and a model could make them of chosen records. The
setting belongs to a thread, and a new thread has that of the one that starts it: work goes into a thread of
its own, whose worker threads begin with the setting. The accounting of privacy keeps them (``kept``).
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
    """Do work in a thread in which, and in whose worker threads, numbers next to zero count as zero.

    Args:
        work: to be done; whatever it raises is raised here.
        threads: of torch, within an operation.
    """
    import torch

    done: Future[Result] = Future()

    def begin() -> None:
        torch.set_flush_denormal(True)
        _here.flushed = True
        torch.set_num_threads(threads)  # each thread that starts operations has its own number
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=begin, name="work on records", daemon=True).start()
    return done.result()


@contextmanager
def kept() -> Iterator[None]:
    """Keep numbers next to zero for a block, whatever holds for the work around it."""
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
