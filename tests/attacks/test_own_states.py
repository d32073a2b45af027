"""A server says that sums were not opened, so that hospitals drop what they trained for themselves.

What a hospital keeps from round to round (its own model, drift, control variate) is its own; which part of it
counts follows from the totals that it is told, not from the server's list of opened sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.support.attacks.malicious_server import Federation, Records

from tightframe.errors import TightframeError
from tightframe.phases import ServerState
from tightframe.rounds.context import NEEDS_STATE
from tightframe.rounds.run_state import state_bytes, state_sha256
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.silo import own_state
from tightframe.rounds.silo.followed_state import next_state
from tightframe.rounds.silo.own_state import proposed_in
from tightframe.rounds.state_files import COMMITTED, TOLD
from tightframe.rounds.sums.common import SEAL
from tightframe.securesum import server
from tightframe.securesum.messages import SumId, TermRequest, Total

GONE = "hospital-2"


def kept(federation: Federation) -> dict[str, str]:
    """The sum of which each hospital has committed its own state."""
    folders = {name: item.context.state_folder for name, item in federation.sessions.items()}
    return {name: proposed_in(folder / COMMITTED) for name, folder in folders.items()}


def ask_for_a_seal(federation: Federation, attempt: int = 0, index: int = 0) -> server.Sum:
    """Ask every hospital for its empty term of the sum in which the last total is verified."""
    turn = server.Sum(
        federation.session,
        slot=federation._slot,
        sum_id=SumId.of(SEAL, 0, index, attempt),
        schema=SEAL,
        basis=bytes.fromhex(federation.shared.sha256),
        spool=server.MemorySpool(),
        rests_on=federation.evidence,
    )
    place = {"kind": SEAL, "round": 0, "phase": index, "attempt": attempt, "opened": {}}
    for name, session in federation.sessions.items():
        request = {**place, **federation.shared.named(), "secure": turn.term_request(b"").to_bytes()}
        answer = session.handle("contribute", request)
        if NEEDS_STATE in answer:
            answer = session.handle(
                "contribute", {**request, "state_bytes": state_bytes(federation.shared.state)}
            )
        turn.add(name, answer["secure"])
    return turn


def open_a_seal(federation: Federation, index: int = 0) -> None:
    """Let every hospital verify the last total in a seal."""
    turn = ask_for_a_seal(federation, attempt=1, index=index)
    for name in turn.close():
        request = {"secure": turn.reveal_request().to_bytes()}
        turn.add_reveal(name, federation.sessions[name].handle("reveal", request)["secure"])


def test_what_a_silo_trained_counts_whatever_the_server_says_was_opened(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """Each request of this server says that nothing was opened."""
    values = {"method": "local_only", "rounds": 3, "answer_grid": 0.0}
    federation = Federation(values, hospitals, state=tmp_path).enroll()
    federation.sum("train", 1)
    federation.sum("train", 2, dead={GONE})
    assert set(kept(federation).values()) == {"1/train-0/0"}
    ask_for_a_seal(federation)
    others = set(hospitals) - {GONE}
    assert kept(federation) == {GONE: "1/train-0/0", **dict.fromkeys(others, "2/train-0/0")}


def test_nor_does_a_silo_drop_it_that_was_left_out_of_the_next_sum(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """It gave its shares of the first sum, whose total it is not told; the server lists no sum as opened."""
    values = {"method": "local_only", "rounds": 4, "answer_grid": 0.0}
    federation = Federation(values, hospitals, state=tmp_path).enroll()
    federation.sum("train", 1)
    federation.sum("train", 2, unasked={GONE})
    federation.sum("train", 3)
    assert kept(federation)[GONE] == "1/train-0/0"


def ask(
    federation: Federation,
    number: int,
    slot: int,
    total: Total,
    state: ServerState,
    opened: Mapping[str, list[str]],
    before: str = "0" * 64,
    kind: str = "train",
) -> None:
    """Ask the hospital that was left out for a term on a state that it missed, behind a total."""
    assert federation.evidence is not None
    message = {
        "kind": kind,
        "round": number,
        "phase": 0,
        "attempt": 0,
        "opened": dict(opened),
        **SharedState(state, before=before).named(),
        "state_bytes": state_bytes(state),
        "secure": TermRequest(
            slot,
            SumId.of(kind, number, 0, 0),
            SEAL if kind == SEAL else total.schema,
            federation.session.setup_for(GONE).to_bytes(),
            total.to_bytes(),
            federation.evidence.seeds_of_survivors(),
        ).to_bytes(),
    }
    federation.sessions[GONE].handle("contribute", message)


@pytest.mark.whole
@pytest.mark.parametrize("how", ["listed", "told"])
def test_what_it_trained_on_a_crafted_state_never_counts(
    hospitals: dict[str, Records], tmp_path: Path, how: str
) -> None:
    """A hospital is sent a crafted state, and the server says that the sum of its term was opened.

    What it trained would be its control variate, say, and with the next true sum its gradients on the crafted
    model would be in a total that is opened.
    """
    federation = Federation(
        {"method": "local_only", "rounds": 9, "answer_grid": 0.0}, hospitals, state=tmp_path
    )
    federation.enroll().sum("train", 1)
    federation.sum("train", 2, unasked={GONE})
    before = federation.evidence
    assert before is not None
    crafted = federation.shared.state.evolve(extra={"crafted": torch.ones(1)})
    ask(federation, 3, 2, before.total, crafted, {"1/train-0/0": [*sorted(hospitals)]})
    federation.sum("train", 3, unasked={GONE})
    true, claimed = federation.evidence, {"3/train-0/0": [*sorted(hospitals)]}
    assert true is not None
    if how == "told":
        false = replace(true.total, survivors=tuple(sorted(hospitals)))
        follows = next_state(federation.setup, crafted, false, federation.applied())
        ask(federation, 4, 3, false, follows, claimed, before=state_sha256(crafted))
        assert kept(federation)[GONE] == "1/train-0/0"
    federation.sum("train", 4, unasked={GONE})
    assert federation.evidence is not None
    ask(federation, 5, 4, federation.evidence.total, federation.shared.state, claimed)
    assert kept(federation)[GONE] == "1/train-0/0"
    assert not (federation.sessions[GONE].context.state_folder / TOLD).exists()


@pytest.mark.whole
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("verified", ["train", SEAL])
@pytest.mark.parametrize("told", ["train", SEAL])
def test_nor_does_it_behind_another_total_of_the_same_sum(
    hospitals: dict[str, Records],
    tmp_path: Path,
    told: str,
    verified: str,
    checked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sum has two slots: a hospital trains on a crafted state in one, the others' is opened in the other.

    It is told a false total of the first slot, which has it among the survivors; then the true one of the
    other is verified, in a round or in a seal. Where what counts is not bound to the total that was told, the
    crafted training is the hospital's own state from then on.
    """
    if not checked:
        monkeypatch.setattr(own_state, "_counts_with", lambda path: mock.ANY)
    values = {"method": "local_only", "rounds": 9, "answer_grid": 0.0}
    federation = Federation(values, hospitals, state=tmp_path).enroll()
    federation.sum("train", 1)
    federation.sum("train", 2, unasked={GONE})
    assert federation.evidence is not None
    crafted = federation.shared.state.evolve(extra={"crafted": torch.ones(1)})
    claimed = {"3/train-0/0": [*sorted(hospitals)]}
    ask(federation, 3, 2, federation.evidence.total, crafted, {"1/train-0/0": [*sorted(hospitals)]})
    federation._slot = 3
    federation.sum("train", 3, unasked={GONE})
    true = federation.evidence
    false = replace(true.total, slot=2, survivors=tuple(sorted(hospitals)))
    follows = next_state(federation.setup, crafted, false, federation.applied())
    number = 4 if told == "train" else 0
    ask(federation, number, 3, false, follows, claimed, before=state_sha256(crafted), kind=told)
    counting = federation.sessions[GONE].context.state_folder / TOLD
    assert proposed_in(counting) == "3/train-0/0"
    federation._informed.add(GONE)
    if verified == "train":
        federation.sum("train", 4, attempt=int(told == "train"))
    else:
        open_a_seal(federation)
    assert kept(federation)[GONE] == ("1/train-0/0" if checked else "3/train-0/0")


@pytest.mark.whole
@pytest.mark.parametrize("wrong", ["sum", "used before", "schema", "set-up"])
def test_a_request_that_is_refused_drops_nothing(
    hospitals: dict[str, Records], tmp_path: Path, wrong: str
) -> None:
    """It tells a false total without a hospital that is in the true one, which is told afterwards."""
    federation = Federation({"method": "local_only", "rounds": 9}, hospitals, state=tmp_path).enroll()
    federation.sum("train", 1)
    before = federation.shared
    federation.sum("train", 2, mute={GONE})
    assert kept(federation)[GONE] == "1/train-0/0" and federation.evidence is not None
    total = federation.evidence.total
    false = replace(total, survivors=tuple(name for name in total.survivors if name != GONE))
    follows = next_state(federation.setup, before.state, false, federation.applied())
    named, asked = (2, 2) if wrong == "used before" else (3, 4 if wrong == "sum" else 3)
    request = TermRequest(
        2,
        SumId.of("train", asked, 0, 0),
        SEAL if wrong == "schema" else total.schema,
        federation.session.setup_for("hospital-1" if wrong == "set-up" else GONE).to_bytes(),
        false.to_bytes(),
        federation.evidence.seeds_of_survivors(),
    )
    place = {"kind": "train", "round": named, "phase": 0, "attempt": 0, "opened": {}}
    message = {**place, **SharedState(follows, before=before.sha256).named(), "secure": request.to_bytes()}
    with pytest.raises(TightframeError):
        federation.sessions[GONE].handle("contribute", message)
    federation._slot = 3
    federation.sum("train", 3)
    assert kept(federation)[GONE] == "2/train-0/0"
