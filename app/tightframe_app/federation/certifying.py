"""``tightframe federation certify``: certify requests as the keeper of the root key, after a call to each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tightframe.errors import JoinError
from tightframe.files import write_json
from tightframe_app.federation.provisioner import (
    REQUESTED,
    certified_code,
    described,
    is_a,
    key_code,
    provisioner,
    zipped,
)
from tightframe_app.screens import shown

ISSUED = "issued.json"
"""File in the root key's folder: names with certified keys and dates."""


@dataclass(frozen=True)
class Request:
    """A participant's request, unverified.

    Attributes:
        values: its ``request.json``.
        code: of its key, which the participant reads to the keeper.
    """

    path: Path
    values: dict[str, Any]
    code: str

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read a request.

        Raises:
            JoinError: TF-751, if it is not a request.
        """
        values = described(path, REQUESTED)
        csr = None if values is None else zipped(path, f"{values['name']}.csr")
        code = None if csr is None else key_code(csr[0])
        if values is None or code is None:
            raise JoinError(
                f"Expected a participant's request, NAME.request.zip, but {path} is none. "
                "Nothing was certified."
            )
        return cls(path, values, code)

    @property
    def name(self) -> str:
        """The participant's name."""
        return str(self.values["name"])

    def described(self) -> str:
        """Describe what would be certified: name, kind or role, organisation."""
        kind = is_a(self.values["kind"], self.values.get("cert_role"))
        return f"{self.name}, {kind}, of {shown(self.values['org'])}"


def certify(
    requests: list[Request], ca: Path, profile: Path, output: Path, confirmed: Callable[[Request], bool]
) -> tuple[list[tuple[Request, Path]], list[Request]]:
    """Certify the confirmed requests.

    Args:
        ca: folder with the root's key.
        profile: the federation's.
        confirmed: called before each is certified.

    Returns:
        The certified requests, including earlier ones, each with the zip for its sender, and the requests
        that were not confirmed.

    Raises:
        JoinError: TF-751, if two requests have one name; TF-755, if another was answered or certified;
            TF-752, if the engine refused, or certified something else.
    """
    names = [request.name for request in requests]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise JoinError(
            f"Expected one request of each participant, got several of {', '.join(duplicates)}. "
            "Nothing was certified."
        )
    certified, declined = [], []
    output.mkdir(parents=True, exist_ok=True)
    answers = [output.resolve() / f"{request.name}.signed.zip" for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        if answer.exists() and _certified(answer, request.name) != request.code:
            raise JoinError(
                f"Expected no answer to another request of {request.name}, but there is {answer}. Nothing "
                "was certified. Remove it, or name another folder with --output.",
                code="TF-755",
            )
    _refuse_issued(requests, ca)
    for request, answer in zip(requests, answers, strict=True):
        if answer.exists():
            certified.append((request, answer))
            continue
        if not confirmed(request):
            declined.append(request)
            continue
        words: list[str | Path] = [
            request.path.resolve(),
            "-c",
            ca.resolve(),
            "--profile",
            profile.resolve(),
            "--out",
            answer,
        ]
        values = provisioner("cert", "approve", *words)
        keys = ("request_id", "name", "org", "kind", "cert_role")
        same = all(values.get(key) == request.values.get(key) for key in keys)
        if not same or _certified(answer, request.name) != request.code:
            answer.unlink()
            raise JoinError(
                f"Expected to certify {request.described()}, but {request.path} was exchanged meanwhile. Its "
                "certificate was deleted.",
                code="TF-752",
            )
        _note_issued(request, ca)
        certified.append((request, answer))
    return certified, declined


def _issued(ca: Path) -> dict[str, dict[str, str]]:
    """Return the certified names, each with the code of its key and the date.

    Raises:
        JoinError: TF-755, if the file cannot be read.
    """
    path = ca / ISSUED
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(name): {"key": str(entry["key"]), "on": str(entry["on"])} for name, entry in values.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise JoinError(
            f"Expected the names that were certified in {path}, but it cannot be read. Nothing was "
            "certified. Put its backup back, or remove it: then no second key of a name is noticed.",
            code="TF-755",
        ) from None


def _refuse_issued(requests: list[Request], ca: Path) -> None:
    """Refuse a second key of a certified name."""
    issued = _issued(ca)
    for request in requests:
        entry = issued.get(request.name)
        if entry is not None and entry["key"] != request.code:
            raise JoinError(
                f"Expected the first key of {request.name}, but its key {entry['key']} was certified on "
                f"{entry['on']}, and stays valid. Nothing was certified. Call {request.name} back. A renewed "
                "certificate, or a second account's, is certified by `nvflare cert approve` "
                "(docs/operations.md, One at a time).",
                code="TF-755",
            )


def _note_issued(request: Request, ca: Path) -> None:
    entry = {"key": request.code, "on": f"{datetime.now(UTC):%Y-%m-%d}"}
    write_json(ca / ISSUED, _issued(ca) | {request.name: entry})


def _certified(answer: Path, name: str) -> str | None:
    """Return the code of an answer's certified key."""
    content = zipped(answer, f"{name}.crt")
    return None if content is None else certified_code(content[0])
