"""A silo answers only the exchange that comes next in the plan, and none that it has passed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tightframe.errors import RunError
from tightframe.files import write_atomically
from tightframe.rounds.context import ASKED, SiloContext, follows_from, noted, of_this_job
from tightframe.rounds.order import Place, place_of, position
from tightframe.rounds.plan import Exchange, RunPlan
from tightframe.securesum.messages import SumId, Total


def check(
    context: SiloContext, plan: RunPlan, exchange: Exchange, state: str, total: Total | None, told: str
) -> None:
    """Refuse an exchange that is not the plan's next one, before a record is read for it; else note it.

    Where the server names a total, its sum says what comes next, and receipts bind it. Else the silo's own
    notes do: of another sum it opened nothing.

    Args:
        state: SHA-256 (hex) of the state that it rests on.
        total: the one told; None if there is none.
        told: the sum from whose total this silo had the state in an earlier session; empty if there is none.

    Raises:
        RunError: TF-525, or TF-505 if the total is of no sum of the plan.
    """
    last = place_of(total.sum_id) if total is not None else _noted(context, plan, exchange, state, told)
    allowed = list(plan.after(last))
    path = context.state_folder / ASKED
    asked: Place | None = tuple(json.loads(path.read_bytes())) if path.is_file() else None
    if asked is not None:
        allowed = [place for place in allowed if position(place) >= position(asked)]
    if exchange.place not in allowed:
        raise _other(exchange, allowed)
    if exchange.place != asked:
        write_atomically(path, json.dumps(exchange.place).encode(), mode=0o600)


def _noted(context: SiloContext, plan: RunPlan, exchange: Exchange, state: str, told: str) -> Place | None:
    """Return the place of the sum that a state follows from where no total is told; None for the job's begin.

    Raises:
        RunError: TF-525 if a resumed job begins with a state that this silo has not verified as its round's.
    """
    words, job = noted(context.state_folder), context.job
    if mine := _sums(of_this_job(words), state):
        return mine[-1]
    if told:
        return _read(told)
    if job.resume is not None and job.summation == "secure":
        # Notes of a journal alone do not say what a state follows from; it binds a training's state itself.
        earlier = _sums(words, state)
        if plan.last_of(job.done) not in earlier and (earlier or not exchange.training):
            raise _other(exchange, [], f"on the state after round {job.done} ")
    return None


def _sums(words: Sequence[str], state: str) -> list[Place]:
    """Return the places of the sums that a state follows from, by this silo's notes."""
    prefix = follows_from(state, "")
    return [_read(word.removeprefix(prefix)) for word in words if word.startswith(prefix)]


def _read(sum_id: str) -> Place:
    """Read the place of a sum from ``str(SumId)``."""
    number, phase, attempt = sum_id.split("/")
    return place_of(SumId(int(number), phase, int(attempt)))


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
