"""``tightframe federation certify``: the keeper of the root key certifies requests, after a call each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightframe.errors import JoinError
from tightframe_app.federation.provisioner import REQUESTED, SIGNED, described, is_a, provisioner
from tightframe_app.screens import shown


@dataclass(frozen=True)
class Request:
    """A participant's request, by its own words.

    Attributes:
        path: the zip.
        values: its ``request.json``.
    """

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read a request.

        Raises:
            JoinError: TF-751, if it is none.
        """
        values = described(path, REQUESTED)
        if values is None:
            raise JoinError(
                f"Expected a participant's request, NAME.request.zip, but {path} is none. "
                "Nothing was certified."
            )
        return cls(path, values)

    @property
    def name(self) -> str:
        """The participant's name."""
        return str(self.values["name"])

    @property
    def number(self) -> str:
        """Its id, which the participant reads to the keeper."""
        return str(self.values["request_id"])

    def described(self) -> str:
        """Return what would be certified: name, kind or role, organisation."""
        kind = is_a(self.values["kind"], self.values.get("cert_role"))
        return f"{self.name}, {kind}, of {shown(self.values['org'])}"


def certify(
    requests: list[Request], ca: Path, profile: Path, output: Path, confirmed: Callable[[Request], bool]
) -> tuple[list[tuple[Request, Path]], list[Request]]:
    """Certify the requests that are confirmed.

    Args:
        requests: of different participants.
        ca: folder with the root's key.
        profile: the federation's.
        output: folder for the answers.
        confirmed: asked before each is certified.

    Returns:
        Each certified request with the zip for its sender, those included that were certified before, and
        the requests that were not confirmed.

    Raises:
        JoinError: TF-751, if two requests have one name; TF-755, if another was answered; TF-752, if the
            engine refused, or certified something else.
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
        if answer.exists() and (described(answer, SIGNED) or {}).get("request_id") != request.number:
            raise JoinError(
                f"Expected no answer to another request of {request.name}, but there is {answer}. Nothing "
                "was certified. Remove it, or name another folder with --output.",
                code="TF-755",
            )
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
        if any(values.get(key) != request.values.get(key) for key in keys):
            answer.unlink()
            raise JoinError(
                f"Expected to certify {request.described()}, but {request.path} was exchanged meanwhile. Its "
                "certificate was deleted.",
                code="TF-752",
            )
        made.append((request, answer))
    return made, left
