"""A silo's own state as it was before a request, kept until the term that answers it is masked.

A request settles which training counts before a record is read for it. If its term never leaves, because the
process dies or the training is refused, the server may still ask for shares of an earlier sum, and name
another total. So the request's changes are undone then: a term that never left drops no training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container
from pathlib import Path

from tightframe.files import link_over, sync_folder, write_atomically
from tightframe.rounds.notes import read_sum
from tightframe.rounds.state_files import BEFORE_REQUEST, COMMITTED, EARLIER, PROPOSED, TOLD
from tightframe.securesum.errors import ReplayError
from tightframe.securesum.messages import SumId

_FILES = (COMMITTED, EARLIER, PROPOSED, TOLD)
_REQUEST = "request"


def keep(folder: Path, sum_id: SumId, request: bytes) -> None:
    """Keep a silo's own state from before a request for a term; for a repeated request it is kept already.

    Its files are replaced and never modified, so that a hard link to each is a copy.

    Args:
        folder: of the silo's state.
        sum_id: of the sum that the request is for.
        request: digest of the request.
    """
    backup, partial = folder / BEFORE_REQUEST, folder / f"{BEFORE_REQUEST}.partial"
    if backup.is_dir():
        return
    shutil.rmtree(partial, ignore_errors=True)
    write_atomically(partial / _REQUEST, _line(sum_id, request).encode(), mode=0o600)
    for name in _FILES:
        if (folder / name).is_file():
            os.link(folder / name, partial / name)
    os.replace(partial, backup)
    sync_folder(folder)


def check(folder: Path, sum_id: SumId, request: bytes) -> None:
    """Refuse to mask a term whose request was undone, because another one came while it trained.

    Args:
        folder, sum_id, request: as for ``keep``.

    Raises:
        ReplayError: TF-608.
    """
    path = folder / BEFORE_REQUEST / _REQUEST
    if not path.is_file() or path.read_text() != _line(sum_id, request):
        raise ReplayError(
            f"the request for sum {sum_id}",
            expected="the last one until its term is masked",
            found="another one while this silo trained",
        )


def sent(folder: Path) -> None:
    """Delete the kept state: the term is masked, which binds the silo to what the request named."""
    partial = folder / f"{BEFORE_REQUEST}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.replace(folder / BEFORE_REQUEST, partial)
    shutil.rmtree(partial)


def undo(folder: Path, masked: Container[SumId], request: bytes = b"") -> None:
    """Restore the state before the last request, unless its term was masked, or the same request comes again.

    A repeated request settles the same trainings again, perhaps while another process still trains for it.

    Args:
        folder: of the silo's state.
        masked: sums of the session of which this silo has masked its term.
        request: digest of the new request; empty if it is not for a term.
    """
    backup = folder / BEFORE_REQUEST
    if not backup.is_dir():
        return
    sum_id, _, before = (backup / _REQUEST).read_text().partition(" ")
    if read_sum(sum_id) not in masked:
        if before == request.hex():
            return
        for name in _FILES:
            if (backup / name).is_file():
                link_over(backup / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    sent(folder)


def _line(sum_id: SumId, request: bytes) -> str:
    """Return the line that is kept of a request."""
    return f"{sum_id} {request.hex()}"
