"""Data of an opened sum that the server keeps until the silos have verified its total.

A silo may be gone when its part in the proof of a total is asked for, or may send a false one. Then the
server shows its term itself (``proofs``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from tightframe.securesum.messages import Group, Receipt, TermProof, Total
from tightframe.securesum.primitives import Secret
from tightframe.securesum.proofs import Ground
from tightframe.securesum.server.setup import Session


class Spool(Protocol):
    """Keeps masked terms, each as large as a model, until they are erased."""

    def keep(self, slot: int, site: str, group: Group, data: bytes) -> None:
        """Keep one group of a site's masked term."""

    def read(self, slot: int, site: str, group: Group) -> bytes:
        """Return what was kept."""

    def erase(self, slot: int) -> None:
        """Erase all terms of a slot."""


class MemorySpool:
    """A spool in memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, Group], bytes] = {}

    def keep(self, slot: int, site: str, group: Group, data: bytes) -> None:
        """Keep one group of a site's masked term."""
        self._kept[slot, site, group] = data

    def read(self, slot: int, site: str, group: Group) -> bytes:
        """Return what was kept."""
        return self._kept[slot, site, group]

    def erase(self, slot: int) -> None:
        """Erase all terms of a slot."""
        self._kept = {place: data for place, data in self._kept.items() if place[0] != slot}


@dataclass(frozen=True)
class Evidence:
    """A total, and what shows each of its terms.

    Attributes:
        session: in which it was opened.
        links: survivor -> the links that it sent with its term.
        secrets: opened group -> survivor -> b, and dropped site -> a.
        spool: has the survivors' masked terms.
    """

    session: Session
    total: Total
    receipts: Mapping[str, Receipt]
    links: Mapping[str, bytes] = field(repr=False)
    secrets: Mapping[Group, Mapping[str, Secret]] = field(repr=False)
    spool: Spool

    @cached_property
    def ground(self) -> Ground:
        """Return the data against which a proof of the total is checked."""
        session = self.session
        return Ground(session.session, session.params, session.peers, self.total.told())

    def proof(self, name: str) -> TermProof:
        """Return the proof of one survivor's term."""
        groups = self.ground.told.groups
        return TermProof(
            self.receipts[name],
            {group: self.spool.read(self.total.slot, name, group) for group in groups},
            self.links[name],
            self.session.keyed_hashes(name, self.total.slot),
            {group: self.secrets[group][name].expose() for group in groups},
        )

    def term(self, proof: TermProof) -> dict[Group, bytes]:
        """Return z' of each group, from a proof."""
        return self.ground.show(proof.receipt.name, proof, self.seeds_of_dropped())

    def seeds_of_survivors(self) -> dict[str, dict[Group, bytes]]:
        """Return the seeds b of the sites in the total, which show that the server has opened it."""
        told = self.ground.told
        return {
            name: {group: self.secrets[group][name].expose() for group in told.groups}
            for name in told.survivors
        }

    def seeds_of_dropped(self) -> dict[str, dict[Group, bytes]]:
        """Return the pair seeds of the sites that are not in the total."""
        groups = self.ground.told.groups
        return {
            name: {group: self.secrets[group][name].expose() for group in groups}
            for name in self.ground.dropped
        }
