"""Events of differential privacy: frozen values that accountants interpret.

An event says how much noise a release carried, never what epsilon that is: epsilon depends on delta,
on all other events and on the analysis, and analyses improve. ``noise_multiplier`` is the noise's
standard deviation divided by the L2 sensitivity to adding or removing one record, or one patient with
all records: the ``Neighbours`` of the charge decide which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias, get_args

from tightframe.errors import TightframeError
from tightframe.phases import Neighbours

NEIGHBOURS: tuple[Neighbours, ...] = get_args(Neighbours)

Plain: TypeAlias = str | int | float

NOISE_MULTIPLIERS = (0.01, 1e9)
"""Smallest and largest. Less noise than the smallest is epsilon 5,000 in one release: no privacy at all."""
MAX_STEPS = 10**9


class PrivacyValueError(TightframeError):
    """A value that no mechanism or budget can have (TF-700)."""

    code = "TF-700"


@dataclass(frozen=True)
class Gaussian:
    """One release of a sum in which every record takes part, with Gaussian noise.

    Attributes:
        noise_multiplier: noise standard deviation / L2 sensitivity.

    Raises:
        PrivacyValueError: TF-700.
    """

    KIND: ClassVar[str] = "gaussian"

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise(self.noise_multiplier))

    def as_value(self) -> dict[str, Plain]:
        """Return plain values."""
        return {"kind": self.KIND, "noise_multiplier": self.noise_multiplier}


@dataclass(frozen=True)
class SubsampledGaussian:
    """Steps of DP-SGD: each takes every record with the same probability, independently (Poisson).

    Attributes:
        noise_multiplier: of each step; noise standard deviation / clipping norm.
        sampling_rate: probability that a record (or patient) is in a step's batch; 1 takes all.
        steps: steps that really ran, including those with an empty batch.

    Raises:
        PrivacyValueError: TF-700.
    """

    KIND: ClassVar[str] = "subsampled_gaussian"

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _noise(self.noise_multiplier))
        object.__setattr__(self, "sampling_rate", number("sampling_rate", self.sampling_rate, 0.0, 1.0))
        object.__setattr__(self, "steps", whole("steps", self.steps, 1, MAX_STEPS))
        if self.sampling_rate == 0.0:
            raise PrivacyValueError(
                "Expected `sampling_rate` to be above 0, but got 0.0. Charge what takes part in a step."
            )

    def as_value(self) -> dict[str, Plain]:
        """Return plain values."""
        return {
            "kind": self.KIND,
            "noise_multiplier": self.noise_multiplier,
            "sampling_rate": self.sampling_rate,
            "steps": self.steps,
        }


Event: TypeAlias = Gaussian | SubsampledGaussian

_FIELDS: Mapping[str, tuple[str, ...]] = {
    Gaussian.KIND: ("noise_multiplier",),
    SubsampledGaussian.KIND: ("noise_multiplier", "sampling_rate", "steps"),
}


def with_noise(event: Event, noise_multiplier: float) -> Event:
    """Return the event with another noise multiplier."""
    return replace(event, noise_multiplier=noise_multiplier)


def from_value(value: object) -> Event:
    """Return the event with this ``as_value``.

    Raises:
        PrivacyValueError: TF-700 for anything else: an unknown event has no known cost, and must not be left
            out of a composition.
    """
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _FIELDS:
        raise PrivacyValueError(
            f"Expected an event of a kind of {sorted(_FIELDS)}, but got {_shown(kind)}. "
            "Use the version of Tightframe that wrote it, or a later one."
        )
    names = _FIELDS[kind]
    if set(value) != {"kind", *names}:
        raise PrivacyValueError(
            f"Expected the values {sorted(names)} of a {kind} event, "
            f"but got {sorted(str(key) for key in value if key != 'kind')}. Give exactly these."
        )
    if kind == Gaussian.KIND:
        return Gaussian(value["noise_multiplier"])
    return SubsampledGaussian(value["noise_multiplier"], value["sampling_rate"], value["steps"])


def as_event(value: object, name: str = "event") -> Event:
    """Return ``value`` itself if it is an event: an unknown mechanism is refused and never counted as free.

    Raises:
        PrivacyValueError: TF-700.
    """
    if not isinstance(value, Gaussian | SubsampledGaussian):
        raise PrivacyValueError(
            f"Expected `{name}` to be Gaussian or SubsampledGaussian, but got {type(value).__name__}. "
            "A mechanism of another kind cannot be accounted for."
        )
    return value


def number(name: str, value: object, least: float, most: float) -> float:
    """Check a finite number in a range, and return it as a float.

    Raises:
        PrivacyValueError: TF-700, naming it.
    """
    # bool is an int; float("nan") fails both comparisons.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise PrivacyValueError(
            f"Expected `{name}` to be a number from {least:g} to {most:g}, but got {_shown(value)}. "
            "Correct the value."
        )
    return float(value)


def whole(name: str, value: object, least: int, most: int) -> int:
    """Check a whole number in a range.

    Raises:
        PrivacyValueError: TF-700, naming it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PrivacyValueError(
            f"Expected `{name}` to be a whole number from {least} to {most}, but got {_shown(value)}. "
            "Correct the value."
        )
    return value


def checked_delta(delta: object) -> float:
    """Check delta: a float between 0 and 1, both excluded.

    Raises:
        PrivacyValueError: TF-700.
    """
    value = number("delta", delta, 0.0, 1.0)
    if value in (0.0, 1.0) or value < math.ulp(0.0) * 2**60:
        raise PrivacyValueError(
            f"Expected `delta` to be between 0 and 1, but got {value!r}. Take one over a power of the number "
            "of records, for example 1e-5."
        )
    return value


def _noise(value: object) -> float:
    return number("noise_multiplier", value, *NOISE_MULTIPLIERS)


def _shown(value: object) -> str:
    """Return a number unchanged, for anything else its type: its value must not be in a log."""
    if isinstance(value, bool | int | float):
        return repr(value)
    return "another kind" if isinstance(value, str) else type(value).__name__
