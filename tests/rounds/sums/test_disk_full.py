"""A silo whose disk is full in one round is left out of it by name, and its files stay whole."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from tests.support.runs import FOUR, contexts, coordinator, in_round, job
from tests.support.runs import Wire as Line

from tightframe import files
from tightframe.errors import failure_code
from tightframe.privacy.ledger import store
from tightframe.rounds.silo.session import SiloSession
from tightframe.rounds.sums import transcripts
from tightframe.rounds.sums.vault import read_journal
from tightframe.securesum import transcript
from tightframe.securesum.identity import Anchor

REST = ["site-2", "site-3", "site-4"]


class _Disk(Line):
    """``site-1`` has no room while one task of round 1 is done."""

    when: str
    full = False
    first = False

    def exchange(self, task: str, requests: Any, accept: Any) -> Any:
        if task == "contribute":
            self.first = in_round(requests["site-1"], 1)
        _Disk.full = self.first and task == self.when
        try:
            return super().exchange(task, requests, accept)
        finally:
            _Disk.full = False


@pytest.mark.whole
@pytest.mark.parametrize(
    ("task", "code"), [("contribute", "TF-704"), ("contribute", "TF-512"), ("reveal", "TF-512")]
)
def test_a_full_disk_costs_one_round_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, code: str
) -> None:
    def append(path: Path, lines: bytes, **how: Any) -> None:
        if _Disk.full and "site-1" in str(path):
            with path.open("ab") as stream:  # as much as there was room for
                stream.write(lines[: len(lines) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        files.append_durably(path, lines, **how)

    def insert(self: Any, *arguments: Any) -> None:
        if _Disk.full and "site-1" in str(self.path):
            raise sqlite3.OperationalError("database or disk is full")
        keep(self, *arguments)

    keep = store.Store.append
    if code == "TF-704":
        monkeypatch.setattr(store.Store, "append", insert)
    else:
        monkeypatch.setattr(transcripts, "append_durably", append)
    monkeypatch.setattr(_Disk, "when", task, raising=False)
    of = job()
    silos = contexts(of, tmp_path, memory_only=True)
    result = coordinator(of, tmp_path).run(_Disk({site: SiloSession(silos[site]) for site in silos}))
    first, second = (row for row in result.outcome.rows if row.kind == "train")
    # A term that is in a sum stays in it; the three others' shares are enough.
    assert first.silos == (REST if task == "contribute" else FOUR)
    assert first.dropped == ({"site-1": code} if task == "contribute" else {})
    assert first.static_opened is (task != "contribute")
    assert second.silos == FOUR and result.outcome.trained
    root = x509.load_pem_x509_certificate((tmp_path / "server" / "simulated_root.pem").read_bytes())
    lines = (tmp_path / "site-1" / "transcript.jsonl").read_bytes().splitlines(keepends=True)
    report = transcript.verify(lines, Anchor(root.public_bytes(Encoding.DER)))
    assert len(report.opened) == 3, "the round without a line of its own is missing; the others are there"
    assert read_journal(silos["site-1"].ledger_paths, check=None)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "TF-512"), (errno.EDQUOT, "TF-512"), (errno.EROFS, "TF-512"), (errno.ENOENT, "TF-503")],
)
def test_only_a_disk_that_cannot_be_written_is_called_so(number: int, code: str) -> None:
    assert failure_code(OSError(number, os.strerror(number))) == code
