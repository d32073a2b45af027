"""Plain sums, and the interfaces and types that plain and secure sums share.

A term is the integers of a contribution, as two byte strings: the *update* group (changed by
training) and the *static* group (counts, evaluation). Plain sums send them unmasked; secure sums
(``secure_silo``, ``secure_server``) mask them. Both give the same totals, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tightframe.config.job import JobConfig
from tightframe.errors import LATE, REASONS, ContributionError, RunError
from tightframe.phases import RING_DTYPE, Group, Schema
from tightframe.rounds.context import Message
from tightframe.rounds.sums.declaration import Declaration, applied_weights
from tightframe.securesum.encoding import add_into
from tightframe.securesum.messages import GROUPS, FieldSpec, SumId, Total
from tightframe.securesum.primitives import HASH_BYTES

Term = Mapping[Group, bytes]
IntegerTotals = Mapping[str, NDArray[np.unsignedinteger]]
Accept = Callable[[str, Message], None]
Failed = Callable[[str, str, Sequence[str]], None]
"""Called for each silo without an accepted answer: its name, the code, the rules that it names, if any."""
OUT_OF_BUDGET = "TF-701"


class Transport(Protocol):
    """Sends one task to every silo and returns the answers."""

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Send each silo its request and hand each answer to ``accept`` as it arrives.

        Returns:
            Silo -> code for every silo without an accepted answer. If ``accept`` raises a
            ``TightframeError``, that silo has failed with its code.
        """


Check: TypeAlias = Callable[[SumId, tuple[FieldSpec, ...]], None]
"""Refuses a term's sum and fields if they are not those that were asked for."""


@dataclass(frozen=True)
class Encoded:
    """A silo's contribution as integers.

    Attributes:
        sum_id: of the sum that it is a term of.
        fields: of the sum's schema.
        term: bytes of each group.
        basis: SHA-256 of the state that it rests on.
        follows: whether the silo computed that state by itself, from totals.
    """

    sum_id: SumId
    fields: tuple[FieldSpec, ...]
    term: Term = field(repr=False)
    basis: bytes
    follows: bool


@dataclass
class Enrolled:
    """The enrolled silos with their declarations.

    Attributes:
        declared: silo -> its declaration.
        absent: silo -> code, of those that did not enrol.
    """

    declared: dict[str, Declaration]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass
class Collected:
    """One sum, opened.

    Attributes:
        cohort: silos whose terms are in it, sorted.
        failed: silo -> code for the others.
        totals: integer total of every field that was opened.
        shut: whether the static group was not opened, because the cohort is not the enrolled one.
        bytes_down: size of the requests for terms.
    """

    cohort: list[str]
    failed: dict[str, str]
    totals: IntegerTotals
    shut: bool
    bytes_down: int
    bytes_up: int


class TooFewError(RunError):
    """Too few silos in a sum, or too few in it that contributed anything.

    Attributes:
        cohort: silos that answered, sorted.
        failed: silo -> code for the others.
    """

    code = "TF-501"

    def __init__(
        self, message: str, cohort: Iterable[str], failed: Mapping[str, str], *, code: str | None = None
    ) -> None:
        self.cohort, self.failed = sorted(cohort), dict(failed)
        super().__init__(message, code=code)


def too_few(
    title: str, least: int, cohort: Sequence[str], failed: Mapping[str, str], detail: str = ""
) -> TooFewError:
    """Return the error for a sum that was not opened.

    Args:
        title: of the sum, or the step before it.
        least: number of silos needed.
        cohort: silos that answered.
        failed: silo -> code for the others.
        detail: what these silos did, if not only answer.
    """
    expected = f"too few silos in {title}: expected at least {least}, but got {len(cohort)}{detail}"
    return TooFewError(f"{expected}; {describe_codes(failed)}.", cohort, failed)


class RefusedError(RunError):
    """Silos refused to enrol, which ends the run: a person must look into the reason first.

    Args:
        refused: silo -> code.
        absent: silo -> code of those that are not in the run for another reason.
        rules: silo -> its own description of the rules that the job does not meet.
        spare: whether enough silos would be left without all of these.
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
        reasons = [
            f"{site} {'did not answer' if code == LATE else 'cannot take part'}: {_describe_code(code)}"
            for site, code in sorted((absent or {}).items())
        ]
        reasons += [
            f"{site} refused: {_describe_code(code, (rules or {}).get(site, ()))}"
            for site, code in sorted(refused.items())
        ]
        without = ", or export the job without those silos" if spare else ""
        super().__init__(
            f"before any training, {'; '.join(reasons)}. The details are in each silo's own log; "
            f"mend them{without}."
        )


class Sums(Protocol):
    """The server's side of a run's sums."""

    static_cohort: tuple[str, ...] | None
    """The cohort for which counts were requested, in this job or those that it continues; None before."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Public weights of the enrolled silos, as sums apply them."""

    def enroll(self, transport: Transport, request: Message, sites: Sequence[str]) -> Enrolled:
        """Enrol these silos.

        Raises:
            RefusedError: TF-509 if silos refuse.
            TooFewError: TF-501 if too few answer.
        """

    def collect(
        self,
        transport: Transport,
        sum_id: SumId,
        schema: Schema,
        requests: Mapping[str, Message],
        accepted: Callable[[str], None],
    ) -> Collected:
        """Ask every silo for its term, add the terms as they arrive, open the sum.

        Args:
            transport: to the silos.
            requests: silo -> its request.
            accepted: called with the name of each silo whose term was added.

        Raises:
            TooFewError: TF-501; nothing was opened.
        """

    def seal(self, transport: Transport, request: Message, *, last: bool = True) -> bool:
        """Let the silos verify the last total; return whether they did, or have none to verify.

        Args:
            transport: to the silos.
            request: the keys by which a silo computes the state of the run.
            last: whether no later sum rests on it.
        """

    @property
    def verified(self) -> bool:
        """Check whether silos verify each total before a sum that rests on it is opened."""

    def describe(self) -> str:
        """Describe how the sums are protected, in words."""


def describe_codes(failed: Mapping[str, str]) -> str:
    """List silos with their codes in words: ``site-2: TF-502 (late), ...``."""
    return ", ".join(f"{site}: {_describe_code(code)}" for site, code in sorted(failed.items()))


def _describe_code(code: str, rules: Sequence[str] = ()) -> str:
    """Return a code with its meaning and the rules that a silo names with it."""
    return f"{code} ({'; '.join([REASONS.get(code, 'see tightframe explain'), *rules])})"


def split_refusals(failed: Mapping[str, str]) -> dict[str, str]:
    """Return the silos without which a run can start: those that did not answer or have no budget left.

    Args:
        failed: silo -> code of all that failed to enrol.

    Raises:
        RefusedError: TF-509 if a silo refused for any other reason.
    """
    refused = {site: code for site, code in failed.items() if code not in (LATE, OUT_OF_BUDGET)}
    if refused:
        raise RefusedError(refused)
    return dict(failed)


def pack(schema: Schema, group: Group, arrays: Mapping[str, NDArray[np.unsignedinteger]]) -> bytes:
    """Return one group's integers as little-endian bytes, fields in schema order."""
    return b"".join(
        arrays[item.name].astype(np.dtype(RING_DTYPE[item.ring]).newbyteorder("<"), copy=False).tobytes()
        for item in schema.group(group)
    )


def unpack(schema: Schema, group: Group, data: bytes) -> dict[str, NDArray[np.unsignedinteger]]:
    """Invert ``pack``; the arrays are flat, read-only views of ``data``.

    Raises:
        ContributionError: TF-403 if the length is not the schema's.
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


def integer_totals(schema: Schema, groups: Mapping[Group, bytes]) -> IntegerTotals:
    """Return the integer total of every field of the groups that were opened, each in its field's shape.

    Raises:
        ContributionError: TF-403 if a group does not have the schema's size.
    """
    shapes = {item.name: item.shape for item in schema.fields}
    return {
        name: total.reshape(shapes[name])
        for group, data in groups.items()
        for name, total in unpack(schema, group, data).items()
    }


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
        self._last = b""  # the last total, which silos compute the next state from

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


def sum_title(sum_id: SumId) -> str:
    """Return a sum's name for people: ``round 3``, or the kind of an exchange outside the rounds."""
    kind = sum_id.phase.rpartition("-")[0]
    return f"round {sum_id.round}" if kind == "train" else kind
