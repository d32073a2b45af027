"""Which exchange a silo answers, by the total told, its notes of the state, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import SMALL

from tightframe.errors import RunError
from tightframe.files import append_durably
from tightframe.rounds.context import SiloContext
from tightframe.rounds.notes import RESUMED, VERIFIED, note, note_verified, summed_word
from tightframe.rounds.order import Place
from tightframe.rounds.plan import RunPlan
from tightframe.rounds.setup import prepare
from tightframe.rounds.silo.checks import request_order
from tightframe.securesum.messages import SumId, Total

JOB: dict[str, Any] = {**SMALL, "sites": [f"site-{number}" for number in range(4)], "min_sites": 3}
WHERE = {"lineage": "job-a", "previous": "job-a", "after_round": 2, "checkpoint_sha256": "0" * 64}
FIRST, SECOND, THIRD, LAST = (("train", number, 0) for number in range(1, 5))
CLOSING, PERSONAL = ("closing", 4, 0), ("personal", 4, 0)
STATE, OTHER = b"s" * 32, b"o" * 32


class Silo:
    """A silo's check of the order, in a job of four rounds with personal models."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        values = {**JOB, "method": "fedavg", "rounds": 4, "personalise": True, **changes}
        setup = prepare(values)
        self.plan, self.context = RunPlan(setup), SiloContext("site-0", setup.job, None, folder)

    def answers(self, place: Place, total: Place | None = None, told: str = "") -> bool:
        """Check whether it answers a request on the state, behind a total or as a server told it before."""
        exchange, behind = self.plan.find(*place), None if total is None else opened(total)
        try:
            request_order.check_order(self.context, self.plan, exchange, STATE.hex(), behind, told)
        except RunError as error:
            assert error.code == "TF-525"
            return False
        return True

    def notes(self, state: bytes, told: Place) -> None:
        """Note that a state follows from a sum's total, as it gives shares for the next."""
        note_verified(self.context.state_folder, state, SumId(9, "seal-0"), opened(told).told())

    def resumes(self) -> None:
        """Go on in the next job of a chain."""
        append_durably(self.context.state_folder / VERIFIED, f"{RESUMED}\n".encode(), mode=0o600)


def sum_of(place: Place) -> SumId:
    return SumId.of(*place, 0)


def opened(place: Place) -> Total:
    return Total(0, sum_of(place), "", ("site-0",), {}, bytes(32))


def test_a_total_that_is_told_says_what_comes_next(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    silo.notes(STATE, THIRD)
    assert not silo.answers(LAST, FIRST) and not silo.answers(FIRST, FIRST), "whatever the notes say"
    assert silo.answers(SECOND, FIRST)
    with pytest.raises(RunError, match=r"^TF-505: "):
        request_order.check_order(
            silo.context, silo.plan, silo.plan.find(*THIRD), "", opened(("after", 4, 0)), ""
        )


def test_the_closing_may_stay_shut_and_does_not_come_back_once_what_follows_is_opened(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    assert not silo.answers(PERSONAL)
    assert silo.answers(CLOSING, LAST) and silo.answers(PERSONAL, LAST) and silo.answers(CLOSING, LAST)
    assert silo.answers(PERSONAL, CLOSING) and not silo.answers(CLOSING, CLOSING)
    assert not silo.answers(CLOSING, PERSONAL) and not silo.answers(PERSONAL, PERSONAL)


def test_without_a_total_the_silos_own_notes_of_the_state_say_it(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    silo.notes(OTHER, THIRD)
    assert not silo.answers(LAST), "they are of another state"
    silo.notes(STATE, FIRST)
    silo.notes(STATE, SECOND)
    assert not silo.answers(FIRST) and not silo.answers(SECOND) and silo.answers(THIRD)


def test_without_notes_a_job_begins_or_goes_on_as_the_silo_was_told(tmp_path: Path) -> None:
    silo = Silo(tmp_path)
    assert not silo.answers(SECOND) and silo.answers(FIRST)
    assert Silo(tmp_path / "other", method_options={"loss": "focal"}).answers(("statistics", 0, 0))
    assert not silo.answers(SECOND, told=str(sum_of(SECOND)))
    assert silo.answers(THIRD, told=str(sum_of(SECOND)))


@pytest.mark.parametrize("summed", [THIRD, ("train", 3, 1)])
def test_a_state_within_a_round_begins_none(tmp_path: Path, summed: Place) -> None:
    """A silo that lost its notes has it from the journal, of the second sum of the very round."""
    silo = Silo(tmp_path, resume=WHERE)
    note(silo.context.state_folder, [STATE.hex(), summed_word(STATE.hex(), sum_of(summed))])
    silo.resumes()
    assert silo.answers(THIRD) == (summed == THIRD)


@pytest.mark.parametrize("verified", [FIRST, SECOND, None])
def test_a_resumed_job_begins_on_the_state_of_its_round(tmp_path: Path, verified: Place | None) -> None:
    """Where the silo has noted nothing of it, the journal binds a training's state, and nothing another's."""
    silo = Silo(tmp_path, resume=WHERE)
    if verified is not None:
        silo.notes(STATE, verified)
    silo.resumes()
    assert silo.answers(THIRD) == (verified != FIRST)
    assert not silo.answers(LAST)
    assert silo.answers(LAST, told=str(sum_of(THIRD)))
    # Of two rounds, none is left to train.
    ending = Silo(tmp_path / "ending", resume=WHERE, rounds=2)
    if verified is not None:
        ending.notes(STATE, verified)
    ending.resumes()
    assert ending.answers(("closing", 2, 0)) == (verified == SECOND)
    plain = Silo(tmp_path / "plain", resume=WHERE, rounds=2, summation="plain")
    assert plain.answers(("closing", 2, 0))
