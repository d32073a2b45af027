"""A federation's profile and the participants' request files for the engine's provisioning.

The profile goes to the holder of the federation's root key, each request file to its participant. Private
keys are generated where they are used: nothing here holds or moves one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROFILE = "project.yml"
REQUESTS = "requests"

Kind = Literal["server", "client", "admin"]
Role = Literal["lead", "member", "org_admin"]

# Names that both the engine and this package accept.
_NAMES = {
    "client": (re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"), "letters, digits, - and _, 63 at most"),
    "server": (
        re.compile(
            r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
        ),
        "the host name under which every site reaches it",
    ),
    "admin": (re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}"), "an e-mail address"),
}
_ORGANISATION = re.compile(r"[A-Za-z0-9_]+")
_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True)
class Participant:
    """A participant that requests a certificate.

    Attributes:
        name: a silo's name, the server's host name, or a person's e-mail address.
        organisation: people operate the sites of their own.
        kind: the engine's name for the kind of participant.
        role: of a person.
    """

    name: str
    organisation: str
    kind: Kind
    role: Role | None = None

    @classmethod
    def parse(cls, text: str, kind: Kind, role: Role | None = None) -> Participant:
        """Parse ``NAME=ORGANISATION``, or ``NAME`` alone for an organisation of that name.

        Raises:
            ValueError: if provisioning does not accept one of them.
        """
        name, separator, organisation = (part.strip() for part in text.partition("="))
        pattern, expected = _NAMES[kind]
        if not pattern.fullmatch(name):
            raise ValueError(f"expected {expected}, got {name!r}")
        if not separator:
            organisation = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if not _ORGANISATION.fullmatch(organisation):
            raise ValueError(f"expected an organisation of letters, digits and _, got {organisation!r}")
        return cls(name, organisation, kind, role)

    def request(self, project: str) -> str:
        """Return the file for ``nvflare cert request -p``; JSON strings are always valid YAML."""
        lines = [f"  - name: {json.dumps(self.name)}", f"    type: {self.kind}"]
        lines.append(f"    org: {json.dumps(self.organisation)}")
        lines += [f"    role: {self.role}"] if self.role is not None else []
        return f"name: {json.dumps(project)}\nparticipants:\n" + "\n".join(lines) + "\n"


def profile(project: str, server: str, port: int) -> str:
    """Return the file for ``nvflare cert init --profile``: mutual TLS, one port for silos and console.

    Raises:
        ValueError: if provisioning does not accept the project's name.
    """
    if not _PROJECT.fullmatch(project):
        raise ValueError(f"expected letters, digits, - and _, 63 at most, got {project!r}")
    return (
        f"name: {json.dumps(project)}\n"
        "scheme: grpc\n"
        "connection_security: mtls\n"
        "server:\n"
        f"  host: {json.dumps(server)}\n"
        f"  fed_learn_port: {port}\n"
        f"  admin_port: {port}\n"
    )


def files(project: str, port: int, participants: list[Participant]) -> dict[Path, str]:
    """Return the profile and a request file for each participant, as relative path -> content.

    Raises:
        ValueError: if there is not one server, or two participants share a name.
    """
    servers = [participant for participant in participants if participant.kind == "server"]
    if len(servers) != 1:
        raise ValueError(f"expected one server, got {len(servers)}")
    content = {Path(PROFILE): profile(project, servers[0].name, port)}
    for participant in participants:
        path = Path(REQUESTS, f"{participant.name}.yml")
        if path in content:
            raise ValueError(f"expected every participant once, got {participant.name!r} twice")
        content[path] = participant.request(project)
    return content


def write(content: dict[Path, str], folder: Path) -> tuple[list[Path], list[Path]]:
    """Write the files that do not exist yet; leave those with the same content untouched.

    Returns:
        The written files, and those that existed already.

    Raises:
        FileExistsError: if a file exists with other content; then nothing is written.
    """
    existing = [path for path in content if (folder / path).exists()]
    differing = [str(folder / path) for path in existing if (folder / path).read_text() != content[path]]
    if differing:
        raise FileExistsError(
            f"Expected to write a federation's files, but others exist: {', '.join(differing)}. Nothing was "
            "written. Give the same values as the first time, or another folder."
        )
    new = [path for path in content if path not in existing]
    for path in new:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content[path])
    return new, existing
