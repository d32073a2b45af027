"""How many different records a silo has, for the rule on exact sums of features.

A record that is there nine times adds no rank to a sum of products and no value to a class sum. So an
exchange before such a sum counts rows: of each class, and in all, where each is once, in the first class
that has it. They are rows of *inputs*, as the hospital reads them: who writes the job shapes features, and
with features that are zero for all but some patients their different rows are the number of these. With them
go flags of silos that alone have enough values of a class (``products``).
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
"""Fraction bits of a feature in a sum of a frozen map. Inputs that differ in less are one row."""


class DistinctRows:
    """Rows seen so far, by class."""

    def __init__(self, classes: int) -> None:
        self._of = [set[bytes]() for _ in range(classes)]

    def add(self, rows: Iterable[bytes], labels: torch.Tensor) -> None:
        """Note digests of rows, as ``row_digests`` has them, and their labels (B,)."""
        for row, label in zip(rows, labels.tolist(), strict=True):
            self._of[label].add(row)

    @property
    def by_class(self) -> torch.Tensor:
        """Numbers of different rows of each class, float64 (C,)."""
        return torch.tensor([float(len(own)) for own in self._of], dtype=torch.float64)

    @property
    def counts(self) -> torch.Tensor:
        """Numbers of different rows, each in the first class that has it, float64 (C,).

        >>> rows = DistinctRows(2)
        >>> rows.add(row_digests(torch.tensor([[0.5], [0.5], [0.25], [0.5]])), torch.tensor([0, 0, 1, 1]))
        >>> rows.counts.tolist()
        [1.0, 1.0]
        """
        seen, found = set[bytes](), []
        for own in self._of:
            found.append(float(len(own - seen)))
            seen |= own
        return torch.tensor(found, dtype=torch.float64)


def row_digests(inputs: torch.Tensor) -> list[bytes]:
    """Return 16 bytes for each record's inputs (B, ...), the same where they agree to 2^-24."""
    found = inputs.detach().cpu().flatten(1).to(torch.float32)
    whole = (found.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * 2.0**BITS).round() + 0.0  # no -0
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in whole.numpy()]


def units(features: torch.Tensor, radius: float) -> torch.Tensor:
    """Return ``phi = h / max(R, |h|)`` in whole multiples of 2^-24, float64; zeros for what is not finite.

    Args:
        features: h (B, d).
        radius: R.
    """
    wide = features.detach().to(torch.float64).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    lengths = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return (wide / lengths.clamp_min(radius) * 2.0**BITS).round()


def own_rows(found: DistinctRows, values: torch.Tensor) -> OwnRows:
    """Return a silo's numbers of rows, with the ``values`` of a record of each class (C,)."""
    return OwnRows(found.counts, found.by_class, values)


def counted(own: OwnRows, width: int) -> dict[str, torch.Tensor]:
    """Return what is opened, by its name in the server's state, each float64 (C,).

    Args:
        width: d, of the features.
    """
    enough = (own.by_class > 0) & (own.by_class * own.values >= ALONE * width)
    return {COUNTED: own.counts, ROWS: own.by_class, ENOUGH: enough.to(torch.float64)}


def count_fields(counts: Field) -> dict[str, Field]:
    """Return the fields of what is counted, by its name in the server's state.

    Args:
        counts: field for the numbers of rows (C,), of a name that ends in ``counts``.
    """
    stem = counts.name.removesuffix("counts")
    enough = replace(counts, name=stem + "enough", bound=1.0, bits=0)
    return {COUNTED: counts, ROWS: replace(counts, name=stem + "rows"), ENOUGH: enough}


def opened_counts(fields: Mapping[str, Field], totals: Totals, cohort: Cohort) -> dict[str, torch.Tensor]:
    """Return what the server's state keeps of an opened total of ``count_fields``."""
    cohort.check_flags(totals, [fields[ENOUGH].name])
    opened = {key: torch.as_tensor(totals[item.name], dtype=torch.float64) for key, item in fields.items()}
    if cohort.failed:  # whose flags say no more than which classes it holds
        opened[ENOUGH] = torch.zeros_like(opened[ENOUGH])
    return opened


def counts_phase(counts: Field, width: int) -> Phase:
    """Return the exchange before a sum of features: of how many different rows of each class it will be.

    Args:
        width: d, of the features.
    """
    fields = count_fields(counts)

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        none = torch.zeros(silo.setting.num_classes, dtype=torch.float64)
        own = silo.own_rows() if silo.offers_prototypes else OwnRows(none, none, none)
        return Contribution({fields[key].name: made for key, made in counted(own, width).items()}, None)

    def keep(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        return state.evolve(extra={**state.extra, **opened_counts(fields, totals, cohort)})

    return Phase("counts", Schema(tuple(fields.values())), lambda state: {}, contribute, keep)
