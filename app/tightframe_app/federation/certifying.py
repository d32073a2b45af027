"""``tightframe federation certify``: the keeper of the root key certifies requests, after a call each."""

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
"""File in the root key's folder: whose key was certified when."""


@dataclass(frozen=True)
class Request:
    """A participant's request, by its own words.

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
            JoinError: TF-751, if it is none.
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
        """Return what would be certified: name, kind or role, organisation."""
        kind = is_a(self.values["kind"], self.values.get("cert_role"))
        return f"{self.name}, {kind}, of {shown(self.values['org'])}"


def certify(
    requests: list[Request], ca: Path, profile: Path, output: Path, confirmed: Callable[[Request], bool]
) -> tuple[list[tuple[Request, Path]], list[Request]]:
    """Certify the requests that are confirmed.

    Args:
        ca: folder with the root's key.
        profile: the federation's.
        confirmed: asked before each is certified.

    Returns:
        Each certified request with the zip for its sender, those included that were certified before, and
        the requests that were not confirmed.

    Raises:
        JoinError: TF-751, if two requests have one name; TF-755, if another was answered or certified;
            TF-752, if the engine refused, or certified something else.
    """
    names = [request.name for request in requests]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise JoinError(
            f"Expected one request of each participant, got several of {', '.join(twice)}. "
            "Nothing was certified."
        )
    made, left = [], []
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
            made.append((request, answer))
            continue
        if not confirmed(request):
            left.append(request)
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
        made.append((request, answer))
    return made, left


def _issued(ca: Path) -> dict[str, dict[str, str]]:
    """Return the names that were certified: each with the code of its key, and when.

    Raises:
        JoinError: TF-755, if the file cannot be read.
    """
    path = ca / ISSUED
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): {"key": str(one["key"]), "on": str(one["on"])} for name, one in values.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise JoinError(
            f"Expected the names that were certified in {path}, but it cannot be read. Nothing was "
            "certified. Put its backup back, or remove it: then no second key of a name is noticed.",
            code="TF-755",
        ) from None


def _refuse_issued(requests: list[Request], ca: Path) -> None:
    """Refuse another key of a name that has a certificate."""
    issued = _issued(ca)
    for request in requests:
        one = issued.get(request.name)
        if one is not None and one["key"] != request.code:
            raise JoinError(
                f"Expected the first key of {request.name}, but its key {one['key']} was certified on "
                f"{one['on']}, and stays valid. Nothing was certified. Call {request.name} back. A renewed "
                "certificate, or a second account's, is certified by `nvflare cert approve` "
                "(docs/operations.md, One at a time).",
                code="TF-755",
            )


def _note_issued(request: Request, ca: Path) -> None:
    one = {"key": request.code, "on": f"{datetime.now(UTC):%Y-%m-%d}"}
    write_json(ca / ISSUED, _issued(ca) | {request.name: one})


def _certified(answer: Path, name: str) -> str | None:
    """Return the code of the key that an answer certifies."""
    content = zipped(answer, f"{name}.crt")
    return None if content is None else certified_code(content[0])
