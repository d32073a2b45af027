"""Numbers next to zero count as zero in every thread of a silo's work, and in no other's."""

from __future__ import annotations

import pytest
import torch

from tightframe.rounds.silo.subnormals import kept, without

THREADS = 2
SMALL = torch.full((1 << 20,), 1e-40)


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def left() -> int:
    """How many numbers next to zero an operation of several threads leaves."""
    return int(((SMALL * 1.0).view(torch.int32) != 0).sum())


def test_they_count_as_zero_in_every_worker_thread() -> None:
    assert left() == len(SMALL), "the worker threads of this thread are there already"
    assert without(left, THREADS) == 0
    assert left() == len(SMALL)


def test_the_accounting_of_privacy_keeps_them() -> None:
    tiny = 5e-324

    def work() -> tuple[float, float, float]:
        before = tiny * 1.0
        with kept():
            within = tiny * 1.0
        return before, within, tiny * 1.0

    assert without(work, THREADS) == (0.0, tiny, 0.0)
    with kept():
        assert tiny * 1.0 == tiny


def test_what_work_raises_is_raised_and_it_has_its_threads() -> None:
    def fails() -> None:
        raise MemoryError("of work")

    with pytest.raises(MemoryError, match="of work"):
        without(fails, THREADS)
    assert without(torch.get_num_threads, 1) == 1 and torch.get_num_threads() == THREADS
