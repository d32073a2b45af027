"""Epsilon that a job has cost its silos so far, as far as they tell it."""

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
        round: up to and including which the charges count.
        promised: the most that the job may cost each silo.
        delta: of all epsilons here.
        range: above what and up to what all told epsilons lie; None if no silo tells anything.
        histogram: the ranges with silos in them, in order.
        untold: silos in the sum whose policy tells nothing.
        shown: silo -> its own epsilon, rounded up, of those that tell it.
    """

    round: int
    promised: float
    delta: float
    range: tuple[float, float] | None = None
    histogram: tuple[Bin, ...] = ()
    untold: int = 0
    shown: dict[str, float] = {}

    def __str__(self) -> str:
        """Describe it in one line."""
        text = ", ".join(self.ranges()) or "not told"
        others = self.exact()
        if self.untold and self.histogram:
            others.append(f"{plural(self.untold, 'silo')} told nothing")
        return "; ".join(
            [f"privacy spent: {text} (delta {self.delta:g}, at most {self.promised:g} promised)", *others]
        )

    def ranges(self) -> list[str]:
        """Name each range and its silos."""
        return [f"{plural(item.silos, 'silo')} up to epsilon {item.up_to:g}" for item in self.histogram]

    def exact(self) -> list[str]:
        """Name the silos that show their own epsilon, in thousandths, rounded up."""
        return [f"{site} shows {value:.3f}" for site, value in sorted(self.shown.items())]
