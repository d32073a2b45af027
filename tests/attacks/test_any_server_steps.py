"""Sequences of requests that the state machine of ``test_any_server`` found or seldom reaches, by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from tests.support.attacks.any_server import AnyServer, Slot, establish_once
from tests.support.attacks.small_silos import ENDLESS, SECURE, CrashError, Line

from tightframe.rounds import unsent
from tightframe.rounds.sums.common import SEAL
from tightframe.securesum.messages import RevealRequest, TermRequest


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Wait for no disk, and verify no set-up twice."""
    with mock.patch("os.fsync"), mock.patch("tightframe.securesum.site.establish", establish_once):
        yield


def server_of(folder: Path, line: Line = ENDLESS, sites: int = 3) -> AnyServer:
    """A server of honest silos that keep own states."""
    return AnyServer(sites, None, folder, keeps=True, line=line)


def ask(server: AnyServer, names: Sequence[str], *, crash: bool = False, times: int = 1) -> Slot:
    """Ask silos for their terms of the next step, in a new slot; so many times each."""
    epoch = server.epoch
    total = None if epoch.last is None else epoch.last.total
    slot = epoch.slot(epoch.next)
    told = b"" if total is None else total.to_bytes()
    seeds = {} if epoch.last is None else epoch.last.seeds_of_survivors()
    sum_id = server.sum_id("train")
    for name in names:
        setup = server.setup_for(name, epoch)
        request = TermRequest(slot.number, sum_id, "train", setup, told, seeds)
        for _ in range(times):
            server.ask(name, server.message(request), crash=crash)
    return slot


def reveal(server: AnyServer, slot: Slot, names: Sequence[str]) -> None:
    """Ask silos for their shares of the sum of all silos' terms, and go on with its total if it is open."""
    receipts = tuple(slot.masked[name].receipt for name in server.names)
    evidence = server.epoch.last
    missing, dropped = {}, {}
    if evidence is not None:
        given = {item.name for item in receipts if item.combinations}
        missing = {name: evidence.proof(name) for name in set(evidence.total.survivors) - given}
        dropped = evidence.seeds_of_dropped() if missing else {}
    message = {SECURE: RevealRequest(slot.number, receipts, (), missing, dropped).to_bytes()}
    for name in names:
        assert not isinstance(server.deliver(name, "reveal", message), str)
    if "update" in slot.opened:
        server.adopt(server.epoch, slot)


GONE = "site-2"


@pytest.mark.parametrize("dies", ["over its records", "as its answer is stored"])
def test_a_request_whose_term_never_left_drops_no_training(tmp_path: Path, dies: str) -> None:
    """The next sum's request comes before the last one's shares are asked for, and the process dies over it.

    ``AnyServer`` checks that the silo uses what it trained for a sum that it gave its shares of.
    """
    server = server_of(tmp_path)
    first = ask(server, server.names)
    if dies == "over its records":
        server.silos[GONE].die()
    ask(server, [GONE], crash=dies != "over its records")
    server.silos[GONE].restart()
    reveal(server, first, server.names)
    second = ask(server, server.names)
    reveal(server, second, server.names)
    assert second.asked[GONE].own, "what it trained for the first sum"


def test_a_process_that_dies_once_its_term_is_masked_keeps_its_training(tmp_path: Path) -> None:
    """It had yet to forget its own state of before; its shares are missing, and the total tells it."""
    server = server_of(tmp_path, sites=4)
    others, sent = [name for name in server.names if name != GONE], unsent.sent
    died = []

    def dies(folder: Path) -> None:
        if GONE in folder.parts and not died:
            died.append(folder)
            raise CrashError
        sent(folder)

    parts = SimpleNamespace(keep=unsent.keep, undo=unsent.undo, check=unsent.check, sent=dies)
    with mock.patch("tightframe.rounds.sums.secure_silo.unsent", parts):
        first = ask(server, server.names, times=2)
    assert died
    reveal(server, first, others)
    second = ask(server, server.names)
    reveal(server, second, server.names)
    assert second.asked[GONE].own


def test_who_gives_no_shares_twice_still_uses_its_own_training(tmp_path: Path) -> None:
    """Its shares of the last training and of the closing are missing; its terms are in both totals."""
    server = server_of(tmp_path, Line(1, 1, 2), sites=4)
    others = [name for name in server.names if name != GONE]
    last = ask(server, server.names)
    reveal(server, last, others)
    closing = ask(server, server.names)
    reveal(server, closing, others)
    personal = ask(server, server.names)
    reveal(server, personal, server.names)
    assert personal.asked[GONE].own == closing.asked[GONE].own != b""
    # Its shares verified the closing's total, and with it what that rests on: so it counts behind that, too.
    server.honest_sum(SEAL, {})
    assert server.resume(*server.resumable())
    server.honest_sum("train", {GONE: "contribute"})
    again = ask(server, server.names)
    reveal(server, again, server.names)
    assert again.asked[GONE].own == personal.asked[GONE].own


def test_a_seal_does_not_say_which_exchange_a_state_is_for(tmp_path: Path) -> None:
    """A resumed job goes on with a state on which its silos have opened nothing but a seal."""
    server = server_of(tmp_path)
    server.honest_sum(SEAL, {})
    assert server.resume(*server.resumable())
    server.honest_sum("train", {})
    assert server.step == 1
