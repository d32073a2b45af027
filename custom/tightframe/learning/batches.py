"""How records come in batches: which of them together, and read by whom."""

from __future__ import annotations

from typing import Any, TypeVar

Indices = TypeVar("Indices", bound=Any)


def reading_processes(number: int) -> dict[str, Any]:
    """Return options of a ``DataLoader`` whose records this many processes read.

    They are forked, as before Python 3.14: a site's records need not be picklable.
    """
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


def merge_single_tail(indices: Indices, batch_size: int) -> list[Indices]:
    """Cut ``indices`` into consecutive batches, a single last record joined to the batch before it.

    No record is dropped, and BatchNorm, which cannot train on one value, never meets a batch of
    one unless the silo has one record only (then ``fit`` uses its running statistics).

    Args:
        indices: anything with a length that can be sliced: a list, an array or a tensor (n,).
        batch_size: records of a batch; the last batch may have 1 < b <= batch_size + 1.

    Raises:
        ValueError: if ``batch_size`` is not positive.

    >>> merge_single_tail([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4, 5]]
    """
    if batch_size < 1:
        raise ValueError(f"Expected `batch_size` to be positive, but got {batch_size}.")
    total = len(indices)
    starts = list(range(0, total, batch_size))
    if batch_size > 1 and len(starts) > 1 and total - starts[-1] == 1:
        starts.pop()
    ends = [*starts[1:], total] if starts else []
    return [indices[start:end] for start, end in zip(starts, ends, strict=True)]
