"""Entries of a site's ledger as plain values, charges and fingerprints of data, and their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, TypeAlias

import numpy as np

from tightframe.errors import TightframeError
from tightframe.phases import Neighbours
from tightframe.privacy.accounting import checked_epsilon
from tightframe.privacy.events import (
    NEIGHBOURS,
    Event,
    PrivacyValueError,
    as_event,
    checked_delta,
    whole,
)

MAX_TEXT = 200
MAX_COHORT = 1000
MAX_ATTEMPT = 10**6
SKETCH_PLACES, ALIKE = 64, 25
"""Places of a sketch, and the equal places from which sets count as the same. With 60 % of all records in
common nearly every pair of sets has that many, with half 97 of 100, with a quarter one of 100."""


class LedgerError(TightframeError):
    """The ledger cannot be used: missing, not writable, damaged, or of another version (TF-704)."""

    code = "TF-704"


class LostError(LedgerError):
    """A ledger existed and is lost; only a person may begin a new one (TF-620)."""

    code = "TF-620"


class TamperError(TightframeError):
    """The ledger was altered (TF-702).

    Args:
        message: the expected and the actual value.
        entry: number of the first wrong entry; None if no single entry is wrong.
    """

    code = "TF-702"

    def __init__(self, message: str, *, entry: int | None = None) -> None:
        self.entry = entry
        super().__init__(message)


class DatasetError(TightframeError):
    """The same records are known under another ``dataset_id`` (TF-703)."""

    code = "TF-703"


class RepeatError(TightframeError):
    """A charge was made before, or too often (TF-705)."""

    code = "TF-705"


class NeighboursError(TightframeError):
    """A data set's charges use another neighbouring relation (TF-706)."""

    code = "TF-706"


@dataclass(frozen=True)
class Charge:
    """A request to charge a release to a data set.

    Attributes:
        job_id: the run's id.
        job_name: for people.
        purpose: purpose, in words of the site's own code: "round 3 training". With the job's id it identifies
            the charge that another one retries.
        attempt: distinguishes repeats of one purpose: newly drawn noise is a new attempt.
        dataset_id: the site's own name of the records.
        neighbours: whom the event protects, a record or a patient.
        event: of the release while the assumed number of silos adds noise.
        cohort: the silos whose terms are summed, this one included.
        alone: event if no other silo adds noise; None where the site adds all of the noise.

    Raises:
        PrivacyValueError: TF-700.
    """

    KIND: ClassVar[str] = "charge"

    job_id: str
    job_name: str
    purpose: str
    attempt: int
    dataset_id: str
    neighbours: Neighbours
    event: Event
    cohort: tuple[str, ...]
    alone: Event | None = None

    def __post_init__(self) -> None:
        for name in ("job_id", "job_name", "purpose", "dataset_id"):
            _text(name, getattr(self, name))
        whole("attempt", self.attempt, 0, MAX_ATTEMPT)
        checked_neighbours(self.neighbours)
        as_event(self.event)
        if self.alone is not None:
            as_event(self.alone, "alone")
        if not isinstance(self.cohort, tuple) or not 1 <= len(self.cohort) <= MAX_COHORT:
            raise PrivacyValueError(
                f"Expected `cohort` to be a tuple of 1 to {MAX_COHORT} silos, but got another value."
            )
        for name in self.cohort:
            _text("cohort", name)

    @property
    def key(self) -> tuple[str, str, int]:
        """Key of a charge, which can be made once."""
        return self.job_id, self.purpose, self.attempt

    def as_value(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "job_id": self.job_id,
            "job_name": self.job_name,
            "purpose": self.purpose,
            "attempt": self.attempt,
            "dataset_id": self.dataset_id,
            "neighbours": self.neighbours,
            "event": self.event.as_value(),
            "alone": None if self.alone is None else self.alone.as_value(),
            "cohort": list(self.cohort),
        }


@dataclass(frozen=True)
class DataNoted:
    """A fingerprint of the records named by a ``dataset_id``.

    Attributes:
        sketch: a byte for each place, hexadecimal; the more records two sets have in common, the more places
            are equal (``data.content``). Empty if there is none.
        columns: the same for combinations of columns, or for pictures' looks, as of ``data.columns.marked``;
            None in older entries.

    Raises:
        PrivacyValueError: TF-700.
    """

    KIND: ClassVar[str] = "data"

    dataset_id: str
    fingerprint: str
    sketch: str = ""
    columns: str | None = None

    def __post_init__(self) -> None:
        _text("dataset_id", self.dataset_id)
        for digits, lengths in (
            (self.fingerprint, range(32, 129)),
            (self.sketch, (0, 2 * SKETCH_PLACES)),
            (self.columns or "", (0, *range(16, 2**15, 2 * SKETCH_PLACES))),
        ):
            if isinstance(digits, str) and len(digits) in lengths and set(digits) <= set(_HEX):
                continue
            raise PrivacyValueError(
                "Expected `fingerprint` to be 32 to 128 lower-case hexadecimal digits, `sketch` none or "
                f"{2 * SKETCH_PLACES}, and `columns` none or 16 and as many for each combination, but got "
                "another text. Give a hash of the records."
            )

    def as_value(self) -> dict[str, object]:
        """Return plain values."""
        values: dict[str, object] = {"dataset_id": self.dataset_id, "fingerprint": self.fingerprint}
        values |= {"sketch": self.sketch} if self.sketch else {}  # older entries have none
        return values if self.columns is None else values | {"columns": self.columns}

    def is_like(self, other: DataNoted) -> bool:
        """Check whether two sets have about half or more of all their records in common."""
        ours, theirs = bytes.fromhex(self.sketch), bytes.fromhex(other.sketch)
        return sum(a == b for a, b in zip(ours, theirs, strict=False)) >= ALIKE  # an empty one matches none

    @property
    def secret_id(self) -> str:
        """Name of the ledger's secret that keys columns and looks; empty without one."""
        return (self.columns or "")[:16]

    def has_columns_of(self, other: DataNoted) -> bool:
        """Check whether about half or more of the columns' cells, or of pictures' looks, are the same."""
        if self.secret_id != other.secret_id:
            return False
        ours, theirs = (
            np.frombuffer(bytes.fromhex((noted.columns or "")[16:]), np.uint8).reshape(-1, 1, SKETCH_PLACES)
            for noted in (self, other)
        )
        return bool(np.any((ours == theirs.swapaxes(0, 1)).sum(axis=2) >= ALIKE))


@dataclass(frozen=True)
class Remembered:
    """Facts that the site must never forget, of any writer; the ledger does not interpret them.

    Attributes:
        facts: plain values, one mapping a fact.
        source: empty; an earlier build took facts over from a file, of which it is the SHA-256.

    Raises:
        PrivacyValueError: TF-700.
    """

    KIND: ClassVar[str] = "remembered"

    facts: tuple[Mapping[str, object], ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.facts, tuple) or not all(isinstance(fact, dict) for fact in self.facts):
            raise PrivacyValueError("Expected `facts` to be a tuple of mappings, but got another value.")
        try:
            json.dumps(self.facts, allow_nan=False)
        except (ValueError, TypeError):
            raise PrivacyValueError("Expected `facts` to be plain values, but got others.") from None
        if not isinstance(self.source, str) or len(self.source) not in (0, 64):
            raise PrivacyValueError("Expected `source` to be a SHA-256 or empty, but got another value.")

    def as_value(self) -> dict[str, object]:
        """Return plain values."""
        return {"facts": [dict(fact) for fact in self.facts], "source": self.source}


@dataclass(frozen=True)
class Begun:
    """A person restarted this ledger, or its journal, because the old one is lost.

    Attributes:
        lost: the missing files, in words.

    Raises:
        PrivacyValueError: TF-700.
    """

    KIND: ClassVar[str] = "begun"

    lost: str

    def __post_init__(self) -> None:
        _text("lost", self.lost)

    def as_value(self) -> dict[str, object]:
        """Return plain values."""
        return {"lost": self.lost}


_HEX = "0123456789abcdef"
OfRecords: TypeAlias = Charge | DataNoted
"""Contents that concern the privacy budget of a data set."""
Content: TypeAlias = OfRecords | Remembered | Begun


@dataclass(frozen=True)
class Cap:
    """Cap of a site's policy on one data set.

    Attributes:
        epsilon: of all charges together.
        delta: at which epsilon is meant.
        retries: charged retries of one job, all purposes together: charges of a purpose after its first.
        releases: purposes of one job whose charge is a plain Gaussian (class sums, counts); None for any
            number. Retries are not among them.

    Raises:
        PrivacyValueError: TF-700.
    """

    epsilon: float
    delta: float
    retries: int
    releases: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        object.__setattr__(self, "delta", checked_delta(self.delta))
        whole("retries", self.retries, 0, MAX_ATTEMPT)
        if self.releases is not None:
            whole("releases", self.releases, 0, MAX_ATTEMPT)


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Attributes:
        sequence: 1 for the first.
        time: the site's clock, UTC.
        content: of the entry.
        retry: number of earlier charges of this job and purpose.
        previous: hash of the entry before it, or the ledger's own.
        signer: SHA-256 of the certificate whose key signed it.
        hash: SHA-256 of all of the above.
    """

    sequence: int
    time: datetime
    content: Content
    retry: int
    previous: str
    signer: str
    hash: str
    signature: bytes

    @property
    def charge(self) -> Charge | None:
        """The charge, if the entry is one."""
        return self.content if isinstance(self.content, Charge) else None


def checked_neighbours(value: object) -> Neighbours:
    """Check a neighbouring relation.

    Raises:
        PrivacyValueError: TF-700.
    """
    for known in NEIGHBOURS:
        if value == known:
            return known
    raise PrivacyValueError(
        f"Expected `neighbours` to be one of {list(NEIGHBOURS)}, but got another. Say whom it protects."
    )


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
        raise PrivacyValueError(
            f"Expected `{name}` to be 1 to {MAX_TEXT} printable characters, but got another value. "
            "Give a name that people can read."
        )
