"""A silo's public declaration at enrolment: its weight, and the rules that it follows.

In a secure sum the declaration is part of the signed advertisement: all silos see the same declarations, and
a server cannot give them different weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from tightframe.data.contract import MAX_FINDINGS
from tightframe.errors import ContributionError
from tightframe.options import StrictModel
from tightframe.phases import Fold

MOST = 2.0**30
"""Largest weight of any declaration; a site's policy (``max_records``) can set a lower ceiling."""
EVALUATED: tuple[Fold, ...] = ("validation", "test")
"""Folds that evaluations count."""
OWN = "own"
"""The part that is the exact evaluation of silos' own models, in all folds."""
MAX_PARTS = 2 * (MAX_FINDINGS + 1) + 1
"""Most parts: each fold, every finding of a contract in each fold, and ``OWN``."""


class Declaration(StrictModel):
    """One silo's public declaration.

    Attributes:
        weight: its public weight, by the job's rule.
        synthetic: whether its records are the synthetic twin.
        profile: of its policy.
        min_class_count: least number of patients of a class with which it takes part in that class.
        any_static_cohort: whether it opens counts for any cohort.
        untold: parts that it leaves out of exact evaluations, because they have too few records: folds, and
            findings of a fold by their place, ``test/2``; and ``OWN``.
    """

    weight: float = Field(gt=0, le=MOST)
    synthetic: bool
    profile: str = Field(max_length=32, pattern=r"^[a-z_]+$")
    min_class_count: int = Field(ge=1, lt=2**31)
    any_static_cohort: bool
    untold: tuple[Annotated[str, Field(pattern=r"^(own|(validation|test)(/(0|[1-9][0-9]{0,3}))?)$")], ...] = (
        Field(max_length=MAX_PARTS)
    )

    @field_validator("untold")
    @classmethod
    def _once(cls, untold: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(untold)) < len(untold):
            raise ValueError("Expected each part once, but one is named twice.")
        return untold

    def to_bytes(self) -> bytes:
        """Serialise as JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, raw: object, site: str) -> Declaration:
        """Read and validate a silo's declaration.

        Raises:
            ContributionError: TF-403, naming the silo.
        """
        try:
            if not isinstance(raw, bytes):
                raise TypeError
            return cls.model_validate_json(raw)
        except (ValidationError, TypeError):
            raise ContributionError(
                f"Expected {site} to declare its weight and rules, but got something else: it runs another "
                "package version."
            ) from None

    def check_weight(self, site: str, how: str, most: int | None = None) -> None:
        """Refuse a weight that is impossible by the job's rule, or too large.

        Args:
            site: name of the silo that declared it.
            how: the job's rule, a key of ``WEIGHTS``.
            most: largest number of records accepted; None for no limit below ``MOST``.

        Raises:
            ContributionError: TF-631, naming the silo.
        """
        if public_weight(int(self.weight), how) != self.weight:
            raise ContributionError(
                f"Expected {site} to declare a weight by the job's rule ({WEIGHTS[how]}), but got "
                f"{self.weight:g}: it does not follow the job, so run the job without it.",
                code="TF-631",
            )
        if most is not None and self.weight > most:
            raise ContributionError(
                f"Expected {site} to declare at most {most} records (`max_records`), but got "
                f"{self.weight:g}: if it really has that many, raise the limit in this site's policy.",
                code="TF-631",
            )


def applied_weights(declared: Mapping[str, Declaration], share: float) -> dict[str, float]:
    """Return the weights that a sum applies: as declared, but capped at a share of their sum.

    Larger weights are lowered to the common level at which each has exactly that share, so that a large
    honest centre can take part while a silo that lies about its size cannot replace the model. Server and
    silos compute the same weights from the same declarations, bit for bit.

    Args:
        declared: of the silos enrolled.
        share: the job's ``max_weight_share``; at 1/n or less, with n silos, all have the same weight.

    >>> some = {"synthetic": True, "profile": "research", "min_class_count": 1, "untold": ()}
    >>> of = lambda weight: Declaration(weight=weight, any_static_cohort=False, **some)
    >>> applied_weights({"a": of(100.0), "b": of(200.0), "c": of(9e8)}, 0.5)
    {'a': 100.0, 'b': 200.0, 'c': 300.0}
    """
    weights = {site: item.weight for site, item in sorted(declared.items())}
    level = _level(sorted(weights.values(), reverse=True), share)
    return {site: min(weight, level) for site, weight in weights.items()}


def _level(falling: list[float], share: float) -> float:
    """Return the level L at which each min(weight, L) is at most a share of their sum.

    Args:
        falling: the weights, largest first.
        share: in (0, 1].
    """
    if len(falling) * share > 1:
        for lowered, weight in enumerate(falling):
            # With this many lowered to L: L = share * (lowered * L + the others' sum).
            level = share * math.fsum(falling[lowered:]) / (1 - lowered * share)
            if weight <= level:
                return falling[0] if lowered == 0 else level
    return falling[-1]


def tells(declared: Declaration, part: str) -> bool:
    """Check whether a silo's records are in a part of an exact evaluation; see ``Declaration.untold``."""
    return part not in declared.untold and part.partition("/")[0] not in declared.untold


def tellers(declared: Iterable[Declaration]) -> dict[str, int]:
    """Return the number of silos whose records are in each fold, and in each part that a silo leaves out."""
    silos = list(declared)
    parts = dict.fromkeys([*EVALUATED, *sorted({part for item in silos for part in item.untold})])
    return {part: sum(tells(item, part) for item in silos) for part in parts}


WEIGHTS: Mapping[str, str] = {
    "exact": "training records",
    "power_of_two": "training records, rounded down to a power of two",
    "uniform": "one each",
}
"""Description of each rule for public weights."""


def public_weight(records: int, how: str) -> float:
    """Return a silo's public weight: exact count, count rounded down to a power of two, or 1.

    >>> public_weight(300, "exact"), public_weight(300, "power_of_two"), public_weight(300, "uniform")
    (300.0, 256.0, 1.0)
    """
    if how == "uniform":
        return 1.0
    if how == "power_of_two":
        return float(2 ** (max(records, 1).bit_length() - 1))
    return float(records)
