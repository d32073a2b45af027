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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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
    rows, found, every, bits = np.unique(rows, axis=0), np.unique(of), 0.0, 0.0
    short = list[int]()
    for column in found:
        values = len(np.unique(rows[:, of == column], axis=0))
        real = values > SHORT and 2 * values > len(rows)
        every += math.inf if real else math.log2(values)
        if values < LONG and not real:
            bits += math.log2(values)
            short.append(int(column))
        if bits >= POSSIBLE_BITS:
            return len(found), 0.0, []
    return (every / NUMBER_BITS if every < POSSIBLE_BITS else len(found)), bits, short


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
    one (three laboratory values with 25 times their range hid none of ten yes/no columns). Several numbers
    with an eighth of it hide hardly more than one: below a quarter they count by their variance. Values of
    which most records have one count by their entropy, as most rows of rare columns are too unlikely to hide
    any (of 37 drugs that 5 % have, 200 of 709 records were found).

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
    rows, bits, place = torch.cat(read).numpy().astype(np.float64), list[float](), 0
    deviation = rows.std(0)
    by = np.where(deviation > 0, deviation, 1.0) if scale is None else scale.numpy()
    spread = deviation / by
    for width in columns or (1,) * rows.shape[1]:
        values, times = np.unique(rows[:, place : place + width], axis=0, return_counts=True)
        likely = float(times @ np.log2(len(rows) / times)) / len(rows)  # the entropy of what is seen
        if width > 1:
            bits.append(likely)
        elif len(values) == 1:
            bits.append(0.0)
        else:
            steps = np.diff(values[:, 0])
            seen = steps.sum() / by[place] / (spread.max() / ALIKE**3)
            most = min(steps.sum() / np.quantile(steps, 0.1), seen)
            share = min(1.0, ALIKE * spread[place] / spread.max()) ** 2
            number = min(NUMBER_BITS, math.log2(1 + most))
            bits.append(float(share * max(0.0, number - math.log2(len(values)) + likely)))
        place += width
    return tuple(bits)


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
