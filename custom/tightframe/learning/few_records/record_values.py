"""How many unknown numbers a record has, as far as the hospital that holds it is sure.

A record's inputs can be many more: a level of a category that no record has, a column that is the same in
all, one that follows from others, a picture that was scaled up. Who writes a job could add any number of
these. So a hospital counts, of its own records, the columns that

1. differ in the class from the most common value in ``min_class_count`` records at least, of few in half;
2. do not follow from others, as a linear function of them, but for 1/1000 of their variance.

A column of a table counts once, however many numbers its levels are encoded in. Inputs that are longer than
512 numbers are first added up to as many, each with a sign, in one order for all: that gives no number that
was not there. Of n records n - 1 numbers are seen at most.

A sum over records is one over *possible* rows, of which few occur: then two or three equations a record are
enough, found by non-negative least squares, however many columns of few values it has (339 of 339 records of
ten yes/no columns; 48 of 48 of ten and a real one). So columns of few values are worth their bits alone,
unless they have 2^32 possible rows or more; and so is a whole record of fewer possible rows.

Features mix columns by their spread, which a contract's ranges decide: of a column with a range of 100 and
eleven with a million times theirs, any features are ones of the first (71 of 71 patients' values of it were
read from 426 class sums). So do false moments of one silo where the model standardises. So columns with
spreads s, as the model gets them, count as ``(sum of s)^2 / (sum of s^2)``: all if they are alike, one if one
is far above the others.

A table has *possible rows* that can all be written down if they are few: then records are read from the total
of a round of training, too (195 of 268 different ones of ten yes/no columns, with label), see
``column_bits``.

A column counts only as much as is left of it given the one other that tells most of it (``_left``; Chow and
Liu, IEEE Transactions on Information Theory 14, 1968), and not at all if three others determine it: with ten
copies of each, or opposites, seven yes/no columns were 77 bits, and all 91 test records were read from one
job. Nor does one that is a linear function of shorter ones (``_follow``), as a score of them; and where most
rows of the columns of few values are there again, they have the bits of these rows (``_in_few_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

MOST = 512
"""Most numbers that are counted. Products need two records a feature, so that it takes over 2,000 features
for more to matter."""
PICTURES, ROWS = 640, 2**14
"""Records that are looked at, the first ones: of pictures some more than numbers are counted, of tables many,
so that rare values are seen."""
POSSIBLE_BITS, NUMBER_BITS = 32, 24
"""Bits of a row below which all possible rows can be written down, and of a number in a sum of features."""
SHORT, LONG = 3, 16
"""Values in a class that a column of numbers has more of, if most records differ in it; else at least."""
ALIKE = 4
"""Columns with at least this part of the largest spread are as good as alike: nothing was read at three times
and hardly more than by chance at eight."""
FOLLOWS = 1e-3
"""A column with a smaller part of its variance left, given the others, follows from them."""
CANDIDATES, LITTLE, SURE = 64, 0.05, 40
"""Columns of which three are looked for that determine another, those that alone tell most of it; the part of
it that may be left; and bits by which that is no chance."""
PAIRS = 2**32
"""Most multiplications for what columns tell of each other; of more columns fewer records are looked at."""


def most_values(shape: Sequence[int], columns: Sequence[int]) -> int:
    """Return how many numbers are counted of a record at most, from a job alone.

    Args:
        shape: of a record's inputs.
        columns: numbers of each column of a table in them; empty where each number is one.

    >>> most_values((113,), [1] * 13 + [100]), most_values((3, 224, 224), ())
    (14, 512)
    """
    return min(MOST, len(columns) or math.prod(shape))


def count_values(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    classes: int,
    columns: Sequence[int],
    least: int,
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return how many unknown numbers a record of each class has, float64 (C,).

    Args:
        batches: of inputs (B, ...) and labels (B,).
        columns: see ``most_values``; none of pictures.
        least: records in which a column must differ, of few records half.
        scale: what the model divides each number by, (p,); None if neither job nor silos set any: columns
            count alike.

    >>> rows = torch.tensor([[0.0, 0, 5], [1, 2, 5], [4, 8, 5], [9, 18, 5]])
    >>> count_values([(rows, torch.zeros(4).long())], 1, (), 2)  # one is twice another, one is the same
    tensor([1.], dtype=torch.float64)
    """
    read, told = _first(batches)
    made = torch.zeros(classes, dtype=torch.float64)
    if not read:
        return made
    rows = np.nan_to_num(torch.cat(read).numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    by = None if scale is None else scale.numpy()
    label, known = torch.cat(told).numpy(), dict[bytes, int]()
    of = np.repeat(np.arange(len(columns)), columns) if columns else np.arange(rows.shape[1])

    def independent(chosen: NDArray[np.bool_]) -> int:
        if (key := chosen.tobytes()) not in known:
            known[key] = _independent(rows[:, chosen], of[chosen])
        return known[key]

    for place in np.unique(label):
        own = rows[label == place]
        varies = _varies(own, least)
        most, bits, short = _levels(own[:, varies], of[varies])
        if by is not None:
            most = min(most, _alike(rows[:, varies] / by[varies], of[varies]))
        few = varies & np.isin(of, short)
        hidden = independent(few)  # what follows from these is no number, either
        made[place] = min(independent(varies) - hidden + min(hidden, bits / NUMBER_BITS), most)
    return made


def _varies(rows: NDArray[np.float32], least: int) -> NDArray[np.bool_]:
    """Return the columns that differ from their most common value in enough records."""
    enough = max(1, min(least, len(rows) // 2))
    rising = np.sort(rows, axis=0)  # what all but fewer have is in one of these pairs twice
    different: NDArray[np.bool_] = (rising[:enough] != rising[-enough:]).all(0)
    return different


def _alike(rows: NDArray[np.float64], of: NDArray[np.int64]) -> float:
    """Return how many columns of one spread are seen as well as these; a column's is that of its numbers."""
    spread = np.sqrt(np.bincount(of, weights=rows.var(0), minlength=1))
    if not spread.any():
        return 0.0
    seen = np.minimum(spread * ALIKE / spread.max(), 1.0)
    return float(seen.sum() ** 2 / np.square(seen).sum())


def _levels(rows: NDArray[np.float32], of: NDArray[np.int64]) -> tuple[float, float, list[int]]:
    """Return what a record's values are worth at most, the bits of its columns of few values, and these.

    None are those of few values if they have too many possible rows.

    Args:
        rows: of a class.
        of: the column of each number.
    """
    rows, found = np.unique(rows, axis=0), np.unique(of)
    codes = [_codes(rows[:, of == column]) for column in found]
    values = np.array([int(code.max(initial=0)) + 1 for code in codes], dtype=np.int64)
    real = (values > SHORT) & (2 * values > len(rows))
    few = (values < LONG) & ~real

    def in_bits(chosen: NDArray[np.bool_]) -> float:
        each = np.log2(values[chosen])
        return float(each @ _left(each, list(compress(codes, chosen.tolist())), POSSIBLE_BITS))

    if (bits := in_bits(few)) >= POSSIBLE_BITS:
        return len(found), 0.0, []
    every = math.inf if real.any() else in_bits(values > 0)
    most = every / NUMBER_BITS if every < POSSIBLE_BITS else len(found)
    return most, bits, found[few].tolist()


def _first(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the first records as rows, and their labels, in batches."""
    read, told = list[torch.Tensor](), list[torch.Tensor]()
    for inputs, labels in batches:
        read.append(_shortened(inputs.detach().to("cpu", torch.float32)))
        told.append(labels.cpu())
        if sum(map(len, read)) >= (PICTURES if inputs.dim() > 2 else ROWS):
            break
    return read, told


def column_bits(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    columns: Sequence[int],
    scale: torch.Tensor | None = None,
) -> tuple[float, ...]:
    """Return the bits of each column of a table, as far as the model tells rows apart; empty of no records.

    Their sum is the bits of a possible row.

    A number has as many values as its steps go into what it spans (a step is one of the smallest tenth), and
    none that differ by less than a 64th of the largest spread: rows that are alike to the model are found as
    one (three laboratory values with 25 times their range hid none of ten yes/no columns). Steps in which it
    has no values are none (``_spread_over``): seven numbers near 5 or 95 hid no more than yes and no. Several
    numbers with an eighth of it hide hardly more than one: below a quarter they count by their variance.
    Values of which most records have one count by their entropy, as most rows of rare columns are too
    unlikely to hide any (of 37 drugs that 5 % have, 200 of 709 records were found).

    Args:
        batches: of inputs (B, p) and labels.
        columns: see ``most_values``.
        scale: see ``count_values``.

    >>> rows = torch.tensor([[0.0, 1, 20.5], [1, 1, 21], [1, 0, 24]])
    >>> found = column_bits([(rows, torch.zeros(3))], ())  # two that two of three have, and some six values
    >>> [round(bits, 3) for bits in found]
    [0.918, 0.918, 2.503]
    """
    read, _ = _first(batches)
    if not read:
        return ()
    rows = torch.cat(read).numpy().astype(np.float64)
    deviation = rows.std(0)
    by = np.where(deviation > 0, deviation, 1.0) if scale is None else scale.numpy()
    return _bits_of(rows, by, tuple(columns) or (1,) * rows.shape[1])


def _bits_of(
    rows: NDArray[np.float64], by: NDArray[np.float64], widths: tuple[int, ...]
) -> tuple[float, ...]:
    """Return the bits of columns with so many numbers each, of which the model divides each by another."""
    bits, codes, place = list[float](), list[NDArray[np.int64]](), 0
    spread = rows.std(0) / by
    for width in widths:
        codes.append(_codes(rows[:, place : place + width]))
        likely = _entropy(codes[-1])
        if width > 1:
            bits.append(likely)
        elif not codes[-1].any():
            bits.append(0.0)
        else:
            values = np.unique(rows[:, place])
            steps = np.diff(values)
            step = max(np.quantile(steps, 0.1), by[place] * spread.max() / ALIKE**3)
            share = min(1.0, ALIKE * spread[place] / spread.max()) ** 2
            number = min(NUMBER_BITS, math.log2(1 + steps.sum() / step))
            most = min(number - math.log2(len(values)) + likely, _spread_over(rows[:, place], step))
            bits.append(float(share * max(0.0, most)))
        place += width
    of = np.repeat(np.arange(len(bits)), widths)
    found = np.where(_follow(rows / by, of, np.argsort(bits, kind="stable")), 0.0, bits)
    found *= _left(found, codes)
    few = np.array([bit > 0 and code.max() < LONG for bit, code in zip(found, codes, strict=True)])
    if few.any() and (most := _in_few_rows(np.stack(codes)[few].T)) < found[few].sum():
        found[few] *= most / found[few].sum()
    return tuple(found.tolist())


def _in_few_rows(rows: NDArray[np.int64]) -> float:
    """Return the bits of rows of which most are there again, the most common one aside; else infinity.

    Whatever the columns are functions of has no more: parities of seven yes/no columns were 77 bits.

    >>> every = np.arange(64)[:, None] >> np.arange(6) & 1
    >>> round(_in_few_rows(np.concatenate([every] * 4)), 1), _in_few_rows(every)
    (6.2, inf)
    """
    again = np.unique(rows, axis=0, return_counts=True)[1]
    others = np.delete(again, again.argmax())
    if 2 * others[others > 1].sum() <= others.sum() or 2 * len(others) < LONG:
        return math.inf
    return float(again @ np.log2(len(rows) / again)) / len(rows) + len(others) / (2 * len(rows) * math.log(2))


def _codes(column: NDArray[Any]) -> NDArray[np.int64]:
    """Return a number for the value that each record has of a column (n, numbers)."""
    if column.shape[1] == 1:
        column = column[:, 0]
    return np.unique(column, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _entropy(codes: NDArray[np.int64]) -> float:
    """Return the bits of a column by the values that are seen."""
    times = np.bincount(codes)
    times = times[times > 0]
    return float(times @ np.log2(len(codes) / times)) / len(codes)


def _spread_over(values: NDArray[np.float64], step: float) -> float:
    """Return the bits of a number in steps of one width: by how far apart neighbours are, or by counts.

    Few records are hardly ever in one step, so that counts alone fall short (they are after Miller and Madow,
    neighbours after Vasicek).

    >>> draw = np.random.default_rng(0).random(100)
    >>> round(_spread_over(draw, 2.0**-6), 1), round(_spread_over(np.rint(draw) + draw / 1e4, 2.0**-6), 1)
    (6.0, 1.0)
    """
    rising = np.sort(values)
    last = len(rising) - 1
    low, high = np.maximum(np.arange(last + 1) - 2, 0), np.minimum(np.arange(last + 1) + 2, last)
    apart = (rising[high] - rising[low]) * len(rising) / (high - low) / step
    counted = _codes(np.floor((rising - rising[0]) / step)[:, None])
    return max(
        float(np.log2(1 + apart).mean()),
        _entropy(counted) + float(counted.max()) / (2 * len(rising) * math.log(2)),
    )


def _follow(rows: NDArray[np.float64], of: NDArray[np.int64], order: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the columns that are linear functions of those before them in an order, (n columns,).

    Only as long as those before are half as many as different records: of more any column is one.

    >>> rows = np.random.default_rng(0).normal(size=(9, 2)) @ np.array([[1.0, 0, 1], [0, 1, 2]])
    >>> _follow(rows, np.arange(3), np.arange(3)).tolist()
    [False, False, True]
    """
    found = np.zeros(len(order), dtype=np.bool_)
    scaled = _scaled(np.unique(rows[: max(256, PAIRS // rows.shape[1] ** 2)], axis=0))
    basis = np.zeros((len(scaled), 0))
    for place in order:
        own = scaled[:, of == place]
        left = own - basis @ (basis.T @ own)
        if not own.any() or basis.shape[1] > len(scaled) // 2:
            continue
        if np.square(left).sum(0).max() < FOLLOWS:
            found[place] = True
            continue
        wide, size, _ = np.linalg.svd(left, full_matrices=False)
        basis = np.concatenate([basis, wide[:, size > 1e-3]], axis=1)
    return found


def _left(
    bits: NDArray[np.float64], codes: Sequence[NDArray[np.int64]], enough: float = math.inf
) -> NDArray[np.float64]:
    """Return the part of each column that is left given the one, of those with more bits, that tells most.

    Nothing is left of one that three of these determine. Numbers are compared by quarters of the records.
    What chance alone could tell is nothing.

    Args:
        bits: of each column.
        codes: of each column, (n,).
        enough: with so many bits left no further columns are looked at: all is left of these.

    >>> one, other = np.array([0, 1, 2, 3] * 9), np.array([0, 1] * 18)
    >>> [part.round(2).tolist() for part in (_left(np.array([2, 1]), [one, other]), _left(np.ones(1), [one]))]
    [[1.0, 0.0], [1.0]]
    >>> _left(np.array([2, 1]), [one, other], enough=2).tolist()
    [1.0, 1.0]
    """
    made, order = np.ones(len(bits)), [place for place in np.argsort(-bits, kind="stable") if bits[place] > 0]
    if len(order) < 2:
        return made
    short = [_quarters(codes[place]) for place in order]
    levels = np.array([int(code.max()) + 1 for code in short])
    starts, width = np.cumsum(levels) - levels, int(levels.sum())
    records = min(len(short[0]), max(256, PAIRS // width**2))
    marked = np.zeros((records, width), dtype=np.float32)
    for start, code in zip(starts, short, strict=True):
        marked[np.arange(records), start + code[:records]] = 1
    each, chance = marked.sum(0, dtype=np.float64), 4 * math.log(len(order))
    kept, found = np.ones(len(order), dtype=np.bool_), float(bits[order[0]])
    for place, (start, values) in enumerate(zip(starts, levels, strict=True)):
        if not place:
            continue
        if found >= enough:
            break
        own = slice(start, start + values)
        both = (marked[:, own].T @ marked[:, :start]).astype(np.float64)
        expected = np.outer(each[own], each[:start]) / records
        told = both * np.log2(np.divide(both, expected, out=np.ones_like(both), where=both > 0))
        told = np.add.reduceat(told.sum(0), starts[:place])  # times the records
        free = (values - 1) * (levels[:place] - 1)
        sure = told[2 * math.log(2) * told > free + 4 * np.sqrt(2 * free) + chance]
        whole = records * _entropy(short[place][:records])
        if len(sure) and whole:
            made[order[place]] = max(0.0, 1 - float(sure.max()) / whole)
        if made[order[place]] > LITTLE:
            likely = [each for each in np.argsort(-told, kind="stable") if kept[each]][:CANDIDATES]
            if _determined(*(short[each][:records] for each in (place, *likely))):
                made[order[place]] = 0.0
        kept[place] = made[order[place]] > LITTLE
        found += float(bits[order[place]] * made[order[place]])
    return made


def _determined(own: NDArray[np.int64], *others: NDArray[np.int64]) -> bool:
    """Return True if a column follows from the first of others and two more, each the one that helps most.

    Args:
        own, others: codes (n,).
    """
    if not others:
        return False
    levels = np.array([int(code.max()) + 1 for code in others])
    starts, values, records = np.cumsum(levels) - levels, int(own.max()) + 1, np.arange(len(own))
    marked = np.zeros((len(own), int(levels.sum())), dtype=np.float32)
    for start, code in zip(starts, others, strict=True):
        marked[records, start + code] = 1
    alike = -math.log2(np.square(np.bincount(own) / len(own)).sum())
    groups, whole = others[0], len(own) * _entropy(own)
    for _ in range(2):
        number = int(groups.max()) + 1
        if number * values > len(own):
            return False
        cells = np.zeros((number * values, len(own)), dtype=np.float32)
        cells[groups * values + own, records] = 1
        both = (cells @ marked).reshape(number, values, -1).astype(np.float64)
        unknown = np.add.reduceat((_weighed(both.sum(1)) - _weighed(both).sum(1)).sum(0), starts)
        best = int(unknown.argmin())
        groups = _codes((groups * levels[best] + others[best])[:, None])
        if (
            unknown[best] <= LITTLE * whole
        ):  # by chance as seldom as all records agree with one of their group
            return (len(own) - int(groups.max()) - 1) * alike > SURE
    return False


def _weighed(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return n log n."""
    return times * np.log2(np.maximum(times, 1.0))


def _quarters(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return codes of few values as they are, and of more values by quarters of the records."""
    if codes.max() < LONG:
        return codes
    return _codes(np.searchsorted(np.quantile(codes, [0.25, 0.5, 0.75]), codes)[:, None])


def _independent(rows: NDArray[np.float32], of: NDArray[np.int64]) -> int:
    """Return how many columns do not follow from others, taken from the one with the most left.

    Args:
        rows: (n, p).
        of: the column of each number, (p,).
    """
    scaled = _scaled(rows.astype(np.float64))
    if scaled.shape[1] > MOST:
        scaled, of = _scaled(_added_up(torch.from_numpy(scaled)).numpy()), np.arange(MOST)
    left = scaled.T @ scaled
    found, column = 0, -1
    while left.size:
        own = left.diagonal()
        inside = np.where(of == column, own, 0.0)  # all of a column goes before the next one counts
        if inside.max() < FOLLOWS:
            if own.max() < FOLLOWS:
                break
            found, inside = found + 1, own
        place = inside.argmax()
        column, pivot = of[place], left[place] / np.sqrt(own[place])
        left -= np.outer(pivot, pivot)
    return found


def _shortened(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch as rows; those of more than one axis, which have one unit, as long as is counted."""
    rows = batch.flatten(1)
    return _added_up(rows) if batch.dim() > 2 else rows


def _scaled(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return columns of mean 0 and length 1."""
    centred = rows - rows.mean(0)
    return centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-300)


def _added_up(rows: torch.Tensor) -> torch.Tensor:
    """Return sums (n, ``MOST``) of columns (n, p), every other one less, in an order that never changes.

    What all columns share, as a picture's brightness, cancels.
    """
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))
    sign = 1 - 2 * (order // MOST % 2)
    return rows.new_zeros(len(rows), MOST).index_add_(1, order % MOST, rows * sign)
