"""Combinations of a table's columns, by which its records are recognised where other columns differ.

A row's hash changes with any of its cells. So a table is also identified by combinations of columns: the
smallest ones in which hardly any row repeats another's cells. The set of a combination's cells is sketched by
MinHash in one permutation (Li, Owen and Zhang, One Permutation Hashing, NIPS 2012; an empty bin takes the
next one's, Shrivastava and Li, ICML 2014). A table with the same records has the same sketch of each
combination that it has, independent of its other columns, their names and order. Cells are compared in two
ways:

- by value (1.50 equals 1.5), with columns in any order;
- numbers also by rank, in ``BINS`` parts of equal size, which do not change with unit or standardisation.

The repetitions of a combination's cells among a table's records show how often other records have the same.
So columns of few values count only together with others, and row numbers and times in even steps, which other
tables have too, do not count by value. Torch-free.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

PLACES = 64
KEPT = 24
"""Number of combinations kept, by value and by rank: those of the least hash, so that tables keep the same
ones."""
BINS = 16
MOST_COLUMNS = 500
_MOST_REPEATED, _SPARED = 0.05, 2
"""Largest share of rows that may repeat another's cells, and a margin in rows, against chance in few rows."""
_MOST_MISSING = 0.1
"""Largest share of cells without a number in a column with ranks."""
_WIDEST = {1: MOST_COLUMNS, 2: 23, 3: 12, 4: 10, 5: 9}
"""Columns of a combination -> number of candidate columns, those that distinguish most rows."""
_BY_CHANCE, _FAR_FEWER = 4.0, 0.25
"""Expected pairs of equal cells by chance, and the share of these below which a column counts as row
numbers."""
_ROWS_AT_ONCE = 4096
_MISSING = np.uint64(0x9E3779B97F4A7C15)

Hashes: TypeAlias = NDArray[np.uint64]
Cell: TypeAlias = str | float | None


class Row(bytes):
    """A row, as one record's content.

    Attributes:
        cells: text or numbers, None where there is no value.
    """

    cells: Sequence[Cell]

    @classmethod
    def of(cls, content: bytes, cells: Sequence[Cell]) -> Row:
        """Return a content with its cells."""
        row = cls(content)
        row.cells = cells
        return row


@dataclass
class Columns:
    """A table's columns, read row by row; a row with more or fewer cells than the first is left out."""

    _waiting: list[Sequence[Cell]] = field(default_factory=list)
    _read: list[tuple[Hashes, NDArray[np.float64]]] = field(default_factory=list)
    _texts: dict[str, tuple[int, float]] = field(default_factory=dict)
    _width: int | None = None

    def add(self, cells: Sequence[Cell]) -> None:
        """Add a row."""
        self._width = len(cells) if self._width is None else self._width
        if len(cells) == self._width <= MOST_COLUMNS:
            self._waiting.append(cells)
        if len(self._waiting) == _ROWS_AT_ONCE:
            self._take()

    def sketches(self) -> tuple[bytes, ...]:
        """Return the sketch of each combination: ``PLACES`` hashes of 8 bytes."""
        self._take()
        if not self._read:
            return ()
        values, numbers = (np.concatenate([part[place] for part in self._read], axis=1) for place in (0, 1))
        same = [_coincidence(column) for column in values]
        order = sorted(range(len(values)), key=same.__getitem__)
        by_value = [
            _Column(_mixed(values[place]), same[place])
            for place in order
            if not _is_numbered(numbers[place], same[place])
        ]
        with_ranks = [place for place in order if np.isnan(numbers[place]).mean() < _MOST_MISSING]
        by_rank = [_Column.ranked(numbers[place]) for place in with_ranks[: _WIDEST[2]]]
        return tuple(
            sketch.astype("<u8").tobytes()
            for columns, joined in ((by_value, _as_set), (by_rank, _in_order))
            for sketch in _combinations(columns, joined)
        )

    def _take(self) -> None:
        if not self._waiting:
            return
        columns = [self._column(cells) for cells in zip(*self._waiting, strict=True)]
        self._waiting.clear()
        codes, numbers = (np.stack([column[place] for column in columns]) for place in (0, 1))
        self._read.append((codes.astype(np.uint64), numbers.astype(np.float64)))

    def _column(self, cells: Sequence[Cell]) -> tuple[Hashes, NDArray[np.float64]]:
        try:
            texts = ["nan" if cell is None or cell == "" else cell for cell in cells]
            numbers = np.array(texts, dtype=np.float64) + 0.0  # no -0.0
            codes = numbers.view(np.uint64).copy()
            codes[np.isnan(numbers)] = _MISSING
            return codes, numbers
        except ValueError:
            hashed = [self._text("nan" if cell is None or cell == "" else str(cell)) for cell in cells]
            return np.array([code for code, _ in hashed], np.uint64), np.array(
                [number for _, number in hashed]
            )

    def _text(self, text: str) -> tuple[int, float]:
        """Return the code of a cell, and its number; for a text, such as a date, that of its digits."""
        known = self._texts.get(text)
        if known is None:
            try:
                number = float(text) + 0.0
                code = int(_MISSING) if np.isnan(number) else int(np.float64(number).view(np.uint64))
            except ValueError:
                digits = "".join(filter(str.isdecimal, text))
                number = float(digits) if digits else np.nan
                code = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            known = self._texts[text] = code, number
        return known


def marked(sketches: Iterable[bytes], secret: bytes) -> str:
    """Return a ledger's form of sketches, hexadecimal: 8 bytes that name the secret, then a byte per place.

    Without the secret no guess of a record can be tested against it.

    Args:
        secret: the ledger's own.
    """
    marks = bytearray(hashlib.blake2b(key=secret, digest_size=8).digest())
    for sketch in sketches:
        for place in range(PLACES):
            least = sketch[8 * place : 8 * place + 8]
            marks += hashlib.blake2b(bytes([place]) + least, key=secret, digest_size=1).digest()
    return marks.hex()


@dataclass(frozen=True)
class _Column:
    """A column.

    Attributes:
        hashes: of its cells, (n,).
        same: fraction of pairs of rows with equal cells.
    """

    hashes: Hashes
    same: float

    @classmethod
    def ranked(cls, numbers: NDArray[np.float64]) -> _Column:
        """Return each number's rank, from 0 to ``BINS`` - 1; missing ones rank last."""
        ordered = np.sort(numbers)
        middle = np.searchsorted(ordered, numbers, "left") + np.searchsorted(ordered, numbers, "right")
        codes = np.minimum(BINS * middle // (2 * len(numbers)), BINS - 1).astype(np.uint64)
        return cls(codes, _coincidence(codes))


def _combinations(columns: Sequence[_Column], joined: Callable[[Sequence[_Column]], Hashes]) -> list[Hashes]:
    """Return the sketches of a table's combinations, (``PLACES``,) each.

    Args:
        columns: those that distinguish most rows first.
        joined: columns -> a hash of each row's cells in these, (n,).
    """
    sketches: list[Hashes] = []
    smallest: list[set[int]] = []
    for size, widest in _WIDEST.items():
        if len(sketches) >= KEPT:
            break
        for chosen in itertools.combinations(range(min(widest, len(columns))), size):
            if any(smaller <= set(chosen) for smaller in smallest):
                continue
            hashes = _telling([columns[place] for place in chosen], joined)
            if hashes is not None:
                smallest.append(set(chosen))
                sketches.append(_least(hashes))
    return sorted(sketches, key=lambda sketch: int(sketch.min()))[:KEPT]


def _telling(columns: Sequence[_Column], joined: Callable[[Sequence[_Column]], Hashes]) -> Hashes | None:
    """Return the sorted hashes of the rows by these columns, (n,); None if too many repeat another's."""
    count = len(columns[0].hashes)
    most = _MOST_REPEATED * count - _SPARED
    # Independent columns repeat at least so often. Those of a design repeat less, and its next table is the
    # same.
    if count * (count - 1) / 2 * float(np.prod([column.same for column in columns])) > most:
        return None
    hashes = np.sort(joined(columns))
    return None if np.count_nonzero(hashes[1:] == hashes[:-1]) > most else hashes


def _least(hashes: Hashes) -> Hashes:
    """Return the least hash of each bin by its first bits; an empty bin takes the next one's."""
    begins = np.arange(PLACES, dtype=np.uint64) << np.uint64(64 - int(np.log2(PLACES)))
    return hashes[np.searchsorted(hashes, begins) % len(hashes)]


def _as_set(columns: Sequence[_Column]) -> Hashes:
    return _mixed(np.sum([column.hashes for column in columns], axis=0, dtype=np.uint64))


def _in_order(columns: Sequence[_Column]) -> Hashes:
    """Join ranks, which are the same in all columns, in the order in which columns distinguish rows."""
    total = np.full(len(columns[0].hashes), len(columns), np.uint64)
    for column in columns:
        total = total * np.uint64(BINS) + column.hashes
    return _mixed(total)


def _coincidence(codes: Hashes) -> float:
    """Return the share of pairs of rows with equal cells."""
    counts = np.unique(codes, return_counts=True)[1].astype(float)
    pairs = len(codes) * (len(codes) - 1)
    return float((counts * (counts - 1)).sum() / pairs) if pairs else 1.0


def _is_numbered(numbers: NDArray[np.float64], same: float) -> bool:
    """Check whether a column's numbers repeat far less than if they were drawn from the range they fill."""
    ordered = np.unique(numbers[np.isfinite(numbers)])
    if len(ordered) < 2:
        return False
    gaps = np.diff(ordered)
    pairs = len(numbers) * (len(numbers) - 1) / 2
    expected = pairs / (1 + (ordered[-1] - ordered[0]) / gaps.min())
    return expected >= _BY_CHANCE and same * pairs < _FAR_FEWER * expected


def _mixed(values: Hashes) -> Hashes:
    """Mix bits (the finaliser of SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
