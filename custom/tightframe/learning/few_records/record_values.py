"""Count the unknown numbers of a record, as far as the hospital that holds it can be sure of them.

A record can have many more inputs than unknown numbers: a level of a category that no record has, a column
that is the same in all records, one that follows from others, a picture that was scaled up. Whoever writes a
job could add any number of these. So a hospital counts, on its own records of a class, only columns that

1. differ from the most common value in ``min_class_count`` records at least (of few records, in half);
2. are no linear function of others, except for 1/1000 of their variance.

A table's column counts once, however many numbers encode its levels. Inputs of more than 512 numbers are
first added up to 512, each with a sign, in one order for all records, which creates no number that was not
there. Of n records at most n - 1 numbers are seen.

**Columns of few values.** A sum over records is a sum over *possible* rows, of which few occur: non-negative
least squares finds the records from two or three equations a record, however many columns of few values they
have (339 of 339 records of ten yes/no columns; 48 of 48 of ten and a real one). So such columns are worth
their bits alone, unless they have 2^32 possible rows or more; so is a whole record with fewer possible rows.

**Spread.** Features mix columns by their spread, which a contract's ranges decide: if one column has a range
of 100, and eleven others ranges a million times theirs, any features are features of the first alone (its
values of 71 of 71 patients were read from 426 class sums). False moments of one silo do the same where the
model standardises. So columns with spreads s, as the model gets them, count as ``(sum of s)^2 / (sum of
s^2)``: all of them if they are alike, one if one is far above the others.

**Tables with few possible rows.** If all possible rows can be written down, records are read from the total
of one round of training, too (195 of 268 distinct records of ten yes/no columns, with label); see
``column_bits``.

**Dependent columns.** A column counts only for what the one other column that tells most of it leaves unknown
(``_left``; Chow and Liu, IEEE Transactions on Information Theory 14, 1968), and not at all if three others
determine it: with ten copies of each, or opposites, seven yes/no columns counted as 77 bits, and all 91 test
records were read from one job. Nor does a linear function of columns with fewer bits count (``_follow``),
such as a score of them. Where most rows of the columns of few values occur more than once, these columns have
the bits of the rows (``_in_few_rows``).
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
"""Most numbers that are counted. Products need two records a feature, so that more numbers would matter only
from 2,000 features on."""
PICTURES, ROWS = 640, 2**14
"""Number of records that are read, the first ones: of pictures slightly more than ``MOST``; of tables many,
so that rare values occur."""
POSSIBLE_BITS, NUMBER_BITS = 32, 24
"""Bits of a row below which all possible rows can be written down; bits of a number in a sum of features."""
SHORT, LONG = 3, 16
"""Number of values in a class from which on a column is one of numbers: more than ``SHORT`` if most records
differ in it, else ``LONG``."""
ALIKE = 4
"""Columns whose spread is at least 1 / ``ALIKE`` of the largest count as alike: nothing was read at a third
of it, and hardly more than by chance at an eighth."""
FOLLOWS = 1e-3
"""A column follows from others if a smaller fraction of its variance is left given these."""
CANDIDATES, LITTLE, SURE = 64, 0.05, 40
"""Number of columns, those that alone tell most of a column, among which three are looked for that determine
it; fraction of its bits that they may leave; and bits from which on this cannot be chance."""
PAIRS = 2**32
"""Most multiplications for the dependence between columns; with more columns fewer records are read."""


def most_values(shape: Sequence[int], columns: Sequence[int]) -> int:
    """Return the most numbers that a record of a job can count as.

    Args:
        shape: of a record's inputs.
        columns: how many of the inputs encode each column of a table; empty if each input is a column.

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
        columns: see ``most_values``; empty for pictures.
        least: number of records in which a column must differ; half of them if they are few.
        scale: divisor that the model applies to each input, (p,); None if neither job nor silos set one:
            columns then count alike.

    >>> rows = torch.tensor([[0.0, 0, 5], [1, 2, 5], [4, 8, 5], [9, 18, 5]])
    >>> count_values([(rows, torch.zeros(4).long())], 1, (), 2)  # one is twice another, one is the same
    tensor([1.], dtype=torch.float64)
    """
    rows_read, labels_read = _first(batches)
    values = torch.zeros(classes, dtype=torch.float64)
    if not rows_read:
        return values
    rows = np.nan_to_num(torch.cat(rows_read).numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    divisor = None if scale is None else scale.numpy()
    labels, counts = torch.cat(labels_read).numpy(), dict[bytes, int]()
    column_of = np.repeat(np.arange(len(columns)), columns) if columns else np.arange(rows.shape[1])

    def independent(chosen: NDArray[np.bool_]) -> int:
        if (key := chosen.tobytes()) not in counts:
            counts[key] = _independent(rows[:, chosen], column_of[chosen])
        return counts[key]

    for label in np.unique(labels):
        of_class = rows[labels == label]
        varies = _varies(of_class, least)
        most, bits, short_columns = _levels(of_class[:, varies], column_of[varies])
        if divisor is not None:
            most = min(most, _alike(rows[:, varies] / divisor[varies], column_of[varies]))
        short = independent(varies & np.isin(column_of, short_columns))
        # Columns that follow from short ones are not counted as numbers, either.
        values[label] = min(independent(varies) - short + min(short, bits / NUMBER_BITS), most)
    return values


def _varies(rows: NDArray[np.float32], least: int) -> NDArray[np.bool_]:
    """Return a mask of the columns that differ from their most common value in enough records."""
    enough = max(1, min(least, len(rows) // 2))
    rising = np.sort(rows, axis=0)  # a value that all but fewer have is in one of these pairs twice
    varies: NDArray[np.bool_] = (rising[:enough] != rising[-enough:]).all(0)
    return varies


def _alike(rows: NDArray[np.float64], column_of: NDArray[np.int64]) -> float:
    """Return the number of columns of equal spread that features show as well as these columns."""
    spread = np.sqrt(np.bincount(column_of, weights=rows.var(0), minlength=1))
    if not spread.any():
        return 0.0
    shown = np.minimum(spread * ALIKE / spread.max(), 1.0)
    return float(shown.sum() ** 2 / np.square(shown).sum())


def _levels(rows: NDArray[np.float32], column_of: NDArray[np.int64]) -> tuple[float, float, list[int]]:
    """Measure the columns of few values of a class's records.

    Args:
        rows: of a class.
        column_of: column of each input.

    Returns:
        The most numbers that a record can count as; the bits of its columns of few values; and these columns,
        none if they have too many possible rows.
    """
    rows, columns = np.unique(rows, axis=0), np.unique(column_of)
    codes = [_codes(rows[:, column_of == column]) for column in columns]
    values = np.array([int(code.max(initial=0)) + 1 for code in codes], dtype=np.int64)
    real = (values > SHORT) & (2 * values > len(rows))
    few = (values < LONG) & ~real

    def in_bits(chosen: NDArray[np.bool_]) -> float:
        of_columns = np.log2(values[chosen])
        return float(of_columns @ _left(of_columns, list(compress(codes, chosen.tolist())), POSSIBLE_BITS))

    if (bits := in_bits(few)) >= POSSIBLE_BITS:
        return len(columns), 0.0, []
    row_bits = math.inf if real.any() else in_bits(values > 0)
    most = row_bits / NUMBER_BITS if row_bits < POSSIBLE_BITS else len(columns)
    return most, bits, columns[few].tolist()


def _first(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the first records as rows, and their labels, in batches."""
    rows, labels_read = list[torch.Tensor](), list[torch.Tensor]()
    for inputs, labels in batches:
        rows.append(_shortened(inputs.detach().to("cpu", torch.float32)))
        labels_read.append(labels.cpu())
        if sum(map(len, rows)) >= (PICTURES if inputs.dim() > 2 else ROWS):
            break
    return rows, labels_read


def column_bits(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    columns: Sequence[int],
    scale: torch.Tensor | None = None,
) -> tuple[float, ...]:
    """Return the bits of each column of a table, as far as the model tells rows apart; empty without records.

    Their sum is the bits of a possible row.

    - A column of numbers has as many values as steps go into its range. A step is the 0.1 quantile of the
      differences between neighbours, and at least a 64th of the largest spread: rows that the model hardly
      tells apart are read as one (three laboratory values with 25 times their range hid none of ten yes/no
      columns). Steps without a value in them do not count (``_spread_over``): seven numbers near 5 or 95 hid
      no more than yes and no.
    - Several columns with an eighth of the largest spread hide hardly more than one: below a quarter a column
      counts by its variance.
    - Values of which most records have one count by their entropy, as most rows of rare columns are too
      unlikely to hide any (of 37 drugs that 5 % have, 200 of 709 records were found).

    Args:
        batches: of inputs (B, p) and labels.
        columns: see ``most_values``.
        scale: see ``count_values``.

    >>> rows = torch.tensor([[0.0, 1, 20.5], [1, 1, 21], [1, 0, 24]])
    >>> columns = column_bits([(rows, torch.zeros(3))], ())  # two of yes and no, and one of some six values
    >>> [round(bits, 3) for bits in columns]
    [0.918, 0.918, 2.503]
    """
    rows_read, _ = _first(batches)
    if not rows_read:
        return ()
    rows = torch.cat(rows_read).numpy().astype(np.float64)
    deviation = rows.std(0)
    divisor = np.where(deviation > 0, deviation, 1.0) if scale is None else scale.numpy()
    return _bits_of(rows, divisor, tuple(columns) or (1,) * rows.shape[1])


def _bits_of(
    rows: NDArray[np.float64], divisor: NDArray[np.float64], widths: tuple[int, ...]
) -> tuple[float, ...]:
    """Return the bits of columns.

    Args:
        rows: (n, p).
        divisor: that the model applies to each input, (p,).
        widths: number of inputs that encode each column.
    """
    bits, codes, place = list[float](), list[NDArray[np.int64]](), 0
    spread = rows.std(0) / divisor
    for width in widths:
        codes.append(_codes(rows[:, place : place + width]))
        entropy = _entropy(codes[-1])
        if width > 1:
            bits.append(entropy)
        elif not codes[-1].any():
            bits.append(0.0)
        else:
            values = np.unique(rows[:, place])
            steps = np.diff(values)
            step = max(np.quantile(steps, 0.1), divisor[place] * spread.max() / ALIKE**3)
            share = min(1.0, ALIKE * spread[place] / spread.max()) ** 2
            number = min(NUMBER_BITS, math.log2(1 + steps.sum() / step))
            most = min(number - math.log2(len(values)) + entropy, _spread_over(rows[:, place], step))
            bits.append(float(share * max(0.0, most)))
        place += width
    column_of = np.repeat(np.arange(len(bits)), widths)
    follows = _follow(rows / divisor, column_of, np.argsort(bits, kind="stable"))
    free = np.where(follows, 0.0, bits)
    free *= _left(free, codes)
    short = np.array([bit > 0 and code.max() < LONG for bit, code in zip(free, codes, strict=True)])
    if short.any() and (most := _in_few_rows(np.stack(codes)[short].T)) < free[short].sum():
        free[short] *= most / free[short].sum()
    return tuple(free.tolist())


def _in_few_rows(rows: NDArray[np.int64]) -> float:
    """Return the bits of rows if most of them, the most common one aside, occur twice; else infinity.

    Columns have no more bits than what they are functions of: parities of seven yes/no columns counted as 77
    bits.

    >>> every = np.arange(64)[:, None] >> np.arange(6) & 1
    >>> round(_in_few_rows(np.concatenate([every] * 4)), 1), _in_few_rows(every)
    (6.2, inf)
    """
    counts = np.unique(rows, axis=0, return_counts=True)[1]
    others = np.delete(counts, counts.argmax())
    if 2 * others[others > 1].sum() <= others.sum() or 2 * len(others) < LONG:
        return math.inf
    entropy = float(counts @ np.log2(len(rows) / counts)) / len(rows)
    return entropy + len(others) / (2 * len(rows) * math.log(2))


def _codes(column: NDArray[Any]) -> NDArray[np.int64]:
    """Return a number for each record's value of a column (n, inputs), the same for the same value, (n,)."""
    if column.shape[1] == 1:
        column = column[:, 0]
    return np.unique(column, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _entropy(codes: NDArray[np.int64]) -> float:
    """Return the entropy of a column's values in bits."""
    counts = np.bincount(codes)
    counts = counts[counts > 0]
    return float(counts @ np.log2(len(codes) / counts)) / len(codes)


def _spread_over(values: NDArray[np.float64], step: float) -> float:
    """Return the bits of a number in steps of one width, by neighbours' distances or by counts.

    Few records are hardly ever in the same step, so that counts alone (after Miller and Madow) fall short;
    distances are after Vasicek.

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


def _follow(
    rows: NDArray[np.float64], column_of: NDArray[np.int64], order: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return a mask of the columns that are linear functions of earlier ones in ``order``, (columns,).

    Only as long as the earlier ones are at most half as many as distinct records: of more, any column is one.

    >>> rows = np.random.default_rng(0).normal(size=(9, 2)) @ np.array([[1.0, 0, 1], [0, 1, 2]])
    >>> _follow(rows, np.arange(3), np.arange(3)).tolist()
    [False, False, True]
    """
    follows = np.zeros(len(order), dtype=np.bool_)
    scaled = _scaled(np.unique(rows[: max(256, PAIRS // rows.shape[1] ** 2)], axis=0))
    basis = np.zeros((len(scaled), 0))
    for place in order:
        column = scaled[:, column_of == place]
        residual = column - basis @ (basis.T @ column)
        if not column.any() or basis.shape[1] > len(scaled) // 2:
            continue
        if np.square(residual).sum(0).max() < FOLLOWS:
            follows[place] = True
            continue
        vectors, sizes, _ = np.linalg.svd(residual, full_matrices=False)
        basis = np.concatenate([basis, vectors[:, sizes > 1e-3]], axis=1)
    return follows


def _left(
    bits: NDArray[np.float64], codes: Sequence[NDArray[np.int64]], enough: float = math.inf
) -> NDArray[np.float64]:
    """Return the fraction of each column's bits that the column of more bits which tells most leaves unknown.

    That is 0 for a column that three of these determine. Columns of numbers are compared by quartiles. What
    chance could explain is not taken off.

    Args:
        bits: of each column.
        codes: of each column, (n,).
        enough: once so many bits are left, the other columns are left whole.

    >>> one, other = np.array([0, 1, 2, 3] * 9), np.array([0, 1] * 18)
    >>> [part.round(2).tolist() for part in (_left(np.array([2, 1]), [one, other]), _left(np.ones(1), [one]))]
    [[1.0, 0.0], [1.0]]
    >>> _left(np.array([2, 1]), [one, other], enough=2).tolist()
    [1.0, 1.0]
    """
    unknown = np.ones(len(bits))
    order = [place for place in np.argsort(-bits, kind="stable") if bits[place] > 0]
    if len(order) < 2:
        return unknown
    short = [_quarters(codes[place]) for place in order]
    levels = np.array([int(code.max()) + 1 for code in short])
    starts, width = np.cumsum(levels) - levels, int(levels.sum())
    records = min(len(short[0]), max(256, PAIRS // width**2))
    one_hot = np.zeros((records, width), dtype=np.float32)
    for start, code in zip(starts, short, strict=True):
        one_hot[np.arange(records), start + code[:records]] = 1
    counts, chance = one_hot.sum(0, dtype=np.float64), 4 * math.log(len(order))
    kept, total = np.ones(len(order), dtype=np.bool_), float(bits[order[0]])
    for place, (start, values) in enumerate(zip(starts, levels, strict=True)):
        if not place:
            continue
        if total >= enough:
            break
        column = slice(start, start + values)
        joint = (one_hot[:, column].T @ one_hot[:, :start]).astype(np.float64)
        expected = np.outer(counts[column], counts[:start]) / records
        shared = joint * np.log2(np.divide(joint, expected, out=np.ones_like(joint), where=joint > 0))
        shared = np.add.reduceat(shared.sum(0), starts[:place])  # mutual information times the records
        free = (values - 1) * (levels[:place] - 1)
        sure = shared[2 * math.log(2) * shared > free + 4 * np.sqrt(2 * free) + chance]
        entropy = records * _entropy(short[place][:records])
        if len(sure) and entropy:
            unknown[order[place]] = max(0.0, 1 - float(sure.max()) / entropy)
        if unknown[order[place]] > LITTLE:
            likely = [other for other in np.argsort(-shared, kind="stable") if kept[other]][:CANDIDATES]
            if _determined(*(short[other][:records] for other in (place, *likely))):
                unknown[order[place]] = 0.0
        kept[place] = unknown[order[place]] > LITTLE
        total += float(bits[order[place]] * unknown[order[place]])
    return unknown


def _determined(column: NDArray[np.int64], *others: NDArray[np.int64]) -> bool:
    """Return True if a column follows from the first of others and two more, chosen greedily.

    Args:
        column, others: codes (n,).
    """
    if not others:
        return False
    levels = np.array([int(code.max()) + 1 for code in others])
    starts, values, records = np.cumsum(levels) - levels, int(column.max()) + 1, np.arange(len(column))
    one_hot = np.zeros((len(column), int(levels.sum())), dtype=np.float32)
    for start, code in zip(starts, others, strict=True):
        one_hot[records, start + code] = 1
    agreement_bits = -math.log2(np.square(np.bincount(column) / len(column)).sum())
    groups, entropy = others[0], len(column) * _entropy(column)
    for _ in range(2):
        number = int(groups.max()) + 1
        if number * values > len(column):
            return False
        cells = np.zeros((number * values, len(column)), dtype=np.float32)
        cells[groups * values + column, records] = 1
        joint = (cells @ one_hot).reshape(number, values, -1).astype(np.float64)
        unknown = np.add.reduceat((_weighed(joint.sum(1)) - _weighed(joint).sum(1)).sum(0), starts)
        best = int(unknown.argmin())
        groups = _codes((groups * levels[best] + others[best])[:, None])
        if unknown[best] <= LITTLE * entropy:
            # The chance that all records agree with another one of their group.
            return (len(column) - int(groups.max()) - 1) * agreement_bits > SURE
    return False


def _weighed(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return n log n of counts n."""
    return counts * np.log2(np.maximum(counts, 1.0))


def _quarters(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return codes of few values unchanged, and of more values the quartile of each record."""
    if codes.max() < LONG:
        return codes
    return _codes(np.searchsorted(np.quantile(codes, [0.25, 0.5, 0.75]), codes)[:, None])


def _independent(rows: NDArray[np.float32], column_of: NDArray[np.int64]) -> int:
    """Count the columns that do not follow from others, the one with the most variance left first.

    Args:
        rows: (n, p).
        column_of: column of each input, (p,).
    """
    scaled = _scaled(rows.astype(np.float64))
    if scaled.shape[1] > MOST:
        scaled, column_of = _scaled(_added_up(torch.from_numpy(scaled)).numpy()), np.arange(MOST)
    covariance = scaled.T @ scaled
    count, column = 0, -1
    while covariance.size:
        variance = covariance.diagonal()
        inside = np.where(column_of == column, variance, 0.0)  # a column is used up before the next counts
        if inside.max() < FOLLOWS:
            if variance.max() < FOLLOWS:
                break
            count, inside = count + 1, variance
        place = inside.argmax()
        column, pivot = column_of[place], covariance[place] / np.sqrt(variance[place])
        covariance -= np.outer(pivot, pivot)
    return count


def _shortened(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch as rows; inputs of more than one axis, which have one unit, are added up to ``MOST``."""
    rows = batch.flatten(1)
    return _added_up(rows) if batch.dim() > 2 else rows


def _scaled(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return columns of mean 0 and length 1."""
    centred = rows - rows.mean(0)
    return centred / np.maximum(np.linalg.norm(centred, axis=0), 1e-300)


def _added_up(rows: torch.Tensor) -> torch.Tensor:
    """Return sums (n, ``MOST``) of columns (n, p) with alternating signs, in an order that never changes.

    What all columns share, such as a picture's brightness, cancels.
    """
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))
    sign = 1 - 2 * (order // MOST % 2)
    return rows.new_zeros(len(rows), MOST).index_add_(1, order % MOST, rows * sign)
