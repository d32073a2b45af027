"""Count the distinct records of the silos, for the rule on exact sums of features.

A record with nine copies adds no rank to a sum of products, and no value to a class sum. So an exchange
before such a sum counts distinct rows: of each class, and in all, where each row counts in the first class
that has it. Rows are of *inputs*, as the hospital reads them: features are the job's, which could make them
zero for all but some patients, and a count of distinct features would then tell the number of these. The same
exchange carries flags of silos that alone have enough values of a class (``products``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from tightframe.learning.few_records.products import ALONE, COUNTED, ENOUGH, ROWS
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    OwnRows,
    Phase,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)

BITS = 24
"""Fraction bits of a feature in a sum of a frozen map. Inputs that differ by less are one row."""


class DistinctRows:
    """Collect the distinct rows of each class."""

    def __init__(self, classes: int) -> None:
        self._rows = [set[bytes]() for _ in range(classes)]

    def add(self, rows: Iterable[bytes], labels: torch.Tensor) -> None:
        """Add rows, as ``row_digests``, with their labels (B,)."""
        for row, label in zip(rows, labels.tolist(), strict=True):
            self._rows[label].add(row)

    @property
    def by_class(self) -> torch.Tensor:
        """Number of distinct rows of each class, float64 (C,)."""
        return torch.tensor([float(len(rows)) for rows in self._rows], dtype=torch.float64)

    @property
    def counts(self) -> torch.Tensor:
        """Number of distinct rows, each counted in the first class that has it, float64 (C,).

        >>> rows = DistinctRows(2)
        >>> rows.add(row_digests(torch.tensor([[0.5], [0.5], [0.25], [0.5]])), torch.tensor([0, 0, 1, 1]))
        >>> rows.counts.tolist()
        [1.0, 1.0]
        """
        counted, counts = set[bytes](), []
        for rows in self._rows:
            counts.append(float(len(rows - counted)))
            counted |= rows
        return torch.tensor(counts, dtype=torch.float64)


def row_digests(inputs: torch.Tensor) -> list[bytes]:
    """Return a digest, 16 bytes, of each record's inputs (B, ...), equal for inputs that agree to 2^-24."""
    rows = inputs.detach().cpu().flatten(1).to(torch.float32)
    steps = (rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * 2.0**BITS).round() + 0.0  # no -0
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in steps.numpy()]


def units(features: torch.Tensor, radius: float) -> torch.Tensor:
    """Return ``phi = h / max(R, |h|)`` as integers, in multiples of 2^-24, float64; 0 for values not finite.

    Args:
        features: h (B, d).
        radius: R.
    """
    wide = features.detach().to(torch.float64).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    lengths = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return (wide / lengths.clamp_min(radius) * 2.0**BITS).round()


def own_rows(rows: DistinctRows, values: torch.Tensor) -> OwnRows:
    """Return a silo's numbers of rows, with the number of ``values`` of a record of each class (C,)."""
    return OwnRows(rows.counts, rows.by_class, values)


def counted(own: OwnRows, width: int) -> dict[str, torch.Tensor]:
    """Return a silo's numbers of rows and its flags, by their names in the server's state, float64 (C,).

    Args:
        width: d, of the features.
    """
    enough = (own.by_class > 0) & (own.by_class * own.values >= ALONE * width)
    return {COUNTED: own.counts, ROWS: own.by_class, ENOUGH: enough.to(torch.float64)}


def count_fields(counts: Field) -> dict[str, Field]:
    """Return the fields of these numbers and flags, by their names in the server's state.

    Args:
        counts: field of the numbers of rows (C,); its name must end in ``counts``.
    """
    stem = counts.name.removesuffix("counts")
    enough = replace(counts, name=stem + "enough", bound=1.0, bits=0)
    return {COUNTED: counts, ROWS: replace(counts, name=stem + "rows"), ENOUGH: enough}


def opened_counts(fields: Mapping[str, Field], totals: Totals, cohort: Cohort) -> dict[str, torch.Tensor]:
    """Return the opened totals of ``count_fields``, by their names in the server's state."""
    cohort.check_flags(totals, [fields[ENOUGH].name])
    opened = {key: torch.as_tensor(totals[item.name], dtype=torch.float64) for key, item in fields.items()}
    if cohort.failed:  # a silo that fails sets its flags by the classes that it holds
        opened[ENOUGH] = torch.zeros_like(opened[ENOUGH])
    return opened


def counts_phase(counts: Field, width: int) -> Phase:
    """Return the exchange before a sum of features, which counts the distinct rows of each class in it.

    Args:
        width: d, of the features.
    """
    fields = count_fields(counts)

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        none = torch.zeros(silo.setting.num_classes, dtype=torch.float64)
        own = silo.own_rows() if silo.offers_prototypes else OwnRows(none, none, none)
        return Contribution({fields[key].name: value for key, value in counted(own, width).items()}, None)

    def keep(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        return state.evolve(extra={**state.extra, **opened_counts(fields, totals, cohort)})

    return Phase("counts", Schema(tuple(fields.values())), lambda state: {}, contribute, keep)
