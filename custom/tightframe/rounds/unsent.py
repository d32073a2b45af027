"""A silo's own state as it was before a request, kept until the term that answers it is masked.

A request settles which training counts before a record is read for it. If its term never leaves, because
the process dies or the training is refused, shares of an earlier sum may be asked for after all, and another
total may be told. So what the request changed is undone then: a term that never left drops no training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Container
from pathlib import Path

from tightframe.files import link_over, sync_folder, write_atomically
from tightframe.rounds.context import BEFORE_REQUEST, COMMITTED, EARLIER, PROPOSED, TOLD
from tightframe.rounds.notes import read_sum
from tightframe.securesum.errors import ReplayError
from tightframe.securesum.messages import SumId

_FILES = (COMMITTED, EARLIER, PROPOSED, TOLD)
_REQUEST = "request"


def keep(folder: Path, sum_id: SumId, request: bytes) -> None:
    """Keep a silo's own state as it is before the request for a term; for a repeated one it is kept already.

    Its files are replaced and never written into, so that a second name of each is a copy.

    Args:
        folder: of the silo's state.
        sum_id: that the request is for.
        request: digest of the request.
    """
    kept, partial = folder / BEFORE_REQUEST, folder / f"{BEFORE_REQUEST}.partial"
    if kept.is_dir():
        return
    shutil.rmtree(partial, ignore_errors=True)
    write_atomically(partial / _REQUEST, _line(sum_id, request).encode(), mode=0o600)
    for name in _FILES:
        if (folder / name).is_file():
            os.link(folder / name, partial / name)
    os.replace(partial, kept)
    sync_folder(folder)


def check(folder: Path, sum_id: SumId, request: bytes) -> None:
    """Refuse to mask a term made for a request that was undone since, as another one came while it trained.

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
    """Forget what was kept: the term is masked, and with it the silo is bound to what the request told."""
    partial = folder / f"{BEFORE_REQUEST}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    os.replace(folder / BEFORE_REQUEST, partial)
    shutil.rmtree(partial)


def undo(folder: Path, masked: Container[SumId], request: bytes = b"") -> None:
    """Go back to the state before the last request, unless its term was masked, or it comes again.

    One that comes again settles the same once more, perhaps while another process still trains for it.

    Args:
        folder: of the silo's state.
        masked: sums of the session of which this silo has masked its term.
        request: digest of the request that has come; empty if it is none for a term.
    """
    kept = folder / BEFORE_REQUEST
    if not kept.is_dir():
        return
    sum_id, _, before = (kept / _REQUEST).read_text().partition(" ")
    if read_sum(sum_id) not in masked:
        if before == request.hex():
            return
        for name in _FILES:
            if (kept / name).is_file():
                link_over(kept / name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    sent(folder)


def _line(sum_id: SumId, request: bytes) -> str:
    """Return what is kept of a request."""
    return f"{sum_id} {request.hex()}"
