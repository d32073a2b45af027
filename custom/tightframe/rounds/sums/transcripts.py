"""The transcript as a file: at the server and, each site's own view, at the sites.

``tightframe transcript verify`` checks it; ``securesum.transcript`` says what its lines are.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tightframe import __version__
from tightframe.files import append_durably, drop_torn_line, write_atomically
from tightframe.results.files import SIMULATED_ROOT, TRANSCRIPT
from tightframe.rounds.context import SiloContext
from tightframe.rounds.sums.simulated_identity import simulated_root_pem
from tightframe.securesum import transcript
from tightframe.securesum.identity import Anchor
from tightframe.securesum.messages import GROUPS, Params, Reveal, RevealRequest, Setup, TermRequest
from tightframe.securesum.site_state import Agreed, Established, Masked

if TYPE_CHECKING:
    from tightframe.securesum import server  # which a silo, whose every task may be a process, need not load


@dataclass(frozen=True)
class ServerIdentity:
    """What the server needs to take part in secure sums.

    Attributes:
        job_id: the run's id, as engine and silos know it.
        anchor: what the silos' certificates are held against.
        simulated: whether identities are simulated, and prove nothing.
        root_of: the job whose simulated root it is: of resumed jobs the first, as the ledger lasts for all.
    """

    job_id: str
    anchor: Anchor
    simulated: bool
    root_of: str | None = None


class _File:
    """A transcript that may be continued by another process."""

    def __init__(self, path: Path, view: str, job: str) -> None:
        self._path, self._view, self._job = path, view, job
        self._chain: transcript.Chain | None = None

    def chain(self) -> transcript.Chain:
        """Where the file stands; it is begun if there is none."""
        if self._chain is None:
            if self._path.exists():
                drop_torn_line(self._path)
            if not self._path.exists() or self._path.stat().st_size == 0:
                self.write(
                    transcript.start(
                        view=self._view, job=self._job, version=__version__, time=datetime.now(UTC)
                    )
                )
            else:
                self._chain = transcript.Chain.resume(_last_line(self._path))
        assert self._chain is not None  # noqa: S101 - set by both branches
        return self._chain

    def write(self, line: bytes) -> None:
        """Append a line; after one that did not fit on the disk, what there is of it is cut off first."""
        self._chain = None
        append_durably(self._path, line, mode=0o644)
        self._chain = transcript.Chain.resume(line)


class SiteRecord:
    """A site's own view: the sessions that it checked, and the sums for which it gave shares."""

    def __init__(self, context: SiloContext) -> None:
        self._file = _File(context.transcript, context.name, context.job_id)

    def session(self, state: Established, request: TermRequest) -> None:
        """An epoch whose setup this site has checked."""
        params = state.epoch.params
        setup = Setup.from_bytes(request.setup, sites=len(params.roster), slots=params.slots)
        line = transcript.session(
            self._file.chain(),
            params=params,
            advertisements=tuple(state.peers.values()),
            ready={name: item.ready for name, item in setup.dealt.items()},
            time=datetime.now(UTC),
        )
        self._file.write(line)

    def sum(self, params: Params, slot: Masked | Agreed, request: RevealRequest, reply: Reveal) -> None:
        """A sum for which this site gave its shares; whether it was opened a site never learns."""
        groups = [group for group in GROUPS if getattr(reply, group)]
        record = transcript.SumRecord(
            epoch=params.epoch,
            slot=request.slot,
            sum_id=slot.receipt.sum_id,
            schema=slot.schema,
            broadcast=slot.receipt.broadcast,
            receipts=request.receipts,
            survivors=tuple(sorted(item.name for item in request.receipts)),
            agreements=request.agreements,
        )
        self._file.write(transcript.opened(self._file.chain(), record, groups=groups))


class ServerRecord:
    """The server's transcript of a run: begun anew with each run."""

    def __init__(self, folder: Path, identity: ServerIdentity) -> None:
        path = folder / TRANSCRIPT
        path.unlink(missing_ok=True)
        if identity.simulated:
            # So that the transcript of a simulation can be looked at like any other.
            write_atomically(folder / SIMULATED_ROOT, simulated_root_pem(identity.root_of or identity.job_id))
        self._file = _File(path, transcript.SERVER, identity.job_id)
        self._sums = 0

    def session(self, session: server.Session) -> None:
        """An epoch that all silos of its roster are ready for."""
        line = transcript.session(
            self._file.chain(),
            params=session.params,
            advertisements=tuple(session.peers.values()),
            ready=session.ready,
            time=datetime.now(UTC),
        )
        self._file.write(line)

    def opened(self, total: server.Sum, opened: server.Opened) -> None:
        """A sum that was opened, with the hash of its total."""
        self._sums += 1
        line = transcript.opened(
            self._file.chain(),
            _record(total),
            groups=list(opened.groups),
            total=opened.groups,
            blamed=opened.blamed,
        )
        self._file.write(line)

    def failed(self, total: server.Sum, code: str) -> None:
        """A sum that was not opened, and why."""
        self._sums += 1
        self._file.write(transcript.failed(self._file.chain(), _record(total), code=code, blamed={}))

    def end(self, reason: str | None) -> None:
        """The end of the run: nothing follows."""
        self._file.write(transcript.end(self._file.chain(), reason=reason, sums=self._sums))


def _record(total: server.Sum) -> transcript.SumRecord:
    return transcript.SumRecord(
        epoch=total.epoch,
        slot=total.slot,
        sum_id=total.sum_id,
        schema=total.schema,
        broadcast=total.broadcast,
        receipts=total.receipts,
        survivors=total.survivors,
        agreements=total.agreements,
    )


def _last_line(path: Path) -> bytes:
    """The last line of a file, which may be long."""
    with path.open("rb") as stream:
        end = stream.seek(0, 2)
        size = 0
        while True:
            size = min(end, max(2 * size, 1 << 16))
            stream.seek(end - size)
            tail = stream.read(size)
            if size == end or b"\n" in tail[:-1]:
                return tail.removesuffix(b"\n").rsplit(b"\n", 1)[-1] + b"\n"
