"""What a silo makes public of itself at enrolment: its weight, and which rules it keeps.

In a secure sum the declaration is part of the signed advertisement, so that every silo sees the
same one of every other and a server cannot give silos different weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tightframe.errors import ContributionError


class Declaration(BaseModel):
    """One silo's public facts.

    Attributes:
        weight: its public weight, by the job's rule.
        synthetic: whether its records are the synthetic twin.
        profile: of its policy.
        min_class_count: records of a class that it asks of itself before the class counts.
        any_static_cohort: whether it opens counts for any cohort.
        untold: the folds that it leaves out of exact evaluations, because they have too few records.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    weight: float = Field(gt=0, lt=2.0**40)
    synthetic: bool
    profile: str = Field(max_length=32, pattern=r"^[a-z_]+$")
    min_class_count: int = Field(ge=1, lt=2**31)
    any_static_cohort: bool
    untold: tuple[Literal["validation", "test"], ...] = Field(max_length=2)

    def to_bytes(self) -> bytes:
        """JSON."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, raw: object, site: str) -> Declaration:
        """Read and check.

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


def tellers(declared: Iterable[Declaration]) -> dict[str, int]:
    """Of how many silos each fold is in an exact evaluation."""
    found = list(declared)
    return {fold: sum(fold not in item.untold for item in found) for fold in ("validation", "test")}


WEIGHTS: Mapping[str, str] = {
    "exact": "training records",
    "power_of_two": "training records, rounded down to a power of two",
    "uniform": "one each",
}
"""What each kind of public weight is, in words."""


def public_weight(records: int, how: str) -> float:
    """The weight that the silo makes public: exact count, power-of-two bucket, or uniform.

    >>> public_weight(300, "exact"), public_weight(300, "power_of_two"), public_weight(300, "uniform")
    (300.0, 256.0, 1.0)
    """
    if how == "uniform":
        return 1.0
    if how == "power_of_two":
        return float(2 ** (max(records, 1).bit_length() - 1))
    return float(records)
