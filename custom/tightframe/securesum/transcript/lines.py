"""The lines of a transcript: written as the protocol runs, read back by ``transcript.verify``.

Every line is one JSON object in canonical form (sorted keys, no spaces, ASCII), so that equal
content has an equal hash. It contains the SHA-256 of the line before it. Functions here make and
read bytes; the caller writes the file.

Every line has ``line``, its kind, and ``previous``, the SHA-256 (hex) of the line before without its
newline. Hashes are lower-case hex, signatures and messages base64. Unknown keys are refused.

- ``run`` (first): ``format``; ``view``: "server" or the silo's name; ``job``; ``version``; ``started`` (UTC)
- ``session`` (one an epoch): ``params`` and ``advertisements``, the messages as they travelled, in roster
  order; ``ready``: silo to signature over the session; ``time`` at which certificates were checked
- ``sum``: ``epoch``, ``slot``, ``sum_id`` (round, phase, try), ``schema``, ``basis``; ``rests_on``: slot,
  sum, schema, survivors and hashes of the last total and its receipts, or null; ``receipts``,
  ``agreements`` (none if nobody is missing); ``survivors``; ``proved``; then either ``groups`` that were
  opened, or ``failure`` with a ``code``; at the server also ``blamed``: silo to reason, and ``total``: group
  to SHA-256 of the opened integers as bytes
- ``end`` (last): ``reason`` why the run ended early, or null; ``sums``: the number of lines of sums
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tightframe.securesum import reading
from tightframe.securesum.errors import MessageError
from tightframe.securesum.messages import (
    GROUPS,
    MAX_ADVERTISEMENT,
    MAX_COMBINATIONS,
    Advertisement,
    Agreement,
    Group,
    Params,
    Receipt,
    SumId,
    Told,
    by_group,
    read_sum_id,
)
from tightframe.securesum.primitives import HASH_BYTES, SIGNATURE_BYTES
from tightframe.securesum.rules import MAX_SITES, MAX_SLOTS
from tightframe.securesum.transcript.earlier_formats import Agreement2, Receipt1, Receipt2

FORMAT = 3
FIRST = "0" * 64
"""The value of ``previous`` in the first line."""
SERVER = "server"
"""The view of a transcript that the server wrote; any other view is a site's name."""
MAX_LINE = 2**28
MAX_WORDS = 2**16
"""Longest reason in bytes; one that lists every site with its own reason is far shorter."""


@dataclass(frozen=True)
class Chain:
    """The end of a transcript so far: the SHA-256 that its next line must contain."""

    previous: str = FIRST

    @classmethod
    def resume(cls, last_line: bytes) -> Chain:
        """Continue after a line, with or without its newline, for example in a run's next process.

        Raises:
            MessageError: TF-604, if this is not a whole line, for example one that a crash cut off.
        """
        parse(last_line.removesuffix(b"\n"))
        return cls(line_hash(last_line))


@dataclass(frozen=True)
class SumRecord:
    """The record of a sum, opened or failed.

    Attributes:
        basis: SHA-256 of the state that the terms rest on.
        rests_on: the total that was told with the requests; None if the epoch had none yet.
        receipts: those of the survivors; if the sum failed before there was a survivor set, all that
            arrived.
        survivors: the survivor set; empty if the sum failed before there was one.
        agreements: of the survivors that signed, sorted by name; none if the survivors are the whole roster.
        proved: sites of ``rests_on`` for which the server showed the term itself to the survivors.
    """

    epoch: int
    slot: int
    sum_id: SumId
    schema: str
    basis: bytes
    rests_on: Told | None
    receipts: tuple[Receipt, ...]
    survivors: tuple[str, ...]
    agreements: tuple[Agreement, ...]
    proved: tuple[str, ...] = ()


def start(*, view: str, job: str, version: str, time: datetime) -> bytes:
    """Return the first line. ``view`` is ``SERVER`` or the site's name. All lines end in a newline."""
    values = {"format": FORMAT, "view": view, "job": job, "version": version, "started": _utc(time)}
    return _line(Chain(), "run", values)


def session(
    chain: Chain,
    *,
    params: Params,
    advertisements: Sequence[Advertisement],
    ready: Mapping[str, bytes],
    time: datetime,
) -> bytes:
    """Return the line of an epoch in which every site is ready; certificates were checked at ``time``."""
    values = {
        "params": _base64_text(params.to_bytes()),
        "advertisements": [
            _base64_text(item.to_bytes()) for item in sorted(advertisements, key=lambda item: item.name)
        ],
        "ready": {name: _base64_text(signature) for name, signature in ready.items()},
        "time": _utc(time),
    }
    return _line(chain, "session", values)


def opened(
    chain: Chain,
    record: SumRecord,
    *,
    groups: Sequence[Group],
    total: Mapping[Group, bytes | memoryview] | None = None,
    blamed: Mapping[str, str] | None = None,
) -> bytes:
    """Return the line of a sum that was opened.

    Args:
        chain: the end of the transcript so far.
        record: the signed record of the sum.
        groups: the groups that were opened; at a site, those for which it revealed its shares, because
            it never learns whether the server received enough of them.
        total: group -> the opened ring bytes, of which the hash is recorded; only at the server.
        blamed: site -> reason; only at the server.
    """
    values = {**_sum_values(record), "groups": [group for group in GROUPS if group in groups]}
    if total is not None:
        values["total"] = {group: hashlib.sha256(data).hexdigest() for group, data in total.items()}
        values["blamed"] = dict(blamed or {})
    return _line(chain, "sum", values)


def failed(chain: Chain, record: SumRecord, *, code: str, blamed: Mapping[str, str] | None = None) -> bytes:
    """Return the line of a sum that was not opened; ``blamed`` is None at a site."""
    values = {**_sum_values(record), "failure": {"code": code}}
    return _line(chain, "sum", values if blamed is None else {**values, "blamed": dict(blamed)})


def end(chain: Chain, *, reason: str | None, sums: int) -> bytes:
    """Return the last line: the reason why the run ended early, or None, and the number of sum lines."""
    return _line(chain, "end", {"reason": reason, "sums": sums})


def written_by_another(version: object, own: str) -> str:
    """Say which other version names itself as a transcript's writer; nothing if it is ``own``, or no text."""
    if not isinstance(version, str) or version == own:
        return ""
    return f" It says that Tightframe {version} wrote it: use that version for it as well."


def parse(raw: bytes) -> dict[str, Any]:
    """Parse a line without its newline: a map that has ``line``, its kind, and ``previous``.

    Raises:
        MessageError: TF-604, if it is cut off, not canonical, or of an unknown kind.
    """
    if len(raw) > MAX_LINE:
        raise MessageError("the line", expected=f"at most {MAX_LINE} bytes", found=f"{len(raw)}")
    try:
        value = json.loads(raw.decode("ascii"))
        # A lone surrogate is valid JSON, but it is not text and can be neither hashed nor shown.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise MessageError(
            "the line", expected="one JSON object", found=f"{len(raw)} bytes that are not one, or cut off"
        ) from None
    if not isinstance(value, dict):
        raise MessageError("the line", expected="one JSON object", found=reading.described(value))
    if _canonical(value) != raw:
        # This also refuses a repeated key, of which a reader would see only one value.
        raise MessageError("the line", expected="in canonical form", found="the same content in another form")
    reading.one_of(*BODIES, "sum")(value.get("line"), "the kind of line")
    reading.text(64)(value.get("previous"), "the hash of the line before")
    return value


def read_body(value: Mapping[str, Any], *, server: bool, form: int = FORMAT) -> dict[str, Any]:
    """Check the body of a parsed line, and convert it to the protocol's own types.

    Args:
        value: the result of ``parse``.
        server: whether the transcript is the server's, whose sum lines have more keys.
        form: the format that the first line names.

    Raises:
        MessageError: TF-604, if a key is missing or unknown, or a value malformed.
    """
    kind = value["line"]
    body = {key: item for key, item in value.items() if key not in ("line", "previous")}
    if kind != "sum":
        return _read(BODIES[kind], body, kind)
    opened = "failure" not in body
    keys = {
        **SUMS[form],
        **({"groups": _GROUPS} if opened else {"failure": reading.record({"code": _code})}),
    }
    if server:
        keys["blamed"] = reading.mapping(reading.text(MAX_WORDS), 0, MAX_SITES)
    if server and opened:
        keys["total"] = reading.mapping(_hex, 0, len(GROUPS))
    return _read(keys, body, kind)


def line_hash(line: bytes) -> str:
    """Return the SHA-256 (hex) of a line without its newline."""
    return hashlib.sha256(line.removesuffix(b"\n")).hexdigest()


def _read(keys: reading.Keys, body: Mapping[str, Any], where: str) -> dict[str, Any]:
    checked: dict[str, Any] = reading.record(keys)(body, where)
    return checked


def _line(chain: Chain, kind: str, values: Mapping[str, Any]) -> bytes:
    return _canonical({"line": kind, "previous": chain.previous, **values}) + b"\n"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _sum_values(record: SumRecord) -> dict[str, Any]:
    return {
        "epoch": record.epoch,
        "slot": record.slot,
        "sum_id": record.sum_id.as_value(),
        "schema": record.schema,
        "basis": record.basis.hex(),
        "rests_on": None if record.rests_on is None else _told_values(record.rests_on),
        "receipts": [
            {
                "name": item.name,
                "slot": item.slot,
                "sum_id": item.sum_id.as_value(),
                "basis": item.basis.hex(),
                "total": item.total.hex(),
                "combinations": {group: _base64_text(data) for group, data in item.combinations.items()},
                "follows": item.follows,
                "update": item.update.hex(),
                "static": item.static.hex(),
                "pairs": item.pairs.hex(),
                "signature": _base64_text(item.signature),
            }
            for item in sorted(record.receipts, key=lambda item: item.name)
        ],
        "survivors": sorted(record.survivors),
        "agreements": [
            {"name": item.name, "slot": item.slot, "signature": _base64_text(item.signature)}
            for item in sorted(record.agreements, key=lambda item: item.name)
        ],
        "proved": sorted(record.proved),
    }


def _told_values(told: Told) -> dict[str, Any]:
    return {
        "slot": told.slot,
        "sum_id": told.sum_id.as_value(),
        "schema": told.schema,
        "survivors": list(told.survivors),
        "hashes": {group: data.hex() for group, data in told.hashes.items()},
        "receipts": told.receipts.hex(),
    }


def _base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _utc(time: datetime) -> str:
    if time.utcoffset() is None:
        raise ValueError("Expected argument `time` to have a time zone, but got a naive datetime.")
    return time.astimezone(UTC).isoformat(timespec="seconds")


def _base64(least: int, most: int) -> reading.Check:
    def check(value: object, where: str) -> bytes:
        try:
            data = base64.b64decode(value, validate=True) if isinstance(value, str) else None
        except ValueError:
            data = None
        # Each value has one text: a decoder alone would ignore bits after the last byte.
        if data is None or _base64_text(data) != value or not least <= len(data) <= most:
            raise MessageError(
                where, expected=f"base64 of {least} to {most} bytes", found=reading.described(value)
            )
        return data

    return check


def _hex(value: object, where: str) -> bytes:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * HASH_BYTES}}}", value):
        raise MessageError(
            where, expected=f"{HASH_BYTES} bytes in lower-case hex", found=reading.described(value)
        )
    return bytes.fromhex(value)


def _time(value: object, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    if time is None or time.utcoffset() != timedelta(0) or _utc(time) != value:
        raise MessageError(
            where, expected="a time as 2030-12-31T23:59:59+00:00", found=reading.described(value)
        )
    return time


def _code(value: object, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch("TF-[0-9]{3}", value):
        raise MessageError(where, expected="a code such as TF-501", found=reading.described(value))
    return value


def _reason(value: object, where: str) -> str | None:
    return None if value is None else str(reading.text(MAX_WORDS)(value, where))


_SIGNATURE = _base64(SIGNATURE_BYTES, SIGNATURE_BYTES)
_GROUPS = reading.sequence(reading.one_of(*GROUPS), 1, len(GROUPS))
_ADVERTISEMENT = _base64(1, MAX_ADVERTISEMENT)
_COMBINATIONS = by_group(_base64(0, MAX_COMBINATIONS))
_AGREEMENT_KEYS: reading.Keys = {
    "name": reading.text(64),
    "slot": reading.integer(0, MAX_SLOTS - 1),
    "signature": _SIGNATURE,
}
_AGREEMENT = reading.built(Agreement, _AGREEMENT_KEYS)
_AGREEMENT_2 = reading.built(Agreement2, {**_AGREEMENT_KEYS, "combinations": _COMBINATIONS})
_RECEIPT_KEYS: reading.Keys = {
    **_AGREEMENT_KEYS,
    "sum_id": read_sum_id,
    "basis": _hex,
    "total": _hex,
    "follows": reading.flag,
    "update": _hex,
    "static": _hex,
}
_RECEIPT = reading.built(Receipt, {**_RECEIPT_KEYS, "pairs": _hex, "combinations": _COMBINATIONS})
_RECEIPT_2 = reading.built(Receipt2, {**_RECEIPT_KEYS, "seed": _hex})
_TOLD_KEYS: reading.Keys = {
    "slot": reading.integer(0, MAX_SLOTS - 1),
    "sum_id": read_sum_id,
    "schema": reading.text(256),
    "survivors": reading.sequence(reading.text(64), 1, MAX_SITES),
    "hashes": by_group(_hex),
}
_TOLD = reading.built(Told, {**_TOLD_KEYS, "receipts": _hex})


def _maybe_told(value: object, where: str) -> Told | None:
    return None if value is None else cast(Told, _TOLD(value, where))


def _maybe_told_2(value: object, where: str) -> Told | None:
    if value is None:
        return None
    return Told(**reading.record(_TOLD_KEYS)(value, where), receipts=b"")


_RECEIPT_1 = reading.built(
    Receipt1,
    {
        "name": reading.text(64),
        "slot": reading.integer(0, MAX_SLOTS - 1),
        "sum_id": read_sum_id,
        "broadcast": _hex,
        "update": _hex,
        "static": _hex,
        "signature": _SIGNATURE,
    },
)

BODIES: Mapping[str, reading.Keys] = {
    "run": {
        "format": reading.integer(1, FORMAT),
        "view": reading.text(64),
        "job": reading.text(256),
        "version": reading.text(64),
        "started": _time,
    },
    "session": {
        "params": _base64(1, MAX_LINE),
        "advertisements": reading.sequence(_ADVERTISEMENT, 1, MAX_SITES),
        "ready": reading.mapping(_SIGNATURE, 1, MAX_SITES),
        "time": _time,
    },
    "end": {"reason": _reason, "sums": reading.integer(0, 2**53)},
}
SUM: reading.Keys = {
    "epoch": reading.integer(0, 2**31),
    "slot": reading.integer(0, MAX_SLOTS - 1),
    "sum_id": read_sum_id,
    "schema": reading.text(256),
    "basis": _hex,
    "rests_on": _maybe_told,
    "receipts": reading.sequence(_RECEIPT, 0, MAX_SITES),
    "survivors": reading.sequence(reading.text(64), 0, MAX_SITES),
    "agreements": reading.sequence(_AGREEMENT, 0, MAX_SITES),
    "proved": reading.sequence(reading.text(64), 0, MAX_SITES),
}
SUM_1: reading.Keys = {
    **{key: SUM[key] for key in ("epoch", "slot", "sum_id", "schema", "survivors")},
    "broadcast": _hex,
    "receipts": reading.sequence(_RECEIPT_1, 0, MAX_SITES),
    "agreements": reading.mapping(_SIGNATURE, 0, MAX_SITES),
}
"""The keys of a sum in a transcript of format 1 (``earlier_formats``)."""
SUM_2: reading.Keys = {
    **SUM,
    "rests_on": _maybe_told_2,
    "receipts": reading.sequence(_RECEIPT_2, 0, MAX_SITES),
    "agreements": reading.sequence(_AGREEMENT_2, 0, MAX_SITES),
}
"""The keys of a sum in a transcript of format 2 (``earlier_formats``)."""
SUMS: Mapping[int, reading.Keys] = {1: SUM_1, 2: SUM_2, FORMAT: SUM}
