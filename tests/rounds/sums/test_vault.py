"""What a site remembers: across processes, jobs and crashes."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from tests.support.memory import memory, read, write

from tightframe.files import drop_torn_line
from tightframe.privacy.ledger import store
from tightframe.privacy.ledger.entries import LedgerError, Remembered, TamperError
from tightframe.rounds.sums.vault import Vault
from tightframe.securesum.errors import MessageError, ReplayError, StateError, StaticCohortError
from tightframe.securesum.messages import SumId
from tightframe.securesum.site.journal import SlotUsed, StaticOpened


def _slot(job: str, slot: int) -> SlotUsed:
    return SlotUsed(job, 0, slot, SumId(slot, "train-0"), bytes(32), bytes(32))


def test_what_another_job_of_the_site_wrote_is_seen(tmp_path: Path) -> None:
    one, other = (Vault(tmp_path / name, memory(tmp_path), on_disk=False) for name in ("one", "other"))
    with one.locked() as history:
        history.check_static("skin", ("a", "b", "c"))
    write(memory(tmp_path), [StaticOpened("skin", ("a", "b", "d"), "another-job")])
    for vault in (one, other):
        with vault.locked() as history, pytest.raises(StaticCohortError):
            history.check_static("skin", ("a", "b", "c"))


def test_a_restart_knows_which_slots_were_used(tmp_path: Path) -> None:
    write(memory(tmp_path), [_slot("j", 0), _slot("j", 1)])
    assert read(memory(tmp_path)) == [_slot("j", 0), _slot("j", 1)]
    with Vault(tmp_path, memory(tmp_path), on_disk=False).locked() as history:
        with pytest.raises(ReplayError):
            history.check_slot("j", 0, 1, SumId(9, "train-0"))
        history.check_slot("j", 0, 2, SumId(9, "train-0"))


@pytest.mark.parametrize(
    "content", [b"", b"no newline at all", b"a\n", b"a\nb", b"x" * 200_000 + b"\n" + b"y" * 99_999]
)
def test_torn_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    drop_torn_line(path)
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]


def test_a_journal_that_cannot_be_read_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    site_ledger = memory(tmp_path)
    write(site_ledger, [_slot("j", 0)])
    with site_ledger.open() as ledger:
        ledger.remember(Remembered(({"entry": "of a later version"},)))
    with pytest.raises(MessageError), Vault(tmp_path, memory(tmp_path), on_disk=False).locked():
        pass
    with sqlite3.connect(site_ledger.paths.ledger) as database:
        database.execute("UPDATE entries SET content = '{}' WHERE sequence = 1")
    database.close()
    with (
        pytest.raises(TamperError, match="entry 1"),
        Vault(tmp_path, memory(tmp_path), on_disk=False).locked(),
    ):
        pass


def test_no_step_is_kept_that_the_journal_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    vault = Vault(tmp_path / "run", memory(tmp_path), on_disk=False)
    with pytest.raises(StateError):
        vault.commit([_slot("j", 0)], None, {"reply": b"bytes"}, {"term-0": b"z"})  # type: ignore[arg-type]
    monkeypatch.setattr(store.Store, "append", full)
    with pytest.raises(LedgerError), vault.locked():
        vault.commit([_slot("j", 0)], None, {"reply": b"bytes"}, {"term-0": b"z"})  # type: ignore[arg-type]
    assert vault.recall("reply") is None and vault.recall("term-0") is None


def test_two_processes_take_turns(tmp_path: Path) -> None:
    # A count that is read and written back under the lock is never lost.
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count_up, args=(tmp_path,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert (tmp_path / "number").read_text() == "60"


def _count_up(folder: Path) -> None:
    vault, number = Vault(folder, memory(folder), on_disk=False), folder / "number"
    for _ in range(30):
        with vault.locked():
            found = int(number.read_text()) if number.exists() else 0
            number.write_text(str(found + 1))


def test_what_is_kept_stays_in_memory_or_is_the_owners_alone(tmp_path: Path) -> None:
    in_memory = Vault(tmp_path / "memory", memory(tmp_path / "a"), on_disk=False)
    on_disk = Vault(tmp_path / "disk", memory(tmp_path / "b"), on_disk=True)
    for vault in (in_memory, on_disk):
        assert vault.recall("reply") is None
        vault.keep("reply", b"bytes")
        assert vault.recall("reply") == b"bytes"
        vault.keep("term-0", b"z")
        for _ in range(2):
            vault.erase("term-0")
            assert vault.recall("term-0") is None
        with pytest.raises(StateError):
            vault.state()
    assert not (tmp_path / "memory").exists()
    assert (tmp_path / "disk" / "reply").stat().st_mode & 0o077 == 0
