"""Classes that too few of a simulation's sites hold for a model of one sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """Training records of each class at one site, and how many it asks of a class (``min_class_count``)."""

    counts: Sequence[int]
    least: int


def never_answered(methods: str, held: Mapping[str, Held], names: Sequence[str]) -> str:
    """Say which classes a model of one sum over these sites will never answer; empty if there are none.

    Args:
        methods: what makes the model.
        held: by site, at least one.
        names: of the classes, in the counts' order.
    """
    from tightframe.rounds.riders.class_rules import MIN_HOLDERS

    few = [
        name
        for place, name in enumerate(names)
        if sum(site.counts[place] >= site.least for site in held.values()) < MIN_HOLDERS
    ]
    low, high = (choose(site.least for site in held.values()) for choose in (min, max))
    it = "it" if len(few) == 1 else "them"
    if not few:
        return ""
    return (
        f"{', '.join(few)}: fewer than {MIN_HOLDERS} sites have {low if low == high else f'{low} to {high}'} "
        f"training records; {methods} will never answer {it}. Take more sites that have {it}, another method "
        "(fedavg) or class_rules=off, with which a class sum can be one site's."
    )
