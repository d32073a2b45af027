"""A site's ledger across jobs: what shows that it was lost, and when a new one may begin."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tightframe.config.site import SiteEntry
from tightframe.data.columns import marked
from tightframe.errors import TightframeError
from tightframe.privacy.ledger.chain import read_ledger
from tightframe.privacy.ledger.entries import Begun, LedgerError, LostError, Remembered, TamperError
from tightframe.privacy.ledger.ledger import Ledger
from tightframe.privacy.ledger.store import head_file, secret_file
from tightframe.results.files import TRANSCRIPT
from tightframe.rounds import site_ledger as module
from tightframe.rounds.site_ledger import (
    LedgerPaths,
    SiteLedger,
    check_witness,
    describe_loss,
    read_contents,
)
from tightframe.rounds.sums.simulated_identity import simulated_identity

FACT: dict[str, Any] = {"entry": "of a step"}


def ledger_of(folder: Path, *, lasting: bool = True) -> SiteLedger:
    """A site's ledger in production, or in a folder of one run."""
    kit = folder / "kit"
    kit.mkdir(exist_ok=True)
    paths = LedgerPaths.of_site(folder / "state", "site-1", kit)
    if not lasting:
        paths = LedgerPaths("site-1", paths.ledger, paths.journal)
    return SiteLedger(paths, SiteEntry(), partial(simulated_identity, "job", "site-1", production=False))


def contents_of(paths: LedgerPaths) -> list[Any]:
    return [entry.content for entry in read_ledger(paths.ledger, check=None).entries]


def leave(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def transcript(paths: LedgerPaths) -> Path:
    """Leave the transcript of an earlier job."""
    assert paths.jobs is not None
    return leave(paths.jobs / "job-a" / "site-1" / TRANSCRIPT)


def refused(call: Callable[[], Any], code: str) -> None:
    with pytest.raises(TightframeError) as caught:
        call()
    assert caught.value.code == code


def test_paths_of_a_site_are_those_of_all_its_jobs(tmp_path: Path) -> None:
    assert LedgerPaths.of_site(tmp_path, "site-1", None).witness is None
    paths = LedgerPaths.of_site(tmp_path, "site-1", tmp_path / "kit")
    assert paths.witness == tmp_path / "kit" / module.KIT_HEAD
    traces = [head_file(paths.ledger), paths.witness, paths.lock, paths.journal / module.OLD_JOURNAL]
    for path in traces:
        leave(path)
    told = transcript(paths)
    assert paths.traces() == traces and paths.transcripts() == [told]
    without_kit = LedgerPaths.of_site(tmp_path, "site-1", None)
    assert without_kit.traces() == [path for path in traces if path != paths.witness]
    of_one_run = LedgerPaths("site-1", paths.ledger, paths.journal, witness=paths.witness)
    assert of_one_run.traces() == of_one_run.transcripts() == []


def entry(content: Any) -> Any:
    return SimpleNamespace(content=content)


@pytest.mark.parametrize(
    ("entries", "trace", "transcripts", "old", "lost"),
    [
        (None, False, False, False, None),
        (None, True, False, False, "no ledger at"),
        (None, False, True, False, "no record of earlier secure sums"),
        (None, False, False, True, "no ledger at"),
        ((), False, False, True, "no record of earlier secure sums"),
        ((entry(Begun("TF-620")),), False, False, True, None),
        ((), True, False, False, None),
        ((), True, True, False, "no record of earlier secure sums"),
        ((entry("a charge"),), True, True, False, "no record of earlier secure sums"),
        ((entry("a charge"), entry(Remembered(()))), True, True, False, None),
        ((entry(Begun("TF-620")),), True, True, False, None),
    ],
)
def test_what_shows_a_loss(
    tmp_path: Path, entries: Any, trace: bool, transcripts: bool, old: bool, lost: str | None
) -> None:
    paths = LedgerPaths.of_site(tmp_path, "site-1", None)
    if trace:
        leave(paths.lock)
    if transcripts:
        transcript(paths)
    if old:
        leave(paths.journal / module.OLD_JOURNAL)
    found = describe_loss(paths, entries)
    assert found is None if lost is None else found is not None and lost in found


def test_the_secret_that_columns_are_known_by_is_missed(tmp_path: Path) -> None:
    """By the check as by a job; a person who begins again begins with another one."""
    of = ledger_of(tmp_path)

    def noting() -> bytes:
        with ledger_of(tmp_path).open() as ledger:
            ledger.note_data("ward-7", "ab" * 32, columns=marked([bytes(512)], ledger.secret()))
            return ledger.secret()

    first, beside = noting(), secret_file(of.paths.ledger)
    assert read_contents(of.paths, check=None) is not None and noting() == first
    for other in (None, b"x" * 32, first[:-1]):
        beside.unlink(missing_ok=True)
        if other is not None:
            beside.write_bytes(other)
        with pytest.raises(LostError, match="by which it knows tables again, is missing or another"):
            read_contents(of.paths, check=None)
        with pytest.raises(LostError, match="tightframe ledger begin"):
            ledger_of(tmp_path).open()
    beside.unlink()
    ledger_of(tmp_path).begin_anew("TF-620")
    assert noting() != first and noting() == noting()


def test_the_kits_copy_of_the_head_is_held_against_the_ledger(tmp_path: Path) -> None:
    of = ledger_of(tmp_path)
    asked: list[Any] = []
    verify = lambda *known: asked.append(known)  # noqa: E731
    check_witness(of.paths, "any", verify)
    with of.open() as ledger:
        name = ledger.verify().head.ledger
    check_witness(LedgerPaths.of_site(tmp_path, "site-1", None), "any", verify)
    assert asked == []
    check_witness(of.paths, name, verify)
    assert [count for count, _ in asked] == [0]
    with pytest.raises(TamperError, match="but it is another"):
        check_witness(of.paths, "another", verify)


def test_without_an_identity_nothing_is_created(tmp_path: Path) -> None:
    of = ledger_of(tmp_path)
    of.identity = None
    refused(of.open, "TF-615")
    assert not of.paths.ledger.exists() and not of.paths.ledger.parent.exists()


@pytest.mark.parametrize("lasting", [True, False])
def test_a_new_ledger_is_announced_where_its_loss_would_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lasting: bool
) -> None:
    of = ledger_of(tmp_path, lasting=lasting)
    for _ in range(2):
        of.open().close()
    assert caplog.text.count("a new ledger begins") == lasting
    assert of.paths.ledger.parent.stat().st_mode & 0o077 == 0
    assert of.paths.ledger.parent.parent.stat().st_mode & 0o077 == 0
    assert (tmp_path / "kit" / module.KIT_HEAD).exists() is lasting


def test_two_jobs_may_create_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = ledger_of(tmp_path)
    monkeypatch.setattr(module, "ledger_expected", lambda path: False)
    for _ in range(2):
        of.open().close()
    assert contents_of(of.paths) == []


def test_a_lost_ledger_is_not_begun_by_itself(tmp_path: Path) -> None:
    of = ledger_of(tmp_path)
    leave(of.paths.lock)
    refused(of.open, "TF-620")
    refused(lambda: read_contents(of.paths, check=None), "TF-620")
    assert not of.paths.ledger.exists()


def test_a_loss_is_looked_for_once_in_a_process(tmp_path: Path) -> None:
    """The job's own transcript comes before its first entry."""
    of = ledger_of(tmp_path)
    of.open().close()
    transcript(of.paths)
    of.open().close()
    with pytest.raises(LostError):
        ledger_of(tmp_path).open()


def test_a_ledger_that_fails_a_check_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Ledger] = []
    close = Ledger.close

    def spied(ledger: Ledger) -> None:
        closed.append(ledger)
        close(ledger)

    of = ledger_of(tmp_path)
    of.open().close()
    monkeypatch.setattr(Ledger, "close", spied)
    leave(tmp_path / "kit" / module.KIT_HEAD, b"nonsense")
    refused(of.open, "TF-702")
    assert len(closed) == 1


def test_an_older_copy_than_the_kits_head_is_refused(tmp_path: Path) -> None:
    of = ledger_of(tmp_path)
    of.open().close()
    kept = {path: path.read_bytes() for path in (of.paths.ledger, head_file(of.paths.ledger))}
    with of.open() as ledger:
        ledger.remember(Remembered((FACT,)))
    of.keep_witness()
    for path, raw in kept.items():
        path.write_bytes(raw)
    refused(ledger_of(tmp_path).open, "TF-702")
    refused(lambda: read_contents(of.paths, check=None), "TF-702")


def test_the_kits_copy_is_written_where_it_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of, written = ledger_of(tmp_path), list[Path]()
    of.open().close()

    def write(path: Path, raw: bytes, *, mode: int) -> None:
        assert mode == 0o600
        written.append(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "write_atomically", write)
    of.keep_witness()
    assert written == [], "it is the newest"
    witness = tmp_path / "kit" / module.KIT_HEAD
    for _ in range(2):
        leave(witness, b"older")
        of.keep_witness()
    witness.unlink()
    of.keep_witness()
    assert written == [witness] * 3
    assert caplog.text.count("cannot be copied") == 1
    head_file(of.paths.ledger).unlink()
    of.keep_witness()
    assert written == [witness] * 3


def test_a_person_begins_a_ledger_anew_and_keeps_the_old_files(tmp_path: Path) -> None:
    of = ledger_of(tmp_path)
    of.begin_anew("TF-620")  # where there was none
    assert of.paths.ledger.parent.stat().st_mode & 0o077 == 0
    with of.open() as ledger:
        ledger.remember(Remembered((FACT,)))
    of.begin_anew("TF-604")  # a whole one goes on
    assert contents_of(of.paths) == [Begun("TF-620"), Remembered((FACT,)), Begun("TF-604")]
    with sqlite3.connect(of.paths.ledger) as database:
        database.execute("UPDATE entries SET content = '{}' WHERE sequence = 1")
    database.close()
    altered = of.paths.ledger.read_bytes()
    leave(tmp_path / "kit" / module.KIT_HEAD, b"{}")
    of.begin_anew("TF-702")
    assert contents_of(of.paths) == [Begun("TF-702")]
    lost = of.paths.ledger.with_name(of.paths.ledger.name + ".lost-1")
    assert lost.read_bytes() == altered
    assert head_file(of.paths.ledger).read_bytes() == (tmp_path / "kit" / module.KIT_HEAD).read_bytes()
    of.paths.ledger.unlink()  # only its head is left
    of.begin_anew("TF-620")
    assert contents_of(of.paths) == [Begun("TF-620")]


def test_an_old_copy_of_the_head_does_not_outlive_the_ledger_that_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = ledger_of(tmp_path)
    of.open().close()
    of.paths.ledger.unlink()

    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    of.begin_anew("TF-620")
    assert not (tmp_path / "kit" / module.KIT_HEAD).exists()
    of.open().close()
    without = LedgerPaths.of_site(tmp_path / "other", "site-1", None)
    SiteLedger(without, SiteEntry(), of.identity).begin_anew("TF-620")
    assert contents_of(without) == [Begun("TF-620")]


def test_a_ledger_that_is_out_of_reach_is_left_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = ledger_of(tmp_path)
    of.open().close()
    raw = of.paths.ledger.read_bytes()

    def locked(*_: Any, **__: Any) -> NoReturn:
        raise LedgerError("locked")

    monkeypatch.setattr(of, "_ledger", locked)
    with pytest.raises(LedgerError, match="locked"):
        of.begin_anew("TF-704")
    assert of.paths.ledger.read_bytes() == raw
    assert not of.paths.ledger.with_name(of.paths.ledger.name + ".lost-1").exists()


def test_a_site_without_a_ledger_has_no_entries(tmp_path: Path) -> None:
    assert read_contents(LedgerPaths.of_site(tmp_path, "site-1", None), check=None) is None


def test_it_is_logged_as_the_silos_own() -> None:
    assert SiteLedger.__dataclass_fields__["log"].default_factory() == logging.getLogger("tightframe.silo")  # type: ignore[misc]
