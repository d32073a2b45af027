"""What a site remembers: across processes, jobs and crashes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tightframe.files import drop_torn_line
from tightframe.rounds.secure.vault import Vault, append_entries, read_journal
from tightframe.securesum.errors import MessageError, ReplayError, StateError, StaticCohortError
from tightframe.securesum.journal import SlotUsed, StaticOpened
from tightframe.securesum.messages import SumId


def _slot(job: str, slot: int) -> SlotUsed:
    return SlotUsed(job, 0, slot, SumId(slot, "train-0"), bytes(32), bytes(32))


def test_what_another_job_of_the_site_wrote_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    one, other = (Vault(tmp_path / name, path, on_disk=False) for name in ("one", "other"))
    with one.locked() as history:
        history.check_static("skin", ("a", "b", "c"))
    append_entries(path, [StaticOpened("skin", ("a", "b", "d"), "another-job")])
    for vault in (one, other):
        with vault.locked() as history, pytest.raises(StaticCohortError):
            history.check_static("skin", ("a", "b", "c"))


def test_a_restart_knows_which_slots_were_used(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_entries(path, [_slot("j", 0), _slot("j", 1)])
    with Vault(tmp_path, path, on_disk=False).locked() as history:
        with pytest.raises(ReplayError):
            history.check_slot("j", 0, 1, SumId(9, "train-0"))
        history.check_slot("j", 0, 2, SumId(9, "train-0"))


def test_a_line_that_a_crash_cut_off_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_entries(path, [_slot("j", 0), _slot("j", 1)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with Vault(tmp_path, path, on_disk=False).locked() as history, pytest.raises(ReplayError):
        history.check_slot("j", 0, 0, SumId(9, "train-0"))
    assert read_journal(path) == [_slot("j", 0)]
    append_entries(path, [_slot("j", 1)])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"", b"no newline at all", b"a\n", b"a\nb", b"x" * 200_000 + b"\n" + b"y" * 99_999]
)
def test_torn_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    drop_torn_line(path)
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]


def test_a_journal_that_cannot_be_read_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_entries(path, [_slot("j", 0)])
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(MessageError), Vault(tmp_path, path, on_disk=False).locked():
        pass
    path.write_bytes(b"not json\n")
    with pytest.raises(MessageError):
        read_journal(path)


def test_two_processes_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    # A count that is read and written back under the lock is never lost.
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count_up, args=(tmp_path, path)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert (tmp_path / "number").read_text() == "100"


def _count_up(folder: Path, path: Path) -> None:
    vault, number = Vault(folder, path, on_disk=False), folder / "number"
    for _ in range(50):
        with vault.locked():
            found = int(number.read_text()) if number.exists() else 0
            number.write_text(str(found + 1))


def test_what_is_kept_stays_in_memory_or_is_the_owners_alone(tmp_path: Path) -> None:
    in_memory = Vault(tmp_path / "memory", tmp_path / "a.jsonl", on_disk=False)
    on_disk = Vault(tmp_path / "disk", tmp_path / "b.jsonl", on_disk=True)
    for vault in (in_memory, on_disk):
        assert vault.recall("reply") is None
        vault.keep("reply", b"bytes")
        assert vault.recall("reply") == b"bytes"
        with pytest.raises(StateError):
            vault.state()
    assert not (tmp_path / "memory").exists()
    assert (tmp_path / "disk" / "reply").stat().st_mode & 0o077 == 0
