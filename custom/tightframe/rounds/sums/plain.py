"""How terms are summed: what both kinds of sums share, and plain sums.

A term is the integers of a contribution, as two byte strings: the *update* group (what training
changes) and the *static* group (counts, evaluation). Plain sums send them as they are; secure sums
(``rounds.sums``) mask them. Both end in the same integers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tightframe.config.job import JobConfig
from tightframe.errors import LATE, REASONS, ContributionError, RunError
from tightframe.phases import RING_DTYPE, Group, Schema
from tightframe.rounds.context import Message
from tightframe.rounds.sums.declaration import Declaration, applied_weights
from tightframe.securesum.encoding import add_into
from tightframe.securesum.messages import GROUPS, FieldSpec, SumId

Term = Mapping[Group, bytes]
IntegerTotals = Mapping[str, NDArray[np.unsignedinteger]]
Accept = Callable[[str, Message], None]
Failed = Callable[[str, str, Sequence[str]], None]
"""Told at once of a silo without an accepted answer: its name, the code, the rules that it names, if any."""
OUT_OF_BUDGET = "TF-701"


class Transport(Protocol):
    """Carries one task to every silo and brings the answers back."""

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Send each silo its request and hand each answer to ``accept`` as it arrives.

        Returns:
            Silo -> code for every silo without an accepted answer. ``accept`` may raise a
            named error, which makes that silo's answer a failure of the same code.
        """


@dataclass(frozen=True)
class Encoded:
    """A silo's contribution as integers: of which sum, the fields, the bytes of each group."""

    sum_id: SumId
    fields: tuple[FieldSpec, ...]
    term: Term = field(repr=False)


@dataclass
class Enrolled:
    """Who takes part: each silo's declaration, and who does not, with codes."""

    declared: dict[str, Declaration]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass
class Collected:
    """One sum, opened.

    Attributes:
        cohort: the silos whose terms are in it, sorted.
        failed: silo -> code for the others.
        totals: the integer total of every field that was opened.
        shut: whether the static group stayed shut, because the cohort is not the enrolled one.
        bytes_down, bytes_up: what travelled in terms and their requests.
    """

    cohort: list[str]
    failed: dict[str, str]
    totals: IntegerTotals
    shut: bool
    bytes_down: int
    bytes_up: int


class TooFewError(RunError):
    """Too few silos in a sum: nothing was opened. ``cohort`` and ``failed`` say who was there."""

    code = "TF-501"

    def __init__(
        self, where: str, least: int, cohort: Sequence[str], failed: Mapping[str, str], detail: str = ""
    ) -> None:
        self.cohort, self.failed = sorted(cohort), dict(failed)
        super().__init__(
            f"too few silos in {where}: expected at least {least}, but got {len(self.cohort)}"
            f"{detail}; {named_codes(failed)}."
        )


class RefusedError(RunError):
    """Silos refused to enrol, which ends the run: what they say is to be mended, not trained around.

    Args:
        refused: silo -> code.
        absent: silo -> code of those that are not in the run for another reason.
        rules: silo -> what it says of the rules that the job falls short of.
        spare: whether the job could go without all of them.
    """

    code = "TF-509"

    def __init__(
        self,
        refused: Mapping[str, str],
        absent: Mapping[str, str] | None = None,
        rules: Mapping[str, Sequence[str]] | None = None,
        *,
        spare: bool = True,
    ) -> None:
        self.refused = dict(refused)
        said = [
            f"{site} {'did not answer' if code == LATE else 'cannot take part'}: {_meant(code)}"
            for site, code in sorted((absent or {}).items())
        ]
        said += [
            f"{site} refused: {_meant(code, (rules or {}).get(site, ()))}"
            for site, code in sorted(refused.items())
        ]
        without = ", or export the job without those silos" if spare else ""
        super().__init__(
            f"before any training, {'; '.join(said)}. The details are in each silo's own log; "
            f"mend them{without}."
        )


class Sums(Protocol):
    """The server's side of a run's sums."""

    static_cohort: tuple[str, ...] | None
    """For whom counts were asked for, in this job or in those that it continues; None before."""

    @property
    def weights(self) -> Mapping[str, float]:
        """The public weights of the silos enrolled, as sums apply them."""

    def enroll(self, transport: Transport, request: Message, sites: Sequence[str]) -> Enrolled:
        """Agree with the silos on who takes part."""

    def collect(
        self,
        transport: Transport,
        sum_id: SumId,
        schema: Schema,
        requests: Mapping[str, Message],
        accepted: Callable[[str], None],
    ) -> Collected:
        """Ask every silo for its term, add the terms as they arrive, open the sum.

        Raises:
            TooFewError: TF-501; nothing was opened.
        """

    def describe(self) -> str:
        """What the sums protect, for people."""


def named_codes(failed: Mapping[str, str]) -> str:
    """``site-2: TF-502 (late), ...``."""
    return ", ".join(f"{site}: {_meant(code)}" for site, code in sorted(failed.items()))


def _meant(code: str, rules: Sequence[str] = ()) -> str:
    """A code, what it means, and what a silo says beside it."""
    return f"{code} ({'; '.join([REASONS.get(code, 'see docs/errors.md'), *rules])})"


def split_refusals(failed: Mapping[str, str]) -> dict[str, str]:
    """The silent ones of those who failed to enrol, and those without budget, with codes.

    A silo whose budget is spent has nothing to mend; the others go on without it.

    Raises:
        RefusedError: TF-509 if a silo refused.
    """
    refused = {site: code for site, code in failed.items() if code not in (LATE, OUT_OF_BUDGET)}
    if refused:
        raise RefusedError(refused)
    return dict(failed)


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
    expected = sum(item.bytes for item in schema.group(group))
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
        offset += item.bytes
    return arrays


class PlainServer:
    """One plain sum: one accumulator, whatever the number of silos."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._totals: dict[str, NDArray[np.unsignedinteger]] = {
            item.name: np.zeros(item.size, RING_DTYPE[item.ring]) for item in schema.fields
        }
        self._added: set[str] = set()

    def add(self, site: str, term: Term) -> None:
        """Add one silo's term; the whole term is checked before any of it is added.

        Raises:
            ContributionError: TF-403 if the term does not have the schema's size, or is a second one.
        """
        if site in self._added:
            raise ContributionError(f"Expected one term from {site}, but got a second one.")
        arrays = [unpack(self._schema, group, term.get(group, b"")) for group in GROUPS]
        for part in arrays:
            for name, values in part.items():
                add_into(self._totals[name], values)
        self._added.add(site)

    def open(self) -> IntegerTotals:
        """The totals over all that were added."""
        shapes = {item.name: item.shape for item in self._schema.fields}
        return {name: total.reshape(shapes[name]) for name, total in self._totals.items()}


class PlainSums:
    """Plain sums at the server, which sees every silo's term.

    Args:
        job: whose sums these are; fewer terms than its ``min_sites`` end the run.
    """

    def __init__(self, job: JobConfig) -> None:
        self._job = job
        self._min_sites = job.min_sites
        self.static_cohort: tuple[str, ...] | None = None  # the server sees all terms anyway
        self._declared: dict[str, Declaration] = {}

    @property
    def weights(self) -> Mapping[str, float]:
        """The public weights of the silos enrolled, as sums apply them."""
        return applied_weights(self._declared, self._job.max_weight_share)

    def enroll(self, transport: Transport, request: Message, sites: Sequence[str]) -> Enrolled:
        """One exchange: each silo declares itself."""
        enrolled = Enrolled({})

        def accept(site: str, answer: Message) -> None:
            declared = Declaration.from_bytes(answer.get("declaration"), site)
            declared.hold(site, self._job.weights)
            enrolled.declared[site] = declared

        failed = transport.exchange("enroll", {site: dict(request) for site in sites}, accept)
        enrolled.absent = split_refusals(failed)
        if len(enrolled.declared) < self._min_sites:
            raise TooFewError("enrolment", self._min_sites, list(enrolled.declared), enrolled.absent)
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
        """One exchange; what arrives is added and forgotten."""
        total, cohort, up = PlainServer(schema), [], 0

        def accept(site: str, answer: Message) -> None:
            nonlocal up
            term = answer.get("term")
            if not isinstance(term, dict) or not all(isinstance(part, bytes) for part in term.values()):
                raise ContributionError(f"{site} answered with {sorted(answer)}, not with a term.")
            total.add(site, term)
            up += sum(len(part) for part in term.values())
            cohort.append(site)
            accepted(site)

        declared = {site: item.to_bytes() for site, item in self._declared.items()}
        asked = {site: {**request, "declared": declared} for site, request in requests.items()}
        failed = dict(transport.exchange("contribute", asked, accept))
        if len(cohort) < self._min_sites:
            raise TooFewError(where(sum_id), self._min_sites, cohort, failed)
        down = sum(len(request["broadcast"]) for request in requests.values())
        return Collected(sorted(cohort), failed, total.open(), False, down, up)

    def describe(self) -> str:
        """What the sums protect, for people."""
        return "plain, as the job asks by name (the server sees each silo's contribution)"


def where(sum_id: SumId) -> str:
    """How people call a sum."""
    kind = sum_id.phase.rpartition("-")[0]
    return f"round {sum_id.round}" if kind == "train" else kind
