"""Interfaces, types and errors shared by plain and secure sums, and by both ends of a secure sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tightframe.errors import LATE, REASONS, RunError, SecureSumError, TooFewError
from tightframe.learning.few_records.products import Sizes
from tightframe.phases import Schema
from tightframe.results.parts.dropouts import WHERE
from tightframe.results.words import sentence
from tightframe.rounds.codec import IntegerTotals, Term
from tightframe.rounds.context import Message
from tightframe.rounds.declaration import Declaration
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.messages import FieldSpec, SumId

Accept = Callable[[str, Message], None]
Failed = Callable[[str, str, Sequence[str]], None]
"""Called for each silo without an accepted answer: its name, the code, the rules that it names, if any."""
OUT_OF_BUDGET = "TF-701"
SECURE = "secure"
"""Key of the protocol message within a message."""
SEAL = "seal"
"""Kind, and schema, of the sum without fields in which an epoch's last total is verified."""
SEALS = 2
"""Slots of an epoch reserved for seals: the second one is for silos that drop out during the first."""


class Transport(Protocol):
    """Sends one task to every silo and returns the answers."""

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """Send each silo its request and hand each answer to ``accept`` as it arrives.

        Returns:
            Silo -> code for every silo without an accepted answer. If ``accept`` raises a
            ``TightframeError``, that silo has failed with its code.
        """


Formed: TypeAlias = Mapping[str, tuple[str, ...]]
"""Settings of a term that the run's state decides, and not the job, by name in the release profile."""
Check: TypeAlias = Callable[[SumId, tuple[FieldSpec, ...], Formed], None]
"""Refuses a term whose sum or fields were not requested, or which is formed in another way than before."""


NO_RECORDS = Sizes(0.0, 0.0)


@dataclass(frozen=True)
class Peers:
    """Values of the enrolled silos that a silo's term depends on.

    Attributes:
        weights: their public weights, as sums apply them.
        honest: s - c, the least number of honest silos in a sum that can be opened; each adds 1/honest of
            the noise's variance.
        tellers: number of silos that evaluate each part, in a secure sum; None in a plain one, where the
            server sees each term.
        sizes: numbers of records, of which products of features need enough; in a plain sum, whose terms the
            server sees, this silo's alone.
    """

    weights: Mapping[str, float]
    honest: int = 1
    tellers: Mapping[str, int] | None = None
    sizes: Sizes = NO_RECORDS


@dataclass(frozen=True)
class Encoded:
    """A silo's contribution as integers.

    Attributes:
        sum_id: of the term's sum.
        fields: of the sum's schema.
        term: bytes of each group.
        basis: SHA-256 of the state that the term rests on.
        follows: whether the silo computed that state by itself, from totals.
        formed: settings of the term that the state decides.
    """

    sum_id: SumId
    fields: tuple[FieldSpec, ...]
    term: Term = field(repr=False)
    basis: bytes
    follows: bool
    formed: Formed = field(default_factory=dict)


@dataclass
class Enrolled:
    """The enrolled silos with their declarations.

    Attributes:
        declared: silo -> its declaration.
        absent: silo -> code, of silos that did not enrol.
    """

    declared: dict[str, Declaration]
    absent: dict[str, str] = field(default_factory=dict)


@dataclass
class Collected:
    """One sum, opened.

    Attributes:
        cohort: silos whose terms are in the sum, sorted.
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


def too_few(
    title: str, least: int, cohort: Sequence[str], failed: Mapping[str, str], detail: str = ""
) -> TooFewError:
    """Return the error for a sum that was not opened.

    Args:
        title: of the sum, or the step before it.
        least: number of silos needed.
        cohort: silos that answered.
        failed: silo -> code for the others.
        detail: what these silos did, if more than answering.
    """
    expected = f"too few silos in {title}: expected at least {least}, but got {len(cohort)}{detail}"
    return TooFewError(f"{expected}; {describe_codes(failed)}.", cohort, failed)


class RefusedError(RunError):
    """Silos refused to enrol, which ends the run: a person must look into the reason first.

    Args:
        refused: silo -> code.
        absent: silo -> code of those that are not in the run for another reason.
        rules: silo -> its own description of the rules that the job does not meet.
        spare: whether enough silos would remain without all of these.
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
        silos: dict[str, list[str]] = {}
        for site, code in sorted((absent or {}).items()):
            how = "did not answer" if code == LATE else "cannot take part"
            silos.setdefault(f"{how}: {_describe_code(code)}", []).append(site)
        for site, code in sorted(refused.items()):
            silos.setdefault(f"refused: {_describe_code(code, (rules or {}).get(site, ()))}", []).append(site)
        reasons = [f"{sentence(sites)} {reason}" for reason, sites in silos.items()]
        fits = ", for TF-627 with the `evaluation` that would fit (take the smallest)"
        also = fits if "TF-627" in refused.values() else ""
        without = ", or export the job without those silos" if spare else ""
        super().__init__(
            f"before any training, {'; '.join(reasons)}. The details are in each silo's own log{also}; "
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
        """Request every silo's term, add the terms as they arrive, open the sum.

        Args:
            accepted: called with the name of each silo whose term was added.

        Raises:
            TooFewError: TF-501; nothing was opened.
        """

    def seal(self, transport: Transport, request: Message, *, last: bool = True) -> bool:
        """Let the silos verify the last total; return whether they did, or have none to verify.

        Args:
            request: the keys by which a silo computes the state of the run.
            last: whether no later sum rests on it.
        """

    @property
    def verified(self) -> bool:
        """Check whether silos verify each total before a sum that rests on it is opened."""

    def describe(self) -> str:
        """Describe how the sums are protected, in words."""


def describe_codes(failed: Mapping[str, str]) -> str:
    """List silos with their codes in words, each code once.

    >>> describe_codes({"c": "TF-502", "a": "TF-502", "b": "TF-509"})
    'a and c: TF-502 (late), b: TF-509 (refused to enrol)'
    """
    silos: dict[str, list[str]] = {}
    for site, code in sorted(failed.items()):
        silos.setdefault(code, []).append(site)
    return ", ".join(f"{sentence(sites)}: {_describe_code(code)}" for code, sites in silos.items())


def _describe_code(code: str, rules: Sequence[str] = ()) -> str:
    """Return a code with its meaning and the rules that a silo names with it."""
    return f"{code} ({'; '.join([REASONS.get(code, 'see tightframe explain'), *rules])})"


def split_refusals(failed: Mapping[str, str]) -> dict[str, str]:
    """Return the silos that a run can start without: those that did not answer or have no budget left.

    Args:
        failed: silo -> code of all that failed to enrol.

    Raises:
        RefusedError: TF-509 if a silo refused for any other reason.
    """
    refused = {site: code for site, code in failed.items() if code not in (LATE, OUT_OF_BUDGET)}
    if refused:
        raise RefusedError(refused)
    return dict(failed)


def sum_title(sum_id: SumId) -> str:
    """Return a sum's name for people: ``round 3``, or the subject of an exchange outside the rounds."""
    kind = sum_id.phase.rpartition("-")[0]
    if kind in ("statistics", "before", "after"):
        return WHERE[kind]
    return f"round {sum_id.round}" if kind == "train" else kind


ADVICE = {
    "TF-617": (
        " Two such totals can reveal one silo's own term. Export the job with the earlier settings, or let a "
        "person at this site decide: `tightframe site release accept` says what both reveal."
    ),
    "TF-627": (
        " From so many exact numbers single records can be computed. A job with `privacy` opens none; or a "
        "person at this site decides: `tightframe site release accept --evaluations`."
    ),
}
"""Advice by code, added where the protocol's own message has none."""


@contextmanager
def package_errors() -> Iterator[None]:
    """Turn the protocol's errors into those of the package, naming the silo to blame.

    Raises:
        SecureSumError: with the code of the ``ProtocolError``.
    """
    try:
        yield
    except ProtocolError as error:
        blame = f" To blame: {error.blamed}." if error.blamed else ""
        advice = ADVICE.get(error.code, "")
        raise SecureSumError(f"{error}{blame}{advice}", code=error.code, blamed=error.blamed) from None
