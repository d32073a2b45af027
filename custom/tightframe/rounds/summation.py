"""The one interface behind which contributions are summed.

A *term* is what a silo sends for one sum: for each group of fields (``update``, ``static``) one
byte string, the integers of all its fields in schema order. The server adds terms as they
arrive and opens the sum when the cohort is known; no other code ever touches a term. Plain
summation sends the integers as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tightframe.errors import ContributionError
from tightframe.phases import RING_DTYPE, Group, Schema
from tightframe.securesum.encoding import add_into

Term = Mapping[Group, bytes]
IntegerTotals = Mapping[str, NDArray[np.unsignedinteger]]


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

    def __str__(self) -> str:
        """``round/phase/try``."""
        return f"{self.round}/{self.phase}/{self.attempt}"


class SiteSummation(Protocol):
    """The silo's side of a sum."""

    def conceal(self, sum_id: SumId, term: Term) -> Term:
        """Turn encoded integers into what may leave the silo."""


class ServerSummation(Protocol):
    """The server's side of one sum."""

    def add(self, site: str, term: Term) -> None:
        """Add one silo's term and forget it.

        Raises:
            ContributionError: TF-403 if the term does not have the schema's size.
        """

    def open(self, cohort: Sequence[str]) -> IntegerTotals:
        """The integer total of every field over the cohort."""


def pack(schema: Schema, group: Group, arrays: Mapping[str, NDArray[np.unsignedinteger]]) -> bytes:
    """One group's integers as little-endian bytes, fields in schema order."""
    return b"".join(
        arrays[item.name].astype(np.dtype(RING_DTYPE[item.ring]).newbyteorder("<"), copy=False).tobytes()
        for item in schema.group(group)
    )


def unpack(schema: Schema, group: Group, data: bytes) -> dict[str, NDArray[np.unsignedinteger]]:
    """The inverse of ``pack``; arrays are read-only views of ``data``.

    Raises:
        ContributionError: TF-403 if the length is not what the schema says.
    """
    expected = sum(item.size * item.ring // 8 for item in schema.group(group))
    if len(data) != expected:
        raise ContributionError(
            f"Expected {expected} bytes for the {group} group, but got {len(data)}; "
            "the silo runs another job configuration or package version."
        )
    arrays: dict[str, NDArray[np.unsignedinteger]] = {}
    offset = 0
    for item in schema.group(group):
        dtype = np.dtype(RING_DTYPE[item.ring]).newbyteorder("<")
        arrays[item.name] = np.frombuffer(data, dtype, count=item.size, offset=offset)
        offset += item.size * item.ring // 8
    return arrays


class PlainSite:
    """Plain summation at the silo: the integers leave as they are."""

    def conceal(self, sum_id: SumId, term: Term) -> Term:
        """Return the term unchanged."""
        return term


class PlainServer:
    """Plain summation at the server: one accumulator, whatever the number of silos."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._totals: dict[str, NDArray[np.unsignedinteger]] = {
            item.name: np.zeros(item.size, RING_DTYPE[item.ring]) for item in schema.fields
        }
        self._added: set[str] = set()

    def add(self, site: str, term: Term) -> None:
        """Add one silo's term; the whole term is checked before any of it is added."""
        if site in self._added:
            raise ContributionError(f"Expected one term from {site}, but got a second one.")
        groups: dict[Group, bytes] = {
            "update": term.get("update", b""),
            "static": term.get("static", b""),
        }
        arrays = [unpack(self._schema, group, data) for group, data in groups.items()]
        for part in arrays:
            for name, values in part.items():
                add_into(self._totals[name], values)
        self._added.add(site)

    def open(self, cohort: Sequence[str]) -> IntegerTotals:
        """The totals; plain summation adds a term only when it is final, so cohort = added."""
        if set(cohort) != self._added:
            raise ContributionError(
                f"Expected the cohort to be the silos added ({sorted(self._added)}), "
                f"but got {sorted(cohort)}."
            )
        shapes = {item.name: item.shape for item in self._schema.fields}
        return {name: total.reshape(shapes[name]) for name, total in self._totals.items()}


def site_summation(mode: str) -> SiteSummation:
    """The silo's side of a job's ``summation``."""
    if mode == "plain":
        return PlainSite()
    raise ContributionError(f"Expected `summation` to be 'plain', but got {mode!r}.")


def server_summation(mode: str, schema: Schema) -> ServerSummation:
    """The server's side of a job's ``summation`` for one sum."""
    if mode == "plain":
        return PlainServer(schema)
    raise ContributionError(f"Expected `summation` to be 'plain', but got {mode!r}.")
