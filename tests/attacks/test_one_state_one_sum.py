"""A server has one state of the run summed again and again, or moves it by less than silos notice.

Batches that are drawn anew blur the difference of two totals with and without a hospital, but not the mean of
many such differences. And whoever may move a state a little, as often as it likes, chooses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.test_own_states import open_a_seal
from tests.support.attacks.malicious_server import Federation, Records

from tightframe.errors import TightframeError
from tightframe.phases import ServerState
from tightframe.rounds.pace import HEADROOM
from tightframe.rounds.run_state import ABSOLUTE, RELATIVE, state_bytes
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.silo import contribute
from tightframe.rounds.silo.followed_state import next_state
from tightframe.rounds.silo.rehearsal import rehearse
from tightframe.rounds.sums.common import SEAL
from tightframe.securesum.messages import Masked, SumId, TermRequest
from tightframe.securesum.site.journal import History

VALUES = {
    "rounds": 5,
    "answer_grid": 0.0,
    "weights": "uniform",
    "model_options": {"widths": [16]},
    "training": {"learning_rate": 1e-5},
}


def asked(kind: str, number: int, named: SharedState, secure: bytes) -> dict[str, Any]:
    """A request that comes with the state that it rests on."""
    sent = {**named.named(), "state_bytes": state_bytes(named.state), "secure": secure}
    return {"kind": kind, "round": number, "phase": 0, "attempt": 0, "opened": {}, **sent}


def leave_totals_out(federation: Federation) -> None:
    """The server says that no sum has been opened."""
    start = federation.shared
    federation.sum("train", 1)
    federation.evidence = None
    federation.sum("train", 2, named=start, dead={"hospital-2"})


def tell_an_older_total_again(federation: Federation) -> None:
    """The server says that the sum after this total was not opened."""
    federation.sum("train", 1)
    evidence, shared = federation.evidence, federation.shared
    federation.sum("train", 2)
    federation.evidence = evidence
    federation.sum("train", 3, named=shared, dead={"hospital-2"})


def send_a_verified_state(federation: Federation) -> None:
    """The server tells the last total, and sends a state of an earlier round as one that silos missed."""
    federation.sum("train", 1)
    shared = federation.shared
    federation.sum("train", 2)
    federation.sum("train", 3)
    federation.sum("train", 4, named=SharedState(shared.state, before="0" * 64), dead={"hospital-2"})


def set_up_another_epoch(federation: Federation) -> None:
    """The server begins an epoch without the total that was opened last."""
    federation.sum("train", 1)
    shared = federation.shared
    federation.sum("train", 2)
    federation.enroll(epoch=1)
    federation.sum("train", 3, named=shared, dead={"hospital-2"})


def name_it_twice_in_another_epoch(federation: Federation) -> None:
    """The last total is verified in a seal. At the first request a silo would keep the state unvouched."""
    start = federation.shared
    federation.sum("train", 1)
    open_a_seal(federation)
    federation.enroll(epoch=1)
    with suppress(TightframeError):
        federation.sum("train", 2, named=start)
    federation.sum("train", 2, named=start, attempt=1, dead={"hospital-2"})


def name_the_start_behind_a_crafted_state(federation: Federation) -> None:
    """No silo vouches for the crafted state, but each keeps it, and is then told that the run begins."""
    start = federation.shared
    federation.sum("train", 1)
    open_a_seal(federation)
    federation.enroll(epoch=1)
    model = {name: value + 1 for name, value in start.state.model.items()}
    with suppress(TightframeError):
        federation.sum("train", 2, named=SharedState(start.state.evolve(model=model), before="0" * 64))
    federation.sum("train", 2, named=start, attempt=1, dead={"hospital-2"})


def start_the_job_again(federation: Federation) -> None:
    """All processes of the job end, and the server has the engine start it again, under the same id."""
    federation.sum("train", 1)
    shared = federation.shared
    federation.sum("train", 2)
    federation.start_again()
    federation.enroll(epoch=1)
    federation.sum("train", 3, named=shared, dead={"hospital-2"})


@pytest.mark.parametrize(
    ("again", "code"),
    [
        (leave_totals_out, "TF-622"),
        (tell_an_older_total_again, "TF-622"),
        (send_a_verified_state, "TF-518"),
        (set_up_another_epoch, "TF-622"),
        (name_it_twice_in_another_epoch, "TF-518"),
        (name_the_start_behind_a_crafted_state, "TF-518"),
        (start_the_job_again, "TF-608"),
    ],
)
def test_no_state_is_summed_twice(
    federation: Federation, again: Callable[[Federation], None], code: str
) -> None:
    with pytest.raises(TightframeError, match=rf"^{code}: "):
        again(federation)


@pytest.mark.parametrize("journalled", [True, False])
def test_a_start_is_not_moved_step_by_step(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, journalled: bool
) -> None:
    """Each state is within rounding of the one before; a silo compares all of them with its own start.

    It answers one request a slot, too; without that, each of them alone would be refused.
    """
    if not journalled:
        monkeypatch.setattr(History, "check_request", lambda self, wanted: None)
    request = TermRequest(0, SumId.of("train", 1, 0, 0), SEAL).to_bytes()
    start = federation.shared.state
    shift = 0.9 * (RELATIVE * float(start.model["head.weight"].abs().max()) + ABSOLUTE)
    for step in (1, 2, 3):
        model = {**start.model, "head.weight": start.model["head.weight"] + step * shift}
        moved = start.evolve(model=model)
        message = asked(SEAL, 0, SharedState(moved, before=""), request)
        for session in federation.sessions.values():
            with pytest.raises(TightframeError) as caught:
                session.handle("contribute", message)
            # The first is taken over, and refused later, as a request for another sum than it says.
            assert caught.value.code == ("TF-610" if step == 1 else "TF-608" if journalled else "TF-518")
    with pytest.raises(TightframeError) as caught:
        federation.sum("train", 1, named=SharedState(moved))
    assert caught.value.code == ("TF-608" if journalled else "TF-518")


def test_one_hospital_is_not_asked_about_its_records_by_how_long_it_trains(federation: Federation) -> None:
    """A model that fails at the first batch with a certain record, sent as a state that one silo missed."""
    federation.sum("train", 1)
    assert federation.evidence is not None
    crafted = federation.shared.state.evolve(
        model={name: value + 1 for name, value in federation.shared.state.model.items()}
    )
    named = SharedState(crafted, before="0" * 64)
    told, seeds = federation.evidence.total.to_bytes(), federation.evidence.seeds_of_survivors()
    request = TermRequest(1, SumId.of("train", 2, 0, 0), "train", b"", told, seeds).to_bytes()
    message = asked("train", 2, named, request)
    with pytest.raises(TightframeError, match=r"^TF-518: "):
        federation.sessions["hospital-2"].handle("contribute", message)


@pytest.mark.whole
@pytest.mark.parametrize("crafted", [True, False])
def test_nor_in_a_resumed_job_before_its_first_total(
    hospitals: dict[str, Records], tmp_path: Path, crafted: bool
) -> None:
    """All have lost their state; who missed a sum comes back behind the others' first total."""
    late, resume = "hospital-2", {"lineage": "job-a", "previous": "job-a", "checkpoint_sha256": "0" * 64}
    stopped = Federation(VALUES, hospitals, state=tmp_path).enroll()
    stopped.sum("train", 1)
    state = stopped.shared.state
    stopped.sum("train", 2, unasked={late})
    values = {**VALUES, "resume": {**resume, "after_round": 1}}
    federation = Federation(values, hospitals, state=tmp_path, job_id="job-b").enroll()
    federation.shared = SharedState(state)
    named = state.evolve(model={name: value + float(crafted) for name, value in state.model.items()})
    schema = next(name for name in federation.proposed.schemas if name.startswith("train-0/"))
    setup = federation.session.setup_for(late).to_bytes()
    request = TermRequest(0, SumId.of("train", 2, 0, 0), schema, setup).to_bytes()
    message = asked("train", 2, SharedState(named), request)
    with pytest.raises(TightframeError, match=r"^TF-519: "):
        federation.sessions[late].handle("contribute", message)
    federation.sum("train", 2, unasked={late})
    federation.sum("train", 3)
    assert federation.evidence is not None and late in federation.evidence.total.survivors


def test_what_is_left_of_it_a_false_total_told_to_one_hospital_that_is_then_left_out(
    federation: Federation,
) -> None:
    """It trains on what follows, its term stays shut, and the run goes on: one question a sum without it."""
    asked, others = "hospital-2", {"hospital-1", "hospital-3", "hospital-4"}
    start = federation.shared.state
    federation.sum("train", 1)
    assert federation.evidence is not None
    total, shared = federation.evidence.total, federation.shared
    groups = {group: bytes(len(data)) for group, data in total.groups.items()}
    false = replace(total, groups=groups)
    crafted = SharedState(next_state(federation.setup, start, false, federation.applied()))
    assert crafted.sha256 != shared.sha256
    told, seeds = false.to_bytes(), federation.evidence.seeds_of_survivors()
    request = TermRequest(1, SumId.of("train", 2, 0, 0), total.schema, b"", told, seeds)
    message = {
        "kind": "train",
        "round": 2,
        "phase": 0,
        "attempt": 0,
        "opened": {},
        "state": crafted.sha256,
        "before": shared.before,
        "secure": request.to_bytes(),
    }
    receipt = Masked.from_bytes(federation.sessions[asked].handle("contribute", message)["secure"]).receipt
    assert receipt.basis.hex() == crafted.sha256 and receipt.follows
    federation.sum("train", 2, unasked={asked})
    assert federation.evidence.total.survivors == tuple(sorted(others))
    federation.sum("train", 3)
    assert asked in federation.evidence.total.survivors


def ask_by_time(federation: Federation, name: str, state: ServerState, number: int, slot: int) -> float:
    """Send a hospital a state that it missed, behind a true total without it; return how long it answers."""
    assert federation.evidence is not None
    told, seeds = federation.evidence.total.to_bytes(), federation.evidence.seeds_of_survivors()
    schema = federation.evidence.total.schema
    setup = federation.session.setup_for(name).to_bytes()
    request = TermRequest(slot, SumId.of("train", number, 0, 0), schema, setup, told, seeds).to_bytes()
    message = asked("train", number, SharedState(state, before="0" * 64), request)
    started = time.monotonic()
    federation.sessions[name].handle("contribute", message)
    return time.monotonic() - started


@pytest.mark.whole
@pytest.mark.parametrize("left_out", [{2}, {1, 2}])
@pytest.mark.usefixtures("held")
def test_a_training_that_fails_at_once_takes_as_long_as_a_whole_one(
    hospitals: dict[str, Records], tmp_path: Path, left_out: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever state it is sent, whenever it is left out: it answers as late as after a whole training."""
    values = {**VALUES, "answer_grid": 0.01, "training": {"epochs": 12, "learning_rate": 1e-6}}
    federation = Federation(values, hospitals, state=tmp_path).enroll()
    name = "hospital-2"
    for number in (1, 2):
        federation.sum("train", number, unasked={name} if number in left_out else ())
    pace = federation.sessions[name].context.pace
    assert pace.lacks("0") == (1 in left_out)
    state = federation.shared.state
    crafted = state.evolve(model={key: value * float("nan") for key, value in state.model.items()})
    rehearsals: list[float] = []

    def timed(*args: Any) -> Mapping[str, float]:
        started = time.monotonic()
        found = rehearse(*args)
        rehearsals.append(time.monotonic() - started)
        return found

    monkeypatch.setattr(contribute, "rehearse", timed)
    seconds = ask_by_time(federation, name, crafted, 3, slot=2) - sum(rehearsals)
    assert len(rehearsals) == (1 in left_out)
    assert not pace.lacks("0")
    assert pace.floor / HEADROOM > 0.02  # of a training, not of what failed at once
    assert seconds >= pace.floor
