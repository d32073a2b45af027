"""Transcript files: the server's of a run, and each site's own view of it.

``tightframe transcript verify`` checks them; ``securesum.transcript`` defines their lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tightframe import __version__
from tightframe.files import append_durably, drop_torn_line, write_atomically
from tightframe.results.files import SIMULATED_ROOT, TRANSCRIPT
from tightframe.rounds.context import SiloContext
from tightframe.rounds.sums.simulated_identity import simulated_root_pem
from tightframe.securesum import server, transcript
from tightframe.securesum.identity import Anchor
from tightframe.securesum.messages import GROUPS, Params, Reveal, RevealRequest, Setup, TermRequest, Told
from tightframe.securesum.site.state import Agreed, Established, Masked


@dataclass(frozen=True)
class ServerIdentity:
    """Identity of a run at the server, for secure sums.

    Attributes:
        job_id: the run's id in the engine.
        anchor: trust anchor for the silos' certificates.
        simulated: whether identities are simulated, and prove nothing.
        root_of: job of the simulated root: the first of a chain of resumed jobs, which share a ledger.
    """

    job_id: str
    anchor: Anchor
    simulated: bool
    root_of: str | None = None


class _File:
    """A transcript file that another process may continue."""

    def __init__(self, path: Path, view: str, job: str) -> None:
        self._path, self._view, self._job = path, view, job
        self._chain: transcript.Chain | None = None

    def chain(self) -> transcript.Chain:
        """Return the hash chain at the file's end; a missing file is created."""
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
        """Append a line durably; a part of an earlier line, cut off by a full disk, is removed first."""
        self._chain = None
        # A site's own is beside its state; it has totals of few numbers.
        append_durably(self._path, line, mode=0o644 if self._view == transcript.SERVER else 0o600)
        self._chain = transcript.Chain.resume(line)


class SiteRecord:
    """Writer of a site's transcript: the sessions that it checked, and the sums for which it gave shares."""

    def __init__(self, context: SiloContext) -> None:
        self._file = _File(context.transcript, context.name, context.job_id)

    def session(self, state: Established, request: TermRequest) -> None:
        """Record an epoch whose setup this site has checked."""
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

    def sum(
        self, params: Params, slot: Masked | Agreed, total: Told | None, request: RevealRequest, reply: Reveal
    ) -> None:
        """Record a sum for which this site gave its shares; a site never learns whether it was opened."""
        groups = [group for group in GROUPS if getattr(reply, group)]
        record = transcript.SumRecord(
            epoch=params.epoch,
            slot=request.slot,
            sum_id=slot.receipt.sum_id,
            schema=slot.schema,
            basis=slot.receipt.basis,
            rests_on=total,
            receipts=request.receipts,
            survivors=tuple(sorted(item.name for item in request.receipts)),
            agreements=request.agreements,
            proved=tuple(sorted(request.missing)),
        )
        self._file.write(transcript.opened(self._file.chain(), record, groups=groups))


class ServerRecord:
    """Writer of the server's transcript, a new file for each run."""

    def __init__(self, folder: Path, identity: ServerIdentity) -> None:
        path = folder / TRANSCRIPT
        path.unlink(missing_ok=True)
        if identity.simulated:
            # With it the transcript of a simulation can be verified like any other.
            write_atomically(folder / SIMULATED_ROOT, simulated_root_pem(identity.root_of or identity.job_id))
        self._file = _File(path, transcript.SERVER, identity.job_id)
        self._sums = 0

    def session(self, session: server.Session) -> None:
        """Record an epoch for which all silos of its roster are ready."""
        line = transcript.session(
            self._file.chain(),
            params=session.params,
            advertisements=tuple(session.peers.values()),
            ready=session.ready,
            time=datetime.now(UTC),
        )
        self._file.write(line)

    def opened(self, total: server.Sum, opened: server.Opened) -> None:
        """Record a sum that was opened, with the hash of its total."""
        self._sums += 1
        line = transcript.opened(
            self._file.chain(),
            _record(total),
            groups=list(opened.evidence.total.groups),
            total=opened.evidence.total.groups,
            blamed=opened.blamed,
        )
        self._file.write(line)

    def failed(self, total: server.Sum, code: str) -> None:
        """Record a sum that was not opened, with the reason's code."""
        self._sums += 1
        self._file.write(transcript.failed(self._file.chain(), _record(total), code=code, blamed={}))

    def end(self, reason: str | None) -> None:
        """Record the end of the run."""
        self._file.write(transcript.end(self._file.chain(), reason=reason, sums=self._sums))


def _record(total: server.Sum) -> transcript.SumRecord:
    return transcript.SumRecord(
        epoch=total.epoch,
        slot=total.slot,
        sum_id=total.sum_id,
        schema=total.schema,
        basis=total.basis,
        rests_on=None if total.rests_on is None else total.rests_on.ground.told,
        receipts=total.receipts,
        survivors=total.survivors,
        agreements=total.agreements,
        proved=total.proved,
    )


def _last_line(path: Path) -> bytes:
    """Return the last line of a file, of any length."""
    with path.open("rb") as stream:
        end = stream.seek(0, 2)
        size = 0
        while True:
            size = min(end, max(2 * size, 1 << 16))
            stream.seek(end - size)
            tail = stream.read(size)
            if size == end or b"\n" in tail[:-1]:
                return tail.removesuffix(b"\n").rsplit(b"\n", 1)[-1] + b"\n"
