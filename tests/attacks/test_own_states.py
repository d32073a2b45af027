"""A server says that sums were not opened, so that hospitals drop what they trained for themselves.

What a hospital keeps from round to round (its own model, drift, control variate) is its own; which part of it
counts follows from the totals that it is told, not from the server's list of opened sums.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.attacks.malicious_server import Federation, Records, hearts

from tightframe.rounds.context import COMMITTED
from tightframe.rounds.silo.own_state import proposed_in
from tightframe.rounds.sums.common import SEAL
from tightframe.securesum import server
from tightframe.securesum.messages import SumId

GONE = "hospital-2"


@pytest.fixture(scope="module")
def hospitals() -> dict[str, Records]:
    return hearts(4)


def kept(federation: Federation) -> dict[str, str]:
    """The sum of which each hospital has committed its own state."""
    folders = {name: item.context.state_folder for name, item in federation.sessions.items()}
    return {name: proposed_in(folder / COMMITTED) for name, folder in folders.items()}


def ask_for_a_seal(federation: Federation) -> None:
    """Ask every hospital for its empty term of the sum in which the last total is verified."""
    turn = server.Sum(
        federation.session,
        slot=federation._slot,
        sum_id=SumId.of(SEAL, 0, 0, 0),
        schema=SEAL,
        basis=bytes.fromhex(federation.shared.sha256),
        spool=server.MemorySpool(),
        rests_on=federation.evidence,
    )
    place = {"kind": SEAL, "round": 0, "phase": 0, "attempt": 0, "opened": {}}
    for session in federation.sessions.values():
        request = {**place, **federation.shared.named(), "secure": turn.term_request(b"").to_bytes()}
        session.handle("contribute", request)


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
