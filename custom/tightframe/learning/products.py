"""How many records must stand behind exact sums of features and of their products, and how many surely do.

The sum of ``phi phi^T`` over n records has rank n at most. With a width d above n its null space vanishes at
the records' features and hardly elsewhere, so that records are found by least squares from random starts. So
such a sum needs, of the records surely in it,

1. ``n >= m d``: full rank with a margin, and so no null space to search;
2. ``d (d + 1) / 2 + C d <= n p``: no more numbers than the records have values, with p values of a record.

What silos declare is public, and up to c of them may lie. All declared numbers but the c largest add up to no
more than what the honest silos have, whoever lies: the honest silos' own are at least as many numbers, and
none of them is above its records. But they hold records that do not count: those of classes withheld by the
class rules, and repeats (``distinct_rows``). So an exchange before the sum counts the different rows that do.

The sum of ``phi`` itself over the n_c records of a class is d numbers of them. With as many as the records
have values, the records are found from it alone. So of each class, by the opened count,

3. ``m d <= n_c p``: m times fewer numbers than values.

No colluders' share comes off here: a rare class would never pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COUNTED = "products/counts"
"""In ``ServerState.extra``: the opened numbers of different rows of each class in a sum of features (C,)."""
LEAVING, LOSING = "products/leaving", "products/losing"
"""In a withdrawal: how many of these leave, and of which classes (C,)."""


@dataclass(frozen=True)
class Sizes:
    """Public numbers of records behind a sum.

    Attributes:
        declared: of all silos enrolled, as they declare them.
        colluding: the most that silos who may lie can have in it: the c largest declared numbers.
    """

    declared: float
    colluding: float

    @classmethod
    def of(cls, declared: Mapping[str, float], colluders: int) -> Sizes:
        """Return the sizes from each silo's declared number of records, of which ``colluders`` may be false.

        >>> Sizes.of({"a": 300.0, "b": 200.0, "liar": 1e6}, 1).sure()
        500.0
        """
        falling = sorted(declared.values(), reverse=True)
        return cls(sum(falling), sum(falling[:colluders]))

    def sure(self, counted: float | None = None) -> float:
        """Return how many records of honest silos are surely in a sum.

        Args:
            counted: the opened number of records that the sum is of; None if it is not known.

        >>> Sizes.of({"a": 300.0, "b": 200.0, "c": 100.0}, 1).sure(450.0)
        150.0
        """
        known = self.declared if counted is None else min(counted, self.declared)
        return max(0.0, known - self.colluding)


@dataclass(frozen=True)
class Products:
    """An exact sum of products of features.

    Attributes:
        width: d, of the features.
        classes: C; sums of features by class are opened with the products.
        values: p, numbers of one record.
    """

    width: int
    classes: int
    values: int

    @property
    def numbers(self) -> int:
        """How many numbers are opened."""
        return self.width * (self.width + 1) // 2 + self.classes * self.width

    def allowed(self, records: float, factor: int) -> bool:
        """Check whether they may be summed over so many records.

        Args:
            records: n, those surely in the sum.
            factor: m, ``records_per_feature`` of a site's policy; 0 allows any.

        >>> Products(64, 2, 13).allowed(216, 2), Products(64, 2, 13).allowed(127, 2)
        (True, False)
        >>> Products(100, 2, 13).allowed(216, 2)  # 5,250 numbers of 2,808 values
        False
        """
        if factor == 0:
            return True
        return records >= factor * self.width and self.numbers <= records * self.values

    def widest(self, records: float, factor: int) -> int:
        """Return the largest width that is allowed for so many records; 0 for none."""
        widths = range(self.width, 0, -1)
        fits = (Products(width, self.classes, self.values).allowed(records, factor) for width in widths)
        return next((width for width, fit in zip(widths, fits, strict=True) if fit), 0)


@dataclass(frozen=True)
class ClassSums:
    """An exact sum of features by class.

    Attributes:
        width: d, of the features.
        values: p, numbers of one record.
    """

    width: int
    values: int

    def allowed(self, records: float, factor: int) -> bool:
        """Check whether features may be summed over so many records of a class.

        Args:
            records: n_c.
            factor: m, as for products; 0 allows any.

        >>> ClassSums(312, 13).allowed(48, 2), ClassSums(313, 13).allowed(48, 2)
        (True, False)
        """
        return factor == 0 or factor * self.width <= records * self.values

    def widest(self, records: float, factor: int) -> int:
        """Return the largest width that is allowed for so many records, up to this one."""
        return self.width if factor == 0 else min(self.width, int(records * self.values // factor))
