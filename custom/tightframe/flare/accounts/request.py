"""Messages between the engine's launcher and the training service, over a UNIX socket.

One connection starts and controls one job. The engine's side sends one request and then at most one
byte; the service answers that the job was started or refused, and later how it ended. An attacker may
control the engine's account: nothing in a request names a command, a path, an argument or an environment
variable. The service takes everything else that it needs from its own kit.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import socket
import struct
import time
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, Field, ValidationError

from tightframe.config.job_manifest import APP_FILES
from tightframe.errors import TightframeError
from tightframe.files import each_once
from tightframe.options import StrictModel

SOCKET = "/run/tightframe/training.sock"
"""Default path of the service's socket."""
KILL = b"K"
"""Byte that kills the job at once; closing the connection terminates it, and kills it seconds later."""
MAX_MESSAGE = 4 * 2**20
"""Size of the largest message, in bytes: a job folder is configuration of a few KiB."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CREDENTIAL = re.compile(r"[A-Za-z0-9+/=_.:-]{1,4096}")
META = frozenset(
    {"job_id", "name", "job_clients", "scope", "submitter_name", "submitter_org", "submitter_role", "study"}
)
"""Keys of a job's metadata that its process may see; the engine's others start programs or write files."""


class AccountError(TightframeError):
    """The two accounts of a site are not apart, or the start of a job was refused.

    TF-741: no training service; TF-742: the engine's account can reach the training account's files;
    TF-743: request refused; TF-744: caller refused; TF-745: one key for both accounts.
    """

    code = "TF-743"


def _matches(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"Expected {what}")
        return text

    return AfterValidator(check)


def _known_files(files: dict[str, bytes]) -> dict[str, bytes]:
    if strange := set(files) - APP_FILES:
        raise ValueError(f"Expected only files of a job without code, but got {len(strange)} others")
    return files


def _flat(meta: dict[str, Any]) -> dict[str, Any]:
    if meta.get("byoc"):
        raise ValueError("Expected a job without code of its own")
    return meta


Credential = Annotated[str, _matches(_CREDENTIAL, "a credential of the engine")]


class Start(StrictModel):
    """A request to start the process of one job.

    Attributes:
        job: its id.
        port: of the engine client's listener for its jobs, on the loopback interface.
        token: the engine's token for the site's registration at the server.
        token_signature: the server's signature over the token.
        ssid: id of the server's session.
        certificate: the engine's own, in PEM, to be compared with the training account's.
        meta: the job's metadata; the service keeps the keys in ``META``.
        files: of the deployed app, relative path -> content.
    """

    job: Annotated[str, _matches(_UUID, "a job's id")]
    port: int = Field(ge=1, le=65535)
    token: Credential
    token_signature: Credential
    ssid: Credential
    certificate: str = Field(max_length=65536)
    meta: Annotated[dict[str, Any], AfterValidator(_flat)]
    files: Annotated[dict[str, bytes], AfterValidator(_known_files)]

    def __repr__(self) -> str:
        """Return the job alone: the other fields hold credentials."""
        return f"Start(job={self.job!r})"

    __str__ = __repr__

    def to_bytes(self) -> bytes:
        """Return the message."""
        values = self.model_dump()
        values["files"] = {name: base64.b64encode(content).decode() for name, content in self.files.items()}
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, message: bytes) -> Start:
        """Parse a request, which is untrusted.

        Raises:
            AccountError: TF-743; the text names the fields that are wrong and shows no value.
        """
        try:
            values = json.loads(message, object_pairs_hook=each_once, parse_constant=_refuse_constant)
            files = values["files"]
            values["files"] = {name: base64.b64decode(text, validate=True) for name, text in files.items()}
            request = cls.model_validate(values)
            # The metadata, which the job's process reads, repeats the id.
            if request.meta.get("job_id") != request.job:
                raise AccountError("Expected the requested job's metadata, but got another job's.")
        except ValidationError as error:
            places = sorted({str(item["loc"][0])[:40] if item["loc"] else "it" for item in error.errors()})
            raise AccountError(
                f"Expected a request from the engine's launcher, but got one with errors in: {places[:8]}."
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, binascii.Error):
            raise AccountError(
                "Expected a request from the engine's launcher, but got something else."
            ) from None
        return request


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError("not JSON")


def send(connection: socket.socket, message: bytes) -> None:
    """Send one message: its length in four bytes, then the message itself."""
    connection.sendall(struct.pack(">I", len(message)) + message)


def receive(connection: socket.socket, seconds: float, limit: int = MAX_MESSAGE) -> bytes:
    """Return the next message, which must arrive as a whole within some seconds.

    Raises:
        AccountError: TF-743, if it is too long, late or cut short.
    """
    until = time.monotonic() + seconds
    (length,) = struct.unpack(">I", _exactly(connection, 4, until))
    if length > limit:
        raise AccountError(f"Expected a message of at most {limit} bytes, but got one of {length}.")
    return _exactly(connection, length, until)


def _exactly(connection: socket.socket, number: int, until: float) -> bytes:
    parts = bytearray()
    while len(parts) < number:
        remaining = until - time.monotonic()
        try:
            if remaining <= 0:
                raise TimeoutError
            connection.settimeout(remaining)
            part = connection.recv(min(number - len(parts), 65536))
        except TimeoutError:
            raise AccountError("Expected a whole message in time, but it did not arrive.") from None
        except OSError as error:
            raise AccountError(f"Expected a whole message, but got: {error.strerror}.") from None
        if not part:
            raise AccountError("Expected a whole message, but the connection ended.")
        parts += part
    return bytes(parts)


def peer(connection: socket.socket) -> int:
    """Return the user id of the account at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])
