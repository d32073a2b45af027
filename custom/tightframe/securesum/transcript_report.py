"""The results of checking a transcript: an error that names the line, or a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.messages import Group, Params, SumId


class TranscriptError(ProtocolError):
    """A transcript violates the rules, or a signature in it is wrong (TF-616).

    Args:
        line: the first invalid line, from 1.
        what, expected, found, blamed: as for ``ProtocolError``.
    """

    code = "TF-616"

    def __init__(self, line: int, what: str, *, expected: str, found: str, blamed: str | None = None) -> None:
        super().__init__(what, expected=expected, found=found, blamed=blamed)
        self.line = line

    def __str__(self) -> str:
        return f"Line {self.line}: {super().__str__()}"


@dataclass(frozen=True)
class EpochReport:
    """One epoch, with the parameters that every site signed.

    Attributes:
        params: the parameters of the epoch.
        time: when certificates were checked, according to the writer.
        keys: site -> SHA-256 (hex) of its provisioned public key, in the format of a pin.
    """

    params: Params
    time: datetime
    keys: Mapping[str, str]


@dataclass(frozen=True)
class SumReport:
    """One sum; if it was not opened, ``failure`` is the code and ``groups`` is empty."""

    epoch: int
    slot: int
    sum_id: SumId
    groups: tuple[Group, ...]
    missing: tuple[str, ...]
    failure: str | None
    blamed: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """The content of a valid transcript.

    Attributes:
        view, job, version, started: of the run, according to its writer.
        epochs, sums: in order.
        simulated: whether the subject of the root certificate is marked as a simulated identity.
        complete: whether the transcript has its end line.
        reason: why the run ended early, according to the writer.
        head: SHA-256 of the last line (hex), by which two copies can be compared.
    """

    view: str
    job: str
    version: str
    started: datetime
    epochs: tuple[EpochReport, ...]
    sums: tuple[SumReport, ...]
    simulated: bool
    complete: bool
    reason: str | None
    head: str

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites of all epochs, sorted."""
        return tuple(sorted({site for epoch in self.epochs for site in epoch.params.roster}))

    @property
    def opened(self) -> tuple[SumReport, ...]:
        """The sums that were opened."""
        return tuple(item for item in self.sums if item.failure is None)

    @property
    def failed(self) -> tuple[SumReport, ...]:
        """The sums that were not opened."""
        return tuple(item for item in self.sums if item.failure is not None)

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """(epoch, slot) without a line, below an epoch's last used slot: not used, or left out."""
        used = {(item.epoch, item.slot) for item in self.sums}
        last = {epoch: max(slot for at, slot in used if at == epoch) for epoch, _ in used}
        every = ((epoch, slot) for epoch in sorted(last) for slot in range(last[epoch]))
        return tuple(place for place in every if place not in used)
