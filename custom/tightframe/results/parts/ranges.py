"""Ranges that silos report instead of values, as histograms over silos: update norms, spent epsilon."""

from __future__ import annotations

from tightframe.results.files import Values
from tightframe.results.words import plural


class Bin(Values):
    """Number of silos whose epsilon lies above ``above`` and up to ``up_to``."""

    above: float
    up_to: float
    silos: int


class Spent(Values):
    """Epsilon that silos reported in one round.

    Attributes:
        round: last round included in the charges.
        promised: the most that the job may cost each silo.
        delta: of all epsilons here.
        range: open lower and closed upper end of all reported epsilons; None if no silo reports.
        histogram: the ranges with silos in them, in order.
        untold: number of silos in the sum whose policy discloses nothing.
        shown: silo -> its own epsilon, rounded up, if it discloses it.
    """

    round: int
    promised: float
    delta: float
    range: tuple[float, float] | None = None
    histogram: tuple[Bin, ...] = ()
    untold: int = 0
    shown: dict[str, float] = {}

    def __str__(self) -> str:
        """Describe the spending in one line."""
        text = ", ".join(self.ranges()) or "not reported"
        others = self.exact()
        if self.untold and self.histogram:
            others.append(f"{plural(self.untold, 'silo')} reported nothing")
        return "; ".join(
            [f"privacy spent: {text} (delta {self.delta:g}, at most {self.promised:g} promised)", *others]
        )

    def ranges(self) -> list[str]:
        """Name each range and its silos."""
        return [f"{plural(item.silos, 'silo')} up to epsilon {item.up_to:g}" for item in self.histogram]

    def exact(self) -> list[str]:
        """Name the silos that show their own epsilon, in thousandths, rounded up."""
        return [f"{site} shows {value:.3f}" for site, value in sorted(self.shown.items())]


class NormBin(Values):
    """Number of silos whose update has a norm above ``above`` and up to ``up_to`` (None: unbounded)."""

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
        apart: whether one silo lies above all others, at least one empty range apart.
    """

    limit: float
    histogram: tuple[NormBin, ...]
    apart: bool

    def __str__(self) -> str:
        """Describe the norms in one line."""
        ranges = ", ".join(f"{plural(item.silos, 'silo')} {item}" for item in self.histogram)
        return f"update norms (limit {self.limit:g}): {ranges}"
