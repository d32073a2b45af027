"""What an epoch is: its parameters, the fields of its sums, and the names of those sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tightframe.securesum import reading
from tightframe.securesum.errors import MessageError
from tightframe.securesum.primitives import HASH_BYTES, Value, digest
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS, Trust

Group = Literal["update", "static"]
GROUPS: tuple[Group, ...] = ("update", "static")


@dataclass(frozen=True)
class FieldSpec(reading.Record):
    """One field of a sum: name, shape, ring (32 or 64 bits), fraction bits, bound, group."""

    name: str
    shape: tuple[int, ...]
    ring: int
    bits: int
    bound: float
    group: Group

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def as_value(self) -> dict[str, Value]:
        """Plain values, for travelling and hashing."""
        # A bound given as an integer would travel and be hashed as another value.
        return {**super().as_value(), "bound": float(self.bound)}


def read_field(value: object, where: str) -> FieldSpec:
    """Reads a field.

    Raises:
        MessageError: TF-604.
    """
    field: FieldSpec = _FIELD(value, where)
    if field.ring not in (32, 64):
        raise MessageError(f"{where}.ring", expected="32 or 64", found=str(field.ring))
    return field


_FIELD = reading.built(
    FieldSpec,
    {
        "name": reading.text(1024),
        "shape": reading.sequence(reading.integer(0, 2**40), 0, 16),
        "ring": reading.integer(32, 64),
        "bits": reading.integer(0, 1024),
        "bound": reading.number,
        "group": reading.one_of(*GROUPS),
    },
)


@dataclass(frozen=True)
class SumId:
    """Names one sum: the round, the phase (its kind and place, as ``train-0``), and the try."""

    round: int
    phase: str
    attempt: int = 0

    @classmethod
    def of(cls, kind: str, round_number: int, index: int, attempt: int) -> SumId:
        """The id of phase ``index`` among those of its kind in a round."""
        return cls(round_number, f"{kind}-{index}", attempt)

    def as_value(self) -> list[Value]:
        """Plain values, for travelling and hashing."""
        return [self.round, self.phase, self.attempt]

    def __str__(self) -> str:
        """``round/phase/try``."""
        return f"{self.round}/{self.phase}/{self.attempt}"


def read_sum_id(value: object, where: str) -> SumId:
    """Reads the id of a sum.

    Raises:
        MessageError: TF-604.
    """
    if not isinstance(value, list) or len(value) != 3:
        raise MessageError(where, expected="round, phase, try", found=reading.described(value))
    return SumId(
        reading.integer(0, 2**31)(value[0], where),
        reading.text(256)(value[1], where),
        reading.integer(0, 2**16)(value[2], where),
    )


@dataclass(frozen=True)
class Params(reading.Message):
    """S -> i: what an epoch is; each site holds it against its own rules.

    Attributes:
        job: the engine's id of the job.
        lineage: the first job of a chain of resumed ones; the job itself if it is none.
        epoch: 0 for the first setup of a job, one more for each that follows.
        roster: the sites, sorted; a site's index is its place here.
        threshold: t, shares needed to open a sum.
        colluders: c, colluding sites assumed.
        slots: K, one-time secrets a site; each sum uses one slot.
        schemas: name of a schema -> its fields in order.
        weights: public weight rule.
        trust: what the server is assumed to do.
        min_sites: the smallest survivor set.
        static_open: whether this epoch's static group may be opened, for the full roster.
        config_sha256: SHA-256 of the validated job configuration.
        version: of the package.
    """

    job: str
    lineage: str
    epoch: int
    roster: tuple[str, ...]
    threshold: int
    colluders: int
    slots: int
    schemas: Mapping[str, tuple[FieldSpec, ...]]
    weights: str
    trust: Trust
    min_sites: int
    static_open: bool
    config_sha256: bytes
    version: str

    KEYS = MappingProxyType(
        {
            "job": reading.text(256),
            "lineage": reading.text(256),
            "epoch": reading.integer(0, 2**31),
            "roster": reading.sequence(reading.text(64), 1, MAX_SITES),
            "threshold": reading.integer(1, MAX_SITES),
            "colluders": reading.integer(0, MAX_SITES),
            "slots": reading.integer(1, MAX_SLOTS),
            "schemas": reading.mapping(reading.sequence(read_field, 0, 100_000), 0, 4096),
            "weights": reading.text(64),
            "trust": reading.one_of("malicious", "semi_honest"),
            "min_sites": reading.integer(1, MAX_SITES),
            "static_open": reading.flag,
            "config_sha256": reading.blob(HASH_BYTES),
            "version": reading.text(64),
        }
    )

    @property
    def may_open_static(self) -> bool:
        """Whether any sum of this epoch has a static group, and it may be opened."""
        fields = (item for schema in self.schemas.values() for item in schema)
        return self.static_open and any(item.group == "static" and item.size for item in fields)

    def index(self, site: str) -> int:
        """The site's place in the roster, from 0."""
        return self.roster.index(site)

    def digest(self) -> bytes:
        """SHA-256 over all fields."""
        return digest("params", self.as_value())
