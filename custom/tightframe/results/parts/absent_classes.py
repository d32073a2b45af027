"""What the class rules left out of a model, in words."""

from __future__ import annotations

from collections.abc import Sequence

from tightframe.results.words import sentence


def note(
    classes: Sequence[str], *, in_sums_only: bool, least: Sequence[int], holders: int, noisy: bool = False
) -> str:
    """Say which classes a model lacks, why, and what changes that.

    Args:
        in_sums_only: the model is trained and lacks class sums alone; otherwise it is one sum's, and never
            answers these.
        least: training records of a class from which each silo counts; empty without the class rules.
        holders: least number of silos.
        noisy: the sum has the noise of differential privacy.

    >>> note(["nv"], in_sums_only=False, least=[5, 5], holders=3).split(". ")[0]
    'nv is not in the model, which never answers it: fewer than 3 silos have 5 training records of it'
    """
    named, one = sentence(classes), len(classes) == 1
    it, verb = ("it", "is") if one else ("them", "are")
    what = f"{named} {verb} not in the model, which never answers {it}:"
    if in_sums_only:
        what = f"no class sum of {named} was used, because"
    if noisy:
        return f"{what} the noisy sum has too few records of {it}. Take more records, or fedavg."
    if not least:
        return f"{what} no silo gave a training record of {it}."
    low, high = min(least), max(least)
    records = f"{low}" if low == high else f"{low} to {high}"
    ways = f"Take more silos that have {it}" + (" or" if in_sums_only else ", another method (fedavg) or")
    return (
        f"{what} fewer than {holders} silos have {records} training records of "
        f"{it if one else 'each of them'}. {ways} class_rules=off, with which a class sum can be one silo's."
    )
