"""Totals in whole runs: a false one ends the run, a silo that is gone does not; the last one is sealed."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.runs import FOUR, Wire, contexts, coordinator, in_round, job, run

from tightframe.errors import RunError, SecureSumError
from tightframe.rounds.silo.contribute import Contributor
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums import secure_server
from tightframe.rounds.sums.common import SEAL, SEALS
from tightframe.rounds.sums.secure_server import FileSpool
from tightframe.securesum import messages, transcript
from tightframe.securesum.identity import Anchor
from tightframe.securesum.messages import RevealRequest, TermRequest, Total


def verified(folder: Path, server: Path, **options: Any) -> transcript.Report:
    root = x509.load_pem_x509_certificate((server / "simulated_root.pem").read_bytes())
    lines = (folder / "transcript.jsonl").read_bytes().splitlines(keepends=True)
    return transcript.verify(lines, Anchor(root.public_bytes(Encoding.DER)), **options)


def flipped(raw: bytes) -> bytes:
    """A request with one bit of its total changed."""
    request = TermRequest.from_bytes(raw)
    total = Total.from_bytes(request.total)
    data = total.groups["update"]
    false = replace(total, groups={**total.groups, "update": bytes([data[0] ^ 1]) + data[1:]})
    return replace(request, total=false.to_bytes()).to_bytes()


def told(line: Wire) -> dict[str, Total]:
    """The totals told to the first silo, by their sums."""
    found = {}
    for task, site, request, _ in line.seen:
        if task == "contribute" and site == "site-1":
            raw = TermRequest.from_bytes(request["secure"]).total
            if raw:
                total = Total.from_bytes(raw)
                found[str(total.sum_id)] = total
    return found


@pytest.mark.whole
def test_every_total_of_a_run_is_verified_and_the_transcript_replays_it(tmp_path: Path) -> None:
    result, line = run(job(rounds=2), tmp_path)
    totals = told(line)
    assert [*totals] == ["1/train-0/0", "2/train-0/0", "2/closing-0/0"]

    def integers(epoch: int, head: messages.Told) -> Mapping[Any, bytes]:
        return totals[str(head.sum_id)].groups

    for view in ("server", "site-1"):
        report = verified(tmp_path / view, tmp_path / "server", totals=integers)
        assert [str(item.told.sum_id) for item in report.totals] == [*totals]
        assert all(item.recomputed and item.combined == tuple(FOUR) for item in report.totals)
        assert report.unchecked == ()
    assert "not verified" not in result.outcome.screen()
    last = [request["kind"] for task, _, request, _ in line.seen if task == "contribute"][-1]
    assert last == SEAL


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("fedopt", "TF-623 (a total is not shown to be the sum of its terms)"),
        # Where no processor rounds otherwise, the state that follows from it is another than the server's.
        ("fedavg", "TF-518"),
    ],
)
def test_a_server_that_tells_a_false_total_gets_no_share_of_the_next_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: str
) -> None:
    """It tells all silos the same false total, and its own checks are off."""

    def change(task: str, site: str, request: Any) -> Any:
        if task == "contribute" and in_round(request, 2):
            request["secure"] = flipped(request["secure"])
        return request

    monkeypatch.setattr(secure_server.server.Sum, "_check_masked", lambda self, site, masked: None)
    with pytest.raises(RunError, match="too few silos in round 2") as caught:
        run(job(method=method, rounds=2), tmp_path, change=change)
    assert code in str(caught.value)
    report = verified(tmp_path / "site-1", tmp_path / "server")
    assert len(report.opened) == 1 and report.totals == (), "round 1 was opened, and nothing after it"
    # The last screen says that nobody verified the total of round 1.
    outcome = json.loads((tmp_path / "server" / "outcome.json").read_text())
    assert "but have not verified the last one, of round 1" in outcome["sums"]


class Died(BaseException):
    """What ends a silo's process on the way to its term."""


@pytest.mark.whole
def test_a_silo_whose_process_died_over_a_request_is_asked_nothing_else_for_that_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a process dies may depend on a record, so a server gets one model a slot to try it with."""
    of = job(rounds=2)
    sessions = {site: SiloSession(context) for site, context in contexts(of, tmp_path).items()}
    started, refused = [], []

    def dies(self: Contributor, *_: Any, **__: Any) -> Any:
        started.append(self)
        raise Died

    def change(task: str, site: str, request: Any) -> Any:
        if task == "contribute" and site == "site-1" and in_round(request, 2):
            with monkeypatch.context() as patch:
                patch.setattr(Contributor, "contribute", dies)
                with pytest.raises(Died):
                    sessions[site].handle(task, request)
                other = {**request, "secure": flipped(request["secure"])}
                for _ in range(3):
                    with pytest.raises(SecureSumError, match="the first one") as caught:
                        sessions[site].handle(task, other)
                    refused.append(caught.value.code)
        return request

    line = Wire(sessions, change=change)
    coordinator(of, tmp_path).run(line)
    assert refused == ["TF-608"] * 3 and len(started) == 1, "no record was read for another request"
    opened = verified(tmp_path / "site-1", tmp_path / "server").opened
    assert len(opened) == 4, "the same request goes on: two rounds, the closing, the seal"


@pytest.mark.whole
def test_a_server_that_withholds_a_total_from_one_silo_loses_that_silo(tmp_path: Path) -> None:
    def change(task: str, site: str, request: Any) -> Any:
        if task == "contribute" and site == "site-2" and in_round(request, 2):
            term = TermRequest.from_bytes(request["secure"])
            request["secure"] = replace(term, total=b"").to_bytes()
        return request

    result, _ = run(job(rounds=3), tmp_path, change=change)
    rows = {(row.kind, row.round): row.dropped for row in result.outcome.rows}
    assert rows["train", 2] == {"site-2": "TF-622"}, "it gave its shares for that of round 1"
    assert rows["train", 3] == {}


@pytest.mark.whole
@pytest.mark.parametrize("task", ["contribute", "reveal"])
def test_a_silo_that_is_gone_after_its_term_was_opened_does_not_stop_the_run(
    tmp_path: Path, task: str
) -> None:
    """Its term of round 1 is shown by its receipt, and in round 3 nothing of it is needed any more."""
    gone = {"now": False}

    def silent(asked: str, site: str, request: Any) -> bool:
        if site == "site-4":
            gone["now"] |= asked == "contribute" and in_round(request, 2)
            return gone["now"] and (asked != "contribute" or task == "contribute")
        return False

    result, line = run(job(rounds=3), tmp_path, silent=silent)
    assert result.outcome.trained
    requests = [
        RevealRequest.from_bytes(request["secure"])
        for asked, site, request, _ in line.seen
        if asked == "reveal" and site == "site-1"
    ]
    shown = [tuple(item.missing) for item in requests]
    if task == "contribute":
        assert shown[:3] == [(), ("site-4",), ()] and requests[1].dropped == {}
    else:
        assert shown[:3] == [(), (), ("site-4",)], "its later terms come, but it gave no shares"
    report = verified(tmp_path / "site-1", tmp_path / "server")
    checked = report.totals[0 if task == "contribute" else 1]
    assert checked.proved == ("site-4",) and checked.combined == tuple(FOUR[:3])
    assert report.unchecked == ()


@pytest.mark.whole
def test_the_keys_of_dropped_silos_prove_a_term_of_a_sum_with_a_drop_out(tmp_path: Path) -> None:
    """Two silos in turn: one is not in the total of round 2, another does not answer for it in round 3."""

    def silent(task: str, site: str, request: Any) -> bool:
        if task == "contribute" and site == "site-4":
            return in_round(request, 2)
        return task == "contribute" and site == "site-1" and in_round(request, 3)

    result, line = run(job(rounds=4, privacy=None, class_rules="off"), tmp_path, silent=silent)
    requests = [
        RevealRequest.from_bytes(request["secure"])
        for task, site, request, _ in line.seen
        if task == "reveal" and site == "site-2"
    ]
    assert [(tuple(item.missing), tuple(item.dropped)) for item in requests[:4]] == [
        ((), ()),
        (("site-4",), ()),
        (("site-1",), ("site-4",)),
        ((), ()),
    ]
    assert result.outcome.trained
    short, _ = run(job(rounds=2, class_rules="off"), tmp_path / "short", silent=silent)
    assert not torch.equal(
        short.state.model[next(iter(short.state.model))], result.state.model[next(iter(result.state.model))]
    )


@pytest.mark.whole
def test_a_silo_that_lies_about_its_combinations_is_named_in_the_log_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Lying(Wire):
        def exchange(self, task: str, requests: Any, accept: Any) -> Any:
            def take(site: str, answer: Any) -> None:
                item = messages.Masked.from_bytes(answer["secure"]) if task == "contribute" else None
                if item is not None and site == "site-3" and item.receipt.combinations:
                    answer = {"secure": lie(self.sessions[site], item)}
                accept(site, answer)

            return super().exchange(task, requests, take)

    def lie(session: SiloSession, item: messages.Masked) -> bytes:
        """The same with other combinations; the silo goes on with what it told the server."""
        assert session._secure is not None
        vault = session._secure._vault
        state: Any = vault.state()
        own = item.receipt.combinations
        false = {**own, "update": bytes([own["update"][0] ^ 1]) + own["update"][1:]}
        receipt = replace(item.receipt, combinations=false)
        receipt = replace(receipt, signature=messages_signature(state.signing, receipt.signed(state.session)))
        held = state.slots[receipt.slot]
        vault._state = state.with_slot(receipt.slot, replace(held, receipt=receipt))
        return replace(item, receipt=receipt).to_bytes()

    from tightframe.securesum.primitives import ed25519_sign as messages_signature

    of = job(rounds=2)
    sessions = {site: SiloSession(context) for site, context in contexts(of, tmp_path).items()}
    result = coordinator(of, tmp_path).run(Lying(sessions))
    assert result.outcome.trained and all(row.silos == FOUR for row in result.outcome.rows if row.silos)
    assert "site-3 is to blame: TF-623" in caplog.text
    report = verified(tmp_path / "server", tmp_path / "server")
    assert {item.proved for item in report.totals} == {("site-3",)}


# The seal ----------------------------------------------------------------------------------------


def sealing(request: Any) -> bool:
    return request.get("kind") == SEAL


def test_a_seal_that_silos_miss_is_tried_once_more(tmp_path: Path) -> None:
    def silent(task: str, site: str, request: Any) -> bool:
        return sealing(request) and request["phase"] == 0 and site in ("site-1", "site-2")

    result, line = run(job(rounds=1), tmp_path, silent=silent)
    asked = [
        request["phase"] for task, site, request, _ in line.seen if sealing(request) and site == "site-3"
    ]
    assert asked == [0, 1]
    assert "not verified" not in result.outcome.screen()
    report = verified(tmp_path / "server", tmp_path / "server")
    assert report.unchecked == () and [str(item.sum_id) for item in report.failed] == ["0/seal-0/0"]


def test_a_seal_that_fails_is_told_and_undoes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(task: str, site: str, request: Any) -> bool:
        return sealing(request) and site in ("site-1", "site-2")

    result, _ = run(job(rounds=1), tmp_path, silent=silent)
    assert result.outcome.trained
    assert "but have not verified the last one, of closing" in result.outcome.screen()
    assert caplog.text.count("the silos did not verify the last total, of closing") == SEALS
    report = verified(tmp_path / "server", tmp_path / "server")
    assert [str(item.sum_id) for item in report.unchecked] == ["1/closing-0/0"]
    assert (report.reason, report.complete) == (None, True)


@pytest.mark.whole
def test_without_a_seal_silos_set_up_no_other_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_server.rules, "MAX_SLOTS", 4)

    def silent(task: str, site: str, request: Any) -> bool:
        return sealing(request) and site in ("site-1", "site-2")

    with pytest.raises(RunError, match=r"^TF-623: [\s\S]*set up no other epoch"):
        run(job(rounds=3), tmp_path / "honest", silent=silent)
    # A server that goes on regardless: whoever was told a total in a seal that was not opened refuses.
    monkeypatch.setattr(secure_server.SecureSums, "_close_epoch", secure_server.SecureSums.seal)
    with pytest.raises(RunError, match=r"site-1, site-2, site-3 and site-4: TF-622"):
        run(job(rounds=3), tmp_path / "lying", silent=silent)


def test_a_plain_run_needs_no_seal(tmp_path: Path) -> None:
    _, line = run(job(rounds=1, summation="plain"), tmp_path)
    assert not any(sealing(request) for _, _, request, _ in line.seen)


# Files -------------------------------------------------------------------------------------------


@pytest.mark.whole
def test_masked_terms_lie_in_a_temporary_folder_until_their_total_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sizes: list[int] = []

    def watch(task: str, site: str, request: Any) -> bool:
        for folder in tmp_path.glob("tightframe-terms-*"):
            assert folder.stat().st_mode & 0o077 == 0
            sizes.append(len(list(folder.iterdir())))
        return False

    run(job(rounds=2), tmp_path / "run", silent=watch)
    assert max(sizes) == 2 * 2 * 4, "two sums, two groups, four silos"
    assert not list(tmp_path.glob("tightframe-terms-*")), "the seal was verified, so nothing is left"


def test_a_spool_holds_what_it_was_given_and_no_more() -> None:
    spool = FileSpool()
    spool.erase(0)
    with pytest.raises(FileNotFoundError, match="none is kept"):
        spool.read(0, "site-1", "update")
    spool.keep(0, "site-1", "update", b"a")
    spool.keep(10, "Klinik/../x", "static", b"b")
    spool.erase(1)
    assert spool.read(0, "site-1", "update") == b"a" and spool.read(10, "Klinik/../x", "static") == b"b"
    spool.erase(10)
    with pytest.raises(FileNotFoundError):
        spool.read(10, "Klinik/../x", "static")
    spool.erase(0)
    assert spool._folder is None


def test_a_shorter_or_longer_term_is_written_over_an_erased_one() -> None:
    spool = FileSpool()
    spool.keep(0, "site-1", "update", b"abc")
    spool.keep(0, "site-1", "static", b"")
    spool.keep(1, "site-1", "update", b"stays")
    for slot, data in ((2, b"d"), (3, b"longer than any")):
        spool.erase(slot - 1 if slot > 2 else 0)
        spool.keep(slot, "site-1", "update", data)
        assert spool.read(slot, "site-1", "update") == data
        assert spool.read(1, "site-1", "update") == b"stays"
    with pytest.raises(FileNotFoundError):
        spool.read(2, "site-1", "update")
    folder = Path(spool._folder.name) if spool._folder else Path()
    assert len(list(folder.iterdir())) == 3, (
        "two kept, and one of no term; none is left over from erased ones"
    )
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    spool.erase(1)
    spool.erase(3)
    assert not folder.exists()


@pytest.mark.whole
def test_what_a_silo_keeps_of_a_sum_is_the_owners_alone_and_goes(tmp_path: Path) -> None:
    of = job(rounds=2)
    seen: set[str] = set()

    def fresh(site: str) -> SiloSession:
        folder = tmp_path / site / "secure_sum"
        for path in folder.glob("t*"):
            assert path.stat().st_mode & 0o077 == 0
            seen.add(path.name)
        return SiloSession(contexts(of, tmp_path, memory_only=False)[site])

    logging.getLogger("tests").setLevel(logging.WARNING)
    coordinator(of, tmp_path).run(Wire({}, fresh=fresh))
    assert {"term-0", "term-1", "term-2", "term-3"} >= seen >= {"term-0", "term-1"}
    left = {path.name for path in (tmp_path / "site-1" / "secure_sum").glob("t*")}
    assert left <= {"term-2", "term-3"}
