"""Checks of a request before a silo reads a record for it, by its job, its plan and its notes.

It answers only the exchange that comes next in the plan. A withdrawal begins with the state that the job
names, and continues only once it withdrew records.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightframe.config.job import JobConfig
from tightframe.errors import RunError
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import WITHDRAWS, Notes, read_sum
from tightframe.rounds.order import BEFORE, Place, place_of
from tightframe.rounds.plan import Exchange, RunPlan
from tightframe.rounds.sums.common import SEAL
from tightframe.rounds.withdrawn_list import SUMS
from tightframe.securesum.messages import Total


def check_withdrawal(job: JobConfig, notes: Notes, place: Place, state: str, total: Total | None) -> None:
    """Refuse a withdrawal on a state on which it must not rest, as far as this silo knows.

    A continued one has only the closing: on any other state that would be the run's own, of other records.

    Args:
        state: SHA-256 (hex) of the state that the request rests on.
        total: the one named; None if there is none.

    Raises:
        RunError: TF-518 if the server begins with another state than the job names. TF-523 if a continued
            one, in a secure sum without a total, rests on a state that this silo has not verified after the
            sums of the withdrawn records, for which it gave its shares.
    """
    if job.withdraw is None:
        return
    if job.resume is None:
        if (place[0], place[2]) == (BEFORE, 0) and state != job.withdraw.state_sha256:
            raise RunError(
                f"Expected the withdrawal to begin with the state {job.withdraw.state_sha256} that the job "
                f"names, but the server begins with {state}: nothing is taken out of another total.",
                code="TF-518",
            )
        return
    if total is not None or job.summation != "secure":
        return
    words = notes.words
    begun = max((number for number, word in enumerate(words, 1) if word == WITHDRAWS), default=len(words))
    sums = f"0/{SUMS[0]}-{SUMS[1]}"
    masked = [number for number, word in enumerate(words) if number >= begun and f":{sums}/" in word]
    if not masked or state not in words[masked[0] :]:
        raise RunError(
            f"Expected job {job.resume.previous} to have taken the withdrawn records out of the total, and "
            f"this one to go on with a state of its behind that, but this silo did not verify {state} there: "
            "counts of fewer records would disclose which left. Withdraw them anew.",
            code="TF-523",
        )


def check_order(
    context: SiloContext, plan: RunPlan, exchange: Exchange, state: str, total: Total | None, told: str
) -> None:
    """Refuse an exchange that is not the plan's next one, before a record is read for it.

    Where the server names a total, its sum decides what comes next, and receipts bind it; no earlier total is
    named again once this silo gave shares. Else the silo's own notes decide: it opened no other sum.

    Args:
        state: SHA-256 (hex) of the state that the exchange rests on.
        total: the one told; None if there is none.
        told: the sum whose total led to the state in an earlier session; empty if there is none.

    Raises:
        RunError: TF-525, or TF-505 if the total is of no sum of the plan.
    """
    last = place_of(total.sum_id) if total is not None else _noted(context, plan, exchange, state, told)
    allowed = list(plan.after(last))
    if exchange.place not in allowed:
        raise _other(exchange, allowed)


def _noted(context: SiloContext, plan: RunPlan, exchange: Exchange, state: str, source: str) -> Place | None:
    """Return the place of the sum that a state follows from, if no total is named; None at the job's begin.

    Raises:
        RunError: TF-525 if a resumed job begins with a state that this silo has not verified for its round.
    """
    notes, job = Notes.read(context.state_folder), context.job
    if mine := notes.mine.sums_behind(state):
        return place_of(mine[-1])
    if source:
        return place_of(read_sum(source))
    if job.resume is not None and job.summation == "secure":
        # Notes from a journal alone do not have the sum that a state follows from, but the one for which it
        # was verified.
        earlier = [place_of(item) for item in notes.sums_behind(state)]
        summed = [place for item in notes.sums_on(state) if (place := place_of(item))[0] != SEAL]
        elsewhere = bool(summed) and exchange.place not in summed
        if plan.last_of(job.done) not in earlier and (earlier or elsewhere or not exchange.training):
            raise _other(exchange, [], f"on the state after round {job.done} ")
    return None


def _other(exchange: Exchange, allowed: Sequence[Place], on: str = "") -> RunError:
    """Return the error for an exchange out of order."""
    expected = " or ".join(map(_words, allowed)) or "another"
    return RunError(
        f"Expected the exchange that is next in the job's plan ({expected}), but the server requests "
        f"{_words(exchange.place)} {on}out of order: no record was read for it.",
        code="TF-525",
    )


def _words(place: Place) -> str:
    kind, number, index = place
    return f"{kind} {index} of round {number}"
