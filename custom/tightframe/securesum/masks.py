"""Masks, and the accumulator that terms and masks are added to.

A site's term of one group is::

    y_i = enc(x_i) + PRG(b_i) + sum_{j after i} PRG(m_ij) - sum_{j before i} PRG(m_ij)

element by element, modulo each element's ring (Bonawitz et al., Practical Secure Aggregation for
Privacy-Preserving Machine Learning, CCS 2017, section 4). PRG(key) is AES-256 in counter mode, the
counter starting from zero, which is safe because every key is derived for one slot, group and
pair, and encrypts nothing else. A key gives *one* stream of bytes for all fields of its group: if
the stream were restarted for each field or ring, two fields would carry the same mask, and their
difference would be visible.

Keystream is generated in blocks that stay in the processor's caches, and every stream is added to a
block before the next block is touched. So AES and not memory limits the speed, and the memory needed
is one vector and two blocks, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from tightframe.securesum.encoding import RingArray
from tightframe.securesum.errors import MessageError
from tightframe.securesum.messages import FieldSpec
from tightframe.securesum.primitives import KEY_BYTES, derive

BLOCK = 512 * 1024
"""Bytes of keystream generated at a time; a multiple of every ring's element size. From 64 KiB to 1 MiB
each larger size was a little faster: alternating between AES and addition costs more than a block and its
keystream not fitting the second-level cache. 1 MiB was only 1 % faster, and takes more memory.
"""

_ZEROS = bytes(BLOCK)
_MODE = CTR(bytes(16))
_TYPES: dict[int, np.dtype[np.unsignedinteger[Any]]] = {32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}


@dataclass(frozen=True)
class Layout:
    """The order of one group's elements in a term's bytes.

    Attributes:
        runs: (ring, number of elements), in the order of the fields; adjacent fields of one ring
            are one run, because their elements are added in the same way.
    """

    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for ring, count in self.runs:
            if ring not in _TYPES or count < 1:
                raise ValueError(
                    "Expected each run to be (32 or 64, a number of elements from 1), "
                    f"but got {(ring, count)}."
                )

    @classmethod
    def of(cls, fields: Sequence[FieldSpec]) -> Layout:
        """Return the layout of fields in this order; empty ones take no space.

        >>> shapes = {"weight": (2, 3), "bias": (2,)}
        >>> Layout.of([FieldSpec(name, shape, 32, 8, 1.0, "update") for name, shape in shapes.items()])
        Layout(runs=((32, 8),))
        """
        runs: list[tuple[int, int]] = []
        for item in fields:
            if runs and runs[-1][0] == item.ring:
                runs[-1] = (item.ring, runs[-1][1] + item.size)
            elif item.size:
                runs.append((item.ring, item.size))
        return cls(tuple(runs))

    @property
    def nbytes(self) -> int:
        """Length of a term in bytes."""
        return sum(ring // 8 * count for ring, count in self.runs)


class Accumulator:
    """The sum of terms and masks so far: one vector, whatever the number of terms.

    It holds one array for each run, so that elements of the 64-bit ring are aligned even if they
    follow an odd number of 32-bit ones in the bytes.

    Args:
        layout: the order of the elements.
        first: a term to start from, in the format that ``add`` takes; zero if None.

    Raises:
        MessageError: TF-604, if ``first`` has another length than the layout's.
    """

    def __init__(self, layout: Layout, first: bytes | memoryview | None = None) -> None:
        self.layout = layout
        self._runs: list[RingArray] = []
        if first is None:
            self._runs = [np.zeros(count, _TYPES[ring]) for ring, count in layout.runs]
        else:
            # One pass over a site's own term less than with zeros and `add`.
            term, start = self._checked(first), 0
            for ring, count in layout.runs:
                wire = _TYPES[ring].newbyteorder("<")
                self._runs.append(np.frombuffer(term, wire, count, start).astype(_TYPES[ring]))
                start += self._runs[-1].nbytes

    def __repr__(self) -> str:
        # The runs may hold a site's own vector.
        return f"Accumulator({self.layout!r})"

    def add(self, data: bytes | memoryview) -> None:
        """Add a term in its wire format: little-endian, run after run.

        Raises:
            MessageError: TF-604, if it has another length than the layout's; nothing is added then.
        """
        term, start = self._checked(data), 0
        for run in self._runs:
            # numpy converts unaligned or byte-swapped operands in pieces, without copying the whole term.
            np.add(run, np.frombuffer(term, _wire(run), run.size, start), out=run)
            start += run.nbytes

    def add_streams(self, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
        """Add the streams of some keys and subtract those of others.

        Args:
            plus: AES-256 keys, 32 bytes each.
            minus: the same.

        Raises:
            ValueError: if a key has another length, which would be another cipher.
            RuntimeError: if the zeros to encrypt are shorter than a block.
        """
        streams: list[tuple[np.ufunc, CipherContext]] = [(np.add, _stream(key)) for key in plus]
        streams += [(np.subtract, _stream(key)) for key in minus]
        if len(_ZEROS) < BLOCK:
            raise RuntimeError(f"Expected at least {BLOCK} zero bytes, but found {len(_ZEROS)}.")
        zeros = memoryview(_ZEROS)
        buffer = np.empty(min(BLOCK, self.layout.nbytes), np.uint8)
        for part in self._blocks():
            block = buffer[: part.nbytes]
            stream, plain, elements = block.data, zeros[: part.nbytes], block.view(_wire(part))
            for operation, encryptor in streams:
                # A cipher that is given too few zeros leaves the previous stream's bytes in the buffer:
                # one site's mask would be used for another site as well, unnoticed.
                written = encryptor.update_into(plain, stream)
                if written != part.nbytes:
                    raise RuntimeError(f"Expected {part.nbytes} bytes of keystream, but found {written}.")
                operation(part, elements, out=part)

    def to_bytes(self) -> bytes:
        """Return the sum in the wire format of a term."""
        return b"".join(run.astype(_wire(run), copy=False).data for run in self._runs)

    def _checked(self, data: bytes | memoryview) -> memoryview:
        term = memoryview(data).cast("B")
        if term.nbytes != self.layout.nbytes:
            raise MessageError("a term", expected=f"{self.layout.nbytes} bytes", found=f"{term.nbytes} bytes")
        return term

    def _blocks(self) -> Iterator[RingArray]:
        """Yield the runs in order, in parts of at most one block."""
        for run in self._runs:
            size = BLOCK // run.itemsize
            for start in range(0, run.size, size):
                yield run[start : start + size]


def keystream(key: bytes, count: int) -> bytes:
    """Return the first ``count`` bytes of a key's stream: the plain definition of PRG.

    Raises:
        ValueError: if the key is not 32 bytes.
    """
    return _stream(key).update(bytes(count))


def pair_key(secret: bytes, session: bytes, slot: int, group: str, first: str, second: str) -> bytes:
    """Derive the key m_ij of the mask between two sites: 32 bytes.

    Args:
        secret: the pair secret of this slot and group from the first to the second.
        session: T.
        first: the site that comes first in the roster; it adds the stream.
        second: the other; it subtracts.

    Raises:
        ValueError: if the names are not in the roster's order: the two sites would derive different
            keys, and the masks would not cancel.
    """
    if not first < second:
        raise ValueError(f"Expected two sites in the roster's order, but got {first!r} and {second!r}.")
    return derive(secret, salt=session, tag="pair mask", fields=(slot, group, first, second))


def self_key(seed: bytes, session: bytes, slot: int, group: str, name: str) -> bytes:
    """Derive the key of a site's self mask: 32 bytes.

    Args:
        seed: b of this slot and group.
        session: T.
    """
    return derive(seed, salt=session, tag="self mask", fields=(slot, group, name))


def _stream(key: bytes) -> CipherContext:
    if len(key) != KEY_BYTES:
        raise ValueError(f"Expected a key of {KEY_BYTES} bytes, but got {len(key)}.")
    return Cipher(AES256(key), _MODE).encryptor()


def _wire(run: NDArray[Any]) -> np.dtype[Any]:
    """Return the element type of a run on the wire."""
    return run.dtype.newbyteorder("<")
