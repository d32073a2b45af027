"""Plain sums: terms travel unmasked, and the server sees each of them.

Secure sums (``secure_silo``, ``secure_server``) mask the same terms. Both give the same totals, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tightframe.config.job import JobConfig
from tightframe.errors import ContributionError
from tightframe.phases import RING_DTYPE, Group, Schema
from tightframe.rounds.codec import IntegerTotals, Term, pack, unpack
from tightframe.rounds.context import Message
from tightframe.rounds.declaration import Declaration, applied_weights
from tightframe.rounds.sums.common import (
    Collected,
    Enrolled,
    Transport,
    split_refusals,
    sum_title,
    too_few,
)
from tightframe.securesum.encoding import add_into
from tightframe.securesum.messages import GROUPS, SumId, Total
from tightframe.securesum.primitives import HASH_BYTES


class PlainServer:
    """One plain sum, with one accumulator whatever the number of silos."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._totals: dict[str, NDArray[np.unsignedinteger]] = {
            item.name: np.zeros(item.size, RING_DTYPE[item.ring]) for item in schema.fields
        }
        self._added: set[str] = set()

    def add(self, site: str, term: Term) -> None:
        """Add one silo's term, after checking all of it.

        Raises:
            ContributionError: TF-403 if the term does not have the schema's size, or is the silo's second.
        """
        if site in self._added:
            raise ContributionError(f"Expected one term from {site}, but got a second one.")
        arrays = [unpack(self._schema, group, term.get(group, b"")) for group in GROUPS]
        for part in arrays:
            for name, values in part.items():
                add_into(self._totals[name], values)
        self._added.add(site)

    def open(self) -> IntegerTotals:
        """Return the totals of all terms added."""
        shapes = {item.name: item.shape for item in self._schema.fields}
        return {name: total.reshape(shapes[name]) for name, total in self._totals.items()}


class PlainSums:
    """Plain sums at the server, which sees every silo's term.

    Args:
        job: of the sums; fewer terms than its ``min_sites`` end the run.
    """

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._min_sites = job.min_sites
        self.static_cohort: tuple[str, ...] | None = None  # the server sees all terms anyway
        self._declared: dict[str, Declaration] = {}
        self._last = b""  # the last total, from which silos compute the next state

    @property
    def weights(self) -> Mapping[str, float]:
        """Public weights of the enrolled silos, as sums apply them."""
        return applied_weights(self._declared, self._job.max_weight_share)

    def enroll(self, transport: Transport, request: Message, sites: Sequence[str]) -> Enrolled:
        """Enrol these silos in one exchange, in which each sends its declaration.

        Raises:
            RefusedError, TooFewError: see ``Sums``.
        """
        enrolled = Enrolled({})

        def accept(site: str, answer: Message) -> None:
            declared = Declaration.from_bytes(answer.get("declaration"), site)
            declared.check_weight(site, self._job.weights)
            enrolled.declared[site] = declared

        failed = transport.exchange("enroll", {site: dict(request) for site in sites}, accept)
        enrolled.absent = split_refusals(failed)
        if len(enrolled.declared) < self._min_sites:
            raise too_few("enrolment", self._min_sites, list(enrolled.declared), enrolled.absent)
        self._declared = dict(enrolled.declared)
        return enrolled

    def collect(
        self,
        transport: Transport,
        sum_id: SumId,
        schema: Schema,
        requests: Mapping[str, Message],
        accepted: Callable[[str], None],
    ) -> Collected:
        """Collect a sum in one exchange; each term is added on arrival and then dropped.

        Raises:
            TooFewError: TF-501; nothing was opened.
        """
        total, cohort, up = PlainServer(schema), [], 0

        def accept(site: str, answer: Message) -> None:
            nonlocal up
            term = answer.get("term")
            if not isinstance(term, dict) or not all(isinstance(part, bytes) for part in term.values()):
                raise ContributionError(f"Expected a term from {site}, but got {sorted(answer)}.")
            total.add(site, term)
            up += sum(len(part) for part in term.values())
            cohort.append(site)
            accepted(site)

        declared = {site: item.to_bytes() for site, item in self._declared.items()}
        to_all = {
            site: {**request, "declared": declared, "total": self._last} for site, request in requests.items()
        }
        failed = dict(transport.exchange("contribute", to_all, accept))
        if len(cohort) < self._min_sites:
            raise too_few(sum_title(sum_id), self._min_sites, cohort, failed)
        down, totals = len(requests) * len(self._last), total.open()
        groups: dict[Group, bytes] = {group: pack(schema, group, totals) for group in GROUPS}
        # Plain sums have neither slots, nor named schemas, nor receipts.
        place = 0, sum_id, sum_id.phase, tuple(sorted(cohort))
        self._last = Total(*place, groups, bytes(HASH_BYTES)).to_bytes()
        return Collected(sorted(cohort), failed, totals, False, down, up)

    @property
    def verified(self) -> bool:
        """Return False: a silo sees no other silo's term, and cannot verify a plain total."""
        return False

    def seal(self, transport: Transport, request: Message, *, last: bool = True) -> bool:
        """Do nothing: silos verify no plain totals."""
        return True

    def describe(self) -> str:
        """Describe how the sums are protected, in words."""
        return "plain, as the job asks by name (the server sees each silo's contribution)"
