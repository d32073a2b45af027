"""Linear combinations of a group's integers that nobody can choose, by which a total is checked.

For each ring of w bits in a group, let v be its elements, those of all runs of the ring in order, and m their
number. A challenge gives m + 127 bits r, and combination k of 128 is::

    c_k = sum_i r[i + k] * v[i]   mod 2**w

The combinations are linear: those of a sum are the sum of those of its terms. If two vectors differ by e,
let 2**a be the largest power of two that divides all of e. Modulo 2**(a + 1) all 128 combinations of e vanish
only if a binary Toeplitz matrix maps e / 2**a modulo 2, which is not zero, to zero. Such matrices are a
universal family (Krawczyk, LFSR-based Hashing and Authentication, CRYPTO 1994): over uniform r that has
probability 2**-128. The challenge is a hash of the vectors' sum and of what fixes the vectors
(``messages.challenge``), so that a server can try false sums by itself, each with this probability: that is
why there are 128, and not 64.

A group's combinations are bytes: 128 integers of 4 bytes if the 32-bit ring occurs, then 128 of 8 bytes
if the 64-bit ring occurs, little-endian. For as long as no element occurs there are no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tightframe.securesum.encoding import RingArray
from tightframe.securesum.errors import MessageError
from tightframe.securesum.masks import Accumulator, Layout, keystream
from tightframe.securesum.primitives import derive

COUNT = 128
_RINGS = (32, 64)
_WIDTH = 32
"""Elements in a row of the matrices multiplied. Widths from 16 to 128 took about the same time."""
_ROWS = 256
_TOGETHER = 16
"""Rows of R^T multiplied at a time: few enough that OpenBLAS, which numpy has, uses one thread (it takes
more from 2**18 multiplications on). On a busy machine its threads took ten times as much CPU time and more,
waiting for each other; and one thread is no slower with small products.
"""
_EXACT_ROWS = 2**21
"""Rows that may be added up in float64: each product is below 2**32, so that a sum stays below 2**53."""


def layout_of(layout: Layout) -> Layout:
    """Return the layout of a group's combinations."""
    rings = {ring for ring, _ in layout.runs}
    return Layout(tuple((ring, COUNT) for ring in _RINGS if ring in rings))


def combine(challenge: bytes, group: str, layout: Layout, data: bytes | memoryview) -> bytes:
    """Return the combinations of one group's integers.

    Args:
        challenge: 32 bytes.
        group: the group; each has bits of its own.
        data: the integers, little-endian, in the layout's order.

    Raises:
        MessageError: TF-604, if ``data`` has another length than the layout's.
    """
    return combine_all(challenge, group, layout, (data,))[0]


def combine_all(
    challenge: bytes, group: str, layout: Layout, terms: Sequence[bytes | memoryview]
) -> list[bytes]:
    """Return the combinations of several vectors of one group; the arguments are those of ``combine``.

    Two at once take three quarters of the time of one after the other, because the bits are prepared once
    and the products are larger.

    Raises:
        MessageError: TF-604, if a vector has another length than the layout's.
    """
    views = [memoryview(data).cast("B") for data in terms]
    for view in views:
        if view.nbytes != layout.nbytes:
            raise MessageError("a term", expected=f"{layout.nbytes} bytes", found=f"{view.nbytes} bytes")
    made: list[list[bytes]] = [[] for _ in views]
    for ring in _RINGS:
        size = sum(count for run, count in layout.runs if run == ring)
        if not size:
            continue
        bits = random_bits(challenge, group, ring, size)
        total, place, start = np.zeros((len(views), COUNT), np.uint64), 0, 0
        for run, count in layout.runs:
            if run == ring:
                values = [np.frombuffer(view, f"<u{ring // 8}", count, start) for view in views]
                total += _combined(values, bits[place : place + count + COUNT - 1])
                place += count
            start += count * run // 8
        for parts, own in zip(made, total, strict=True):
            parts.append(own.astype(f"<u{ring // 8}").tobytes())
    return [b"".join(parts) for parts in made]


def add(layout: Layout, parts: Iterable[bytes]) -> bytes:
    """Return the combinations of a sum from those of its terms.

    Raises:
        MessageError: TF-604, if a part has another length than the combinations of ``layout``.
    """
    total = Accumulator(layout_of(layout))
    for part in parts:
        total.add(part)
    return total.to_bytes()


def random_bits(challenge: bytes, group: str, ring: int, size: int) -> NDArray[np.uint8]:
    """Return the bits r for a ring with ``size`` elements: ``size + 127`` of them, each 0 or 1."""
    key = derive(challenge, salt=b"", tag="combinations", fields=(group, ring))
    count = size + COUNT - 1
    stream = np.frombuffer(keystream(key, -(-count // 8)), np.uint8)
    return np.unpackbits(stream, count=count, bitorder="little")


def _combined(vectors: Sequence[RingArray], bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the combinations of each vector modulo 2**64; of a 32-bit ring their remainders count."""
    if vectors[0].itemsize == 4:
        return _products(vectors, bits)
    halves = [values.view("<u4").reshape(-1, 2) for values in vectors]
    low, high = (_products([half[:, place] for half in halves], bits) for place in (0, 1))
    return low + (high << np.uint64(32))


def _products(vectors: Sequence[RingArray], bits: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the combinations of each vector of 32-bit values modulo 2**64: vectors x 128.

    With i = a * L + b, row a of V holds the values v[a * L + b], and row a of R the bits r[a * L + s] for s
    below L + 127. Then c_k is the sum over b of the elements (b + k, b) of R^T V, which BLAS computes, the
    matrices V of all vectors side by side.
    """
    size, number = vectors[0].size, len(vectors)
    total = np.zeros((number, COUNT), np.uint64)
    partial, rows = np.zeros((_WIDTH + COUNT, number * _WIDTH)), 0  # with a row for divisibility
    for start in range(0, size, _WIDTH * _ROWS):
        length = min(_WIDTH * _ROWS, size - start)
        count = -(-length // _WIDTH)
        beside, taken = np.empty((count, number * _WIDTH)), np.zeros(count * _WIDTH + COUNT)
        for column, values in enumerate(vectors):
            part = values[start : start + length]
            padded = np.pad(part, (0, count * _WIDTH - length)) if length < count * _WIDTH else part
            beside[:, column * _WIDTH : (column + 1) * _WIDTH] = padded.reshape(count, _WIDTH)
        taken[: length + COUNT - 1] = bits[start : start + length + COUNT - 1]
        step = taken.itemsize
        shifted = as_strided(taken, (count, _WIDTH + COUNT), (_WIDTH * step, step), writeable=False)
        if rows + count > _EXACT_ROWS:
            total += _all_diagonals(partial)
            partial, rows = np.zeros_like(partial), 0
        left = np.ascontiguousarray(shifted).T.reshape(-1, _TOGETHER, count)
        partial += (left @ beside).reshape(partial.shape)
        rows += count
    return total + _all_diagonals(partial)


def _all_diagonals(partial: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return ``_diagonals`` of each vector's columns."""
    return np.stack([_diagonals(part) for part in np.split(partial, partial.shape[1] // _WIDTH, axis=1)])


def _diagonals(partial: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return the sum over b of the elements (b + k, b), for each k, modulo 2**64.

    Raises:
        ArithmeticError: if an element is too large to be exact in float64.
    """
    if partial.max() >= 2.0**53:
        raise ArithmeticError("Expected sums below 2**53, which float64 holds exactly, but got a larger one.")
    whole = partial.astype(np.uint64)
    row, column = whole.strides
    skewed = as_strided(whole, (COUNT, _WIDTH), (row, row + column), writeable=False)
    made: NDArray[np.uint64] = skewed.sum(axis=1, dtype=np.uint64)
    return made
