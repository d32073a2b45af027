"""A server tries a sum again, so that one broadcast is summed over two different sets of silos.

A silo's term is the same in every try, so that the difference would be one silo's. Each silo holds this by
its own journal: once it gave shares for one try, it masks its term for no other.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tests.support.attacks.malicious_server import Federation, Records

from tightframe.errors import SecureSumError
from tightframe.rounds.server.collecting import SharedState
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum.errors import RecoveryError, ReplayError
from tightframe.securesum.messages import SumId
from tightframe.securesum.site.journal import History, Revealed

GONE = "hospital-4"


def summed(federation: Federation, attempt: int, **how: Any) -> dict[str, Any]:
    """One try of round 1, on the same state: the server says nothing of an earlier try."""
    federation.shared, federation.evidence = SharedState(federation.setup.initial_state()), None
    return federation.sum("train", 1, attempt=attempt, **how)


def refusing(federation: Federation, attempt: int, *, epoch: int) -> set[str]:
    """The hospitals whose journals refuse another try of the round, also after a restart."""
    sites = set()
    for name, session in federation.sessions.items():
        history = History(read_journal(session.context.ledger_paths, check=None))
        try:
            history.check_slot(federation.job_id, epoch, 5, SumId.of("train", 1, 0, attempt))
        except ReplayError as error:
            assert error.code == "TF-608"
            sites.add(name)
    return sites


@pytest.mark.parametrize(
    ("dead", "mute"),
    [((), ()), ((), ("hospital-3",)), ((GONE,), ())],
    ids=["all", "one not asked", "one dead"],
)
def test_who_gave_shares_for_one_set_masks_for_no_second_try(
    hospitals: dict[str, Records], tmp_path: Path, dead: Collection[str], mute: Collection[str]
) -> None:
    """Who did not give any may mask again; such silos are fewer than the least that open a sum."""
    federation = Federation({"rounds": 2}, hospitals, state=tmp_path).enroll()
    assert "update/head.weight" in summed(federation, 0, dead=dead, mute=mute)
    gave = set(hospitals) - set(dead) - set(mute)
    for attempt, epoch in ((1, 0), (2, 0), (1, 1)):
        assert refusing(federation, attempt, epoch=epoch) == gave
    assert len(hospitals) - len(gave) < federation.proposed.min_sites
    with pytest.raises(SecureSumError, match=r"^TF-608: "):
        summed(federation, 1)
    for name in hospitals:
        entries = read_journal(federation.sessions[name].context.ledger_paths, check=None)
        sets = {entry.survivors for entry in entries if isinstance(entry, Revealed)}
        assert len(sets) == (name in gave)


def test_a_try_for_which_nobody_gave_shares_can_be_repeated(
    hospitals: dict[str, Records], tmp_path: Path
) -> None:
    """Then one set of silos is opened, that of the second try."""
    federation = Federation({"rounds": 2}, hospitals, state=tmp_path).enroll()
    with pytest.raises(RecoveryError, match="valid reveals"):
        summed(federation, 0, mute=tuple(hospitals))
    assert not refusing(federation, 1, epoch=0)
    assert "update/head.weight" in summed(federation, 1, dead=(GONE,))
    assert refusing(federation, 2, epoch=0) == set(hospitals) - {GONE}
