"""How many different records a silo has, for the rule on exact sums of features.

A record that is there nine times adds no rank to a sum of products and no value to a class sum. So an
exchange before such a sum counts rows: of each class, and in all, where each is once, in the first class
that has it. They are rows of *inputs*, as the hospital reads them: who writes the job shapes features, and
with features that are zero for all but some patients their different rows are the number of these. Each row
is worth as many values as a record of its class has (``record_values``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from tightframe.learning.products import ALL_VALUES, COUNTED, VALUES
from tightframe.learning.record_values import MOST
from tightframe.phases import (
    Cohort,
    Contribution,
    Field,
    Phase,
    Schema,
    ServerState,
    SiloView,
    Tensors,
    Totals,
)

MOST_VALUES = 2.0**31
"""Values of a silo that are counted at most: a sum of a hundred silos fits into its ring."""
BITS = 24
"""Fraction bits of a feature in a sum of a frozen map. Inputs that differ in less are one row."""


class DistinctRows:
    """Rows seen so far, by class.

    Args:
        classes: C.
    """

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


def count_fields(counts: Field) -> dict[str, Field]:
    """Return the fields of what is counted, by its name in the server's state.

    Args:
        counts: field for the numbers of rows (C,), of a name that ends in ``counts``.
    """
    stem, bound = counts.name.removesuffix("counts"), min(counts.bound * MOST, MOST_VALUES)
    values, every = (replace(counts, name=stem + n, bound=bound, bits=0) for n in ("values", "all_values"))
    return {COUNTED: counts, VALUES: values, ALL_VALUES: every}


def counted(found: DistinctRows, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what is counted, by its name in the server's state, each float64 (C,).

    Args:
        values: of a record of each class (C,); of a class at least one counts, so that one with records is
            seen to have some.
    """
    rows = {VALUES: found.by_class, ALL_VALUES: found.counts}
    return {COUNTED: found.counts} | {
        name: (number * values).floor().clamp_max(MOST_VALUES).maximum(number.clamp_max(1))
        for name, number in rows.items()
    }


def opened_counts(fields: Mapping[str, Field], totals: Totals) -> dict[str, torch.Tensor]:
    """Return what the server's state keeps of an opened total of ``count_fields``."""
    return {key: torch.as_tensor(totals[item.name], dtype=torch.float64) for key, item in fields.items()}


def counts_phase(counts: Field) -> Phase:
    """Return the exchange before a sum of features: of how many different rows of each class it will be.

    Args:
        counts: see ``count_fields``.
    """
    fields = count_fields(counts)

    def contribute(silo: SiloView, received: Tensors, state: Tensors) -> Contribution:
        classes = silo.setting.num_classes
        found, values = DistinctRows(classes), torch.zeros(classes, dtype=torch.float64)
        if silo.offers_prototypes:
            values = silo.record_values()
            found.add(*silo.rows())
        return Contribution({fields[key].name: made for key, made in counted(found, values).items()}, None)

    def keep(state: ServerState, totals: Totals, cohort: Cohort) -> ServerState:
        return state.evolve(extra={**state.extra, **opened_counts(fields, totals)})

    return Phase("counts", Schema(tuple(fields.values())), lambda state: {}, contribute, keep)
