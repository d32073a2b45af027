"""Norms of the silos' updates in one round, as a histogram over silos."""

from __future__ import annotations

from tightframe.results.files import Values
from tightframe.results.words import plural


class NormBin(Values):
    """Number of silos whose update has a norm above ``above`` and up to ``up_to``; None has no end."""

    above: float
    up_to: float | None
    silos: int

    def __str__(self) -> str:
        """Describe the range.

        >>> str(NormBin(above=6.25, up_to=25.0, silos=3)), str(NormBin(above=100.0, up_to=None, silos=1))
        ('6.25 to 25', 'above 100')
        """
        return f"above {self.above:.3g}" if self.up_to is None else f"{self.above:.3g} to {self.up_to:.3g}"


class UpdateNorms(Values):
    """Norms of the silos' updates before they were rescaled.

    Attributes:
        limit: the job's ``update_norm``, to which longer ones were rescaled.
        histogram: the ranges with silos in them, in order.
        apart: whether one silo lies above all others with an empty range between, or more than one.
    """

    limit: float
    histogram: tuple[NormBin, ...]
    apart: bool

    def __str__(self) -> str:
        """Describe them in one line."""
        ranges = ", ".join(f"{plural(item.silos, 'silo')} {item}" for item in self.histogram)
        return f"update norms (limit {self.limit:g}): {ranges}"

    @property
    def rescaled(self) -> int:
        """Number of silos whose update was longer than the limit."""
        return sum(item.silos for item in self.histogram if item.up_to is None)
