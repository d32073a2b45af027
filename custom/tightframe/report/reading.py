"""Read a folder of results, of the server or of a silo, whatever may be wrong with its files.

Nothing is checked here but form: whether a transcript's signatures hold is for
``tightframe transcript verify``, and the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from tightframe.errors import TightframeError
from tightframe.report.values import (
    Card,
    Evaluation,
    Exchange,
    Outcome,
    SiloBaseline,
    SiloModel,
    SiloPersonal,
    SiloPrivacy,
    SiloRecords,
    Values,
)
from tightframe.securesum.errors import ProtocolError
from tightframe.securesum.messages import Params
from tightframe.securesum.rules import minimum_survivors
from tightframe.securesum.transcript_lines import MAX_LINE, SERVER, line_hash, parse, read_body

PAGE = "report.html"
OUTCOME, METRICS, CARD = "outcome.json", "metrics.jsonl", "model.json"
LOCAL = "local_report.json"
TRANSCRIPT, SIMULATED_ROOT = "transcript.jsonl", "simulated_root.pem"
MAX_BYTES = 2**28
"""A larger file of results is none of ours."""
_SHOWN = 5

Read = TypeVar("Read", bound=Values)


class ReportError(TightframeError):
    """No report can be made: TF-801 no results, TF-802 a broken file, TF-803 it cannot be written."""

    code = "TF-801"


class SiloReport(Values):
    """``local_report.json``."""

    silo: str
    data: str
    synthetic: bool
    records: SiloRecords
    model_sha256: str
    final: Evaluation = Field(alias="global")
    own_model: bool = False
    notes: tuple[str, ...] = ()
    model: SiloModel | None = None
    local_only: SiloBaseline | None = None
    personal: SiloPersonal | None = None
    privacy: SiloPrivacy | None = None


@dataclass(frozen=True)
class Epoch:
    """What the silos of an epoch signed: who they are, and the numbers that a sum needs."""

    number: int
    roster: tuple[str, ...]
    threshold: int
    smallest: int
    colluders: int
    trust: str


@dataclass(frozen=True)
class Sum:
    """A sum's line of the transcript; ``failure`` is its code if it was not opened."""

    epoch: int
    round: int
    phase: str
    attempt: int
    survivors: tuple[str, ...]
    failure: str | None


@dataclass(frozen=True)
class Transcript:
    """What a server's transcript says, as its writer has it.

    Attributes:
        job, version, started: of the run.
        epochs: number -> what was signed.
        sums: in order.
        complete: whether it has its last line.
        head: SHA-256 of the last line, by which two copies can be compared.
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
    """What the server of a run has left."""

    outcome: Outcome
    rows: tuple[Exchange, ...]
    card: Card | None
    transcript: Transcript | None
    simulated: bool


@dataclass(frozen=True)
class SiloResults:
    """What a silo has for itself."""

    report: SiloReport


def read(folder: Path) -> ServerResults | SiloResults:
    """The results that lie in a folder.

    Raises:
        ReportError: TF-801 if there are none, or both a server's and a silo's; TF-802, naming the file,
            if one cannot be read.
    """
    server, silo = (folder / OUTCOME).is_file(), (folder / LOCAL).is_file()
    if server and silo:
        raise ReportError(
            f"Expected the results of a server or of a silo, but {folder} has both ({OUTCOME} and {LOCAL}): "
            "a silo's are its own and belong into a folder of their own."
        )
    if silo:
        return SiloResults(_checked(SiloReport, _json(folder / LOCAL), folder / LOCAL))
    if server:
        return _server(folder)
    nearby = sorted({path.parent for name in (OUTCOME, LOCAL) for path in _below(folder, name)})
    hint = ", ".join(str(path) for path in nearby[:_SHOWN]) + (", ..." if len(nearby) > _SHOWN else "")
    there = f"there are results in {hint}" if nearby else "a run writes them when it ends"
    raise ReportError(
        f"Expected results in {folder} ({OUTCOME} of a server or {LOCAL} of a silo), but "
        f"it has none: {there}."
    )


def _below(folder: Path, name: str) -> Iterator[Path]:
    """Where results lie under a simulator's workspace or a run's folder."""
    for pattern in (f"*/{name}", f"*/*/{name}"):
        yield from folder.glob(pattern)


def _server(folder: Path) -> ServerResults:
    outcome = _checked(Outcome, _json(folder / OUTCOME), folder / OUTCOME)
    card = folder / CARD
    # A model's card beside a run that did not train is of an earlier run.
    found = _checked(Card, _json(card), card) if outcome.trained and card.is_file() else None
    metrics, lines = folder / METRICS, folder / TRANSCRIPT
    rows: list[Exchange] = []
    if metrics.is_file():
        for number, line in enumerate(_bytes(metrics).splitlines(), 1):
            place = f"{metrics}, line {number}"
            rows.append(_checked(Exchange, _parsed(line, place), place))
    return ServerResults(
        outcome=outcome,
        rows=tuple(rows),
        card=found,
        transcript=_transcript(lines) if lines.is_file() else None,
        simulated=(folder / SIMULATED_ROOT).is_file(),
    )


def _transcript(path: Path) -> Transcript:
    """Read a server's transcript: form only.

    Raises:
        ReportError: TF-802, naming the line.
    """
    first: dict[str, Any] | None = None
    epochs: dict[int, Epoch] = {}
    sums: list[Sum] = []
    complete, head, number = False, "", 0
    try:
        with path.open("rb") as stream:
            for line in iter(partial(stream.readline, MAX_LINE + 2), b""):
                number += 1
                value = parse(line.removesuffix(b"\n"))
                body = read_body(value, server=True)
                head, kind = line_hash(line), value["line"]
                if first is None:
                    if kind != "run" or body["view"] != SERVER:
                        raise ReportError(
                            f"Expected the server's transcript in {path}, but it is another's.", code="TF-802"
                        )
                    first = body
                elif kind == "session":
                    epoch = _epoch(Params.from_bytes(body["params"]))
                    epochs[epoch.number] = epoch
                elif kind == "sum":
                    sums.append(_sum(body))
                complete = kind == "end"
    except ProtocolError as error:
        raise ReportError(f"{path}, line {number}: {error}", code="TF-802") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if first is None:
        raise ReportError(f"Expected a transcript in {path}, but the file is empty.", code="TF-802")
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
    of = body["sum_id"]
    failure = body["failure"]["code"] if "failure" in body else None
    return Sum(body["epoch"], of.round, of.phase, of.attempt, tuple(body["survivors"]), failure)


def _json(path: Path) -> Any:
    return _parsed(_bytes(path), str(path))


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ReportError(
                f"Expected at most {MAX_BYTES} bytes in {path}, but it has more: it is no file of results.",
                code="TF-802",
            )
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _parsed(raw: bytes, place: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ReportError(f"Expected JSON in {place}, but it is none: {said}.", code="TF-802") from None


def _checked(of: type[Read], value: Any, place: Path | str) -> Read:
    try:
        return of.model_validate(value)
    except ValidationError as error:
        told = [
            f"{'.'.join(str(part) for part in item['loc']) or 'the whole'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        ]
        more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise ReportError(
            f"Expected a file as a run writes it in {place}, but got: {'; '.join(told[:_SHOWN])}{more}.",
            code="TF-802",
        ) from None


def _unreadable(path: Path, error: OSError) -> ReportError:
    return ReportError(f"Expected to read {path}, but got: {error.strerror or error}.", code="TF-802")
