"""Read a folder of results of a server or a silo, naming any file that cannot be read.

Only form is checked: ``tightframe transcript verify`` checks a transcript's signatures, as the page says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tightframe import __version__
from tightframe.results.files import (
    CARD,
    LOCAL,
    NEEDS,
    OUTCOME,
    SIMULATED_ROOT,
    TRANSCRIPT,
    ResultsError,
    not_proven,
    unreadable,
)
from tightframe.results.local_report import SiloReport
from tightframe.results.model_card import Card
from tightframe.results.outcome import Outcome
from tightframe.results.rows import Row, read_rows
from tightframe.results.statistics import STATISTICS, TableStatistics
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.messages import Params
from tightframe.securesum.rules import minimum_survivors
from tightframe.securesum.transcript.lines import (
    FORMAT,
    MAX_LINE,
    SERVER,
    line_hash,
    parse,
    read_body,
    written_by_another,
)

_NAMED = 5


@dataclass(frozen=True)
class Epoch:
    """Parameters that an epoch's silos signed: the roster, and the numbers of silos that a sum needs."""

    number: int
    roster: tuple[str, ...]
    threshold: int
    smallest: int
    colluders: int
    trust: str


@dataclass(frozen=True)
class Sum:
    """A sum's line in the transcript; ``failure`` is its code if it was not opened."""

    epoch: int
    round: int
    phase: str
    attempt: int
    survivors: tuple[str, ...]
    failure: str | None


@dataclass(frozen=True)
class Transcript:
    """Content of a server's transcript, signatures unchecked.

    Attributes:
        epochs: number -> signed parameters.
        sums: in order.
        complete: whether it has its last line.
        head: SHA-256 of the last line, to compare two copies by.
    """

    job: str
    version: str
    started: str
    epochs: dict[int, Epoch]
    sums: tuple[Sum, ...]
    complete: bool
    head: str


@dataclass(frozen=True)
class ServerResults:
    """Results of a run's server."""

    outcome: Outcome
    rows: tuple[Row, ...]
    card: Card | None
    transcript: Transcript | None
    simulated: bool
    statistics: TableStatistics | None = None


@dataclass(frozen=True)
class SiloResults:
    """A silo's own results."""

    report: SiloReport


def read(folder: Path) -> ServerResults | SiloResults:
    """Read the results in a folder.

    Raises:
        ResultsError: TF-801 if there are none, or both a server's and a silo's; TF-802, naming the file,
            if one cannot be read; TF-827 if a silo's were never proven.
    """
    server, silo = (folder / OUTCOME).is_file(), (folder / LOCAL).is_file()
    if server and silo:
        raise ResultsError(
            f"Expected the results of a server or of a silo, but {folder} has both ({OUTCOME} and {LOCAL}): "
            "a silo's are its own and belong into a folder of their own.",
            code="TF-801",
        )
    if not server and (not silo or (folder / NEEDS).is_file()) and (why := not_proven(folder)) is not None:
        raise ResultsError(why, code="TF-827")
    if silo:
        return SiloResults(SiloReport.read(folder))
    if server:
        return _server(folder)
    nearby = sorted({path.parent for name in (OUTCOME, LOCAL) for path in _below(folder, name)})
    hint = ", ".join(str(path) for path in nearby[:_NAMED]) + (", ..." if len(nearby) > _NAMED else "")
    there = f"there are results in {hint}" if nearby else "a run writes them when it ends"
    raise ResultsError(
        f"Expected results in {folder} ({OUTCOME} of a server or {LOCAL} of a silo), but "
        f"it has none: {there}.",
        code="TF-801",
    )


def only_run(folder: Path) -> Path:
    """Return the results folder: the given one, or that of the only run under a workspace.

    Raises:
        ResultsError: TF-801, naming them, if it has results of several runs' servers.
    """
    if (folder / OUTCOME).is_file() or (folder / LOCAL).is_file():
        return folder
    runs = sorted({path.parent for path in _below(folder, OUTCOME)})
    if len(runs) > 1:
        listed = ", ".join(map(str, runs[:_NAMED])) + (", ..." if len(runs) > _NAMED else "")
        raise ResultsError(
            f"Expected the results of one run in {folder}, but it has {len(runs)}: name one of {listed}.",
            code="TF-801",
        )
    return runs[0] if runs else folder


def _below(folder: Path, name: str) -> Iterator[Path]:
    """Find results under a simulator's workspace or a run's folder."""
    for pattern in (f"*/{name}", f"*/*/{name}"):
        yield from folder.glob(pattern)


def _server(folder: Path) -> ServerResults:
    outcome = Outcome.read(folder)
    # A model card beside a run that did not train belongs to an earlier run.
    card = Card.read(folder) if outcome.trained and (folder / CARD).is_file() else None
    lines = folder / TRANSCRIPT
    return ServerResults(
        outcome=outcome,
        rows=read_rows(folder),
        card=card,
        transcript=_transcript(lines) if lines.is_file() else None,
        simulated=(folder / SIMULATED_ROOT).is_file(),
        statistics=TableStatistics.read(folder)
        if outcome.statistics_only and (folder / STATISTICS).is_file()
        else None,
    )


def _transcript(path: Path) -> Transcript:
    """Read a server's transcript, checking only its form."""
    first: dict[str, Any] | None = None
    epochs: dict[int, Epoch] = {}
    sums: list[Sum] = []
    complete, head, number = False, "", 0
    try:
        with path.open("rb") as stream:
            for line in iter(partial(stream.readline, MAX_LINE + 2), b""):
                number += 1
                value = parse(line.removesuffix(b"\n"))
                body = read_body(value, server=True, form=FORMAT if first is None else first["format"])
                head, kind = line_hash(line), value["line"]
                if first is None:
                    if kind != "run" or body["view"] != SERVER:
                        raise ResultsError(
                            f"Expected the server's transcript in {path}, but it is another's."
                        )
                    first = body
                elif kind == "session":
                    epoch = _epoch(Params.from_bytes(body["params"]))
                    epochs[epoch.number] = epoch
                elif kind == "sum":
                    sums.append(_sum(body))
                complete = kind == "end"
    except ProtocolError as error:
        version_note = written_by_another(first["version"] if first else None, __version__)
        raise ResultsError(f"{path}, line {number}: {error}{version_note}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if first is None:
        raise ResultsError(f"Expected a transcript in {path}, but the file is empty.")
    return Transcript(
        first["job"],
        first["version"],
        f"{first['started']:%Y-%m-%d %H:%M:%S} UTC",
        epochs,
        tuple(sums),
        complete,
        head,
    )


def _epoch(params: Params) -> Epoch:
    return Epoch(
        params.epoch,
        params.roster,
        params.threshold,
        minimum_survivors(params),
        params.colluders,
        params.trust,
    )


def _sum(body: dict[str, Any]) -> Sum:
    sum_id = body["sum_id"]
    failure = body["failure"]["code"] if "failure" in body else None
    return Sum(body["epoch"], sum_id.round, sum_id.phase, sum_id.attempt, tuple(body["survivors"]), failure)
