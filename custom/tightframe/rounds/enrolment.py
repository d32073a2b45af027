"""Enrolment as it is told: whom it waits for, who is left out and why, also where it ends the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tightframe.rounds.context import Message
from tightframe.rounds.run_record import RunRecord
from tightframe.rounds.secure.parameters import minimum
from tightframe.rounds.summation import Accept, Enrolled, RefusedError, Sums, TooFewError, Transport
from tightframe.securesum.rules import MIN_SITES


class _Told:
    """A transport that keeps a record up to date on who has answered.

    Sums shrink their roster while silos are silent; where that ends in an error, only who carried their
    messages still knows everybody that was lost on the way.
    """

    def __init__(self, transport: Transport, record: RunRecord) -> None:
        self._transport = transport
        self._record = record
        self.lost: dict[str, str] = {}

    def exchange(self, task: str, requests: Mapping[str, Message], accept: Accept) -> Mapping[str, str]:
        """See ``rounds.summation.Transport``."""
        record = self._record
        record.status = record.status.enrolling(requests)

        def answered(site: str, answer: Message) -> None:
            accept(site, answer)
            if record.status.state == "enrolling":  # and not ended meanwhile
                record.status = record.status.heard(site)

        failed = self._transport.exchange(task, requests, answered)
        self.lost |= failed
        for site, code in failed.items():
            record.status = record.status.heard(site, code)
        return failed


def enroll(
    sums: Sums, transport: Transport, request: Message, roster: Sequence[str], record: RunRecord
) -> Enrolled:
    """Enrol a roster.

    Raises:
        RefusedError: TF-509, naming also who did not answer before others refused.
        TooFewError: TF-501. After both the record has every silo that is to blame, with its code.
    """
    told = _Told(transport, record)
    try:
        return sums.enroll(told, request, roster)
    except RefusedError as error:
        record.not_enrolled(told.lost)
        absent = {site: code for site, code in told.lost.items() if site not in error.refused}
        left, least = len(roster) - len(told.lost), record.job.min_sites
        if record.job.summation == "secure":
            least = minimum(record.job, left) if left >= MIN_SITES else MIN_SITES
        spare = left >= least
        raise RefusedError(error.refused, absent, record.refused_rules, spare=spare) from None
    except TooFewError:
        record.not_enrolled(told.lost)
        raise
